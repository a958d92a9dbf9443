"""The virtual NPU itself: its memory, its ops, capture and replay, and what it refuses."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import npu_moe_ops.virtual_npu as virtual_npu
from npu_moe_ops.virtual_npu import Refused, aten, device, stubs, wheel
from npu_moe_ops.virtual_npu.__main__ import main

REPOSITORY = Path(__file__).parents[2]
VOID = "the capture is void"


def npu(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.npu(), tree)


def cpu(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), tree)


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Starting


def test_start_twice_is_once():
    assert virtual_npu.start() is virtual_npu.start() is sys.modules["torch_npu"]
    assert aten.install() == 0
    assert torch.npu.device_count() == 1


def test_public_names():
    assert virtual_npu.__all__ == sorted(virtual_npu.__all__)
    assert all(hasattr(virtual_npu, name) for name in virtual_npu.__all__)


def test_refuses_a_machine_with_cann():
    done = python("-c", "import npu_moe_ops.virtual_npu as v; v.start()", ASCEND_HOME_PATH="/usr/local/Ascend")
    assert done.returncode == 1
    assert "Refused: CANN is set up here (ASCEND_HOME_PATH=/usr/local/Ascend)" in done.stderr


def test_refuses_where_it_cannot_start(monkeypatch):
    with pytest.raises(Refused, match="before torch_npu is imported"):
        virtual_npu._refuse_what_cannot_be()
    monkeypatch.delitem(sys.modules, "torch_npu")
    with pytest.raises(Refused, match=r"CANN is set up here \(libascendcl\.so can be loaded\)"):
        virtual_npu._refuse_what_cannot_be()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(Refused, match=r"needs a CPU build of torch, got 2\..* for GPUs"):
        virtual_npu._refuse_what_cannot_be()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Refused, match="needs Linux, got darwin"):
        virtual_npu._refuse_what_cannot_be()


def test_refuses_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Refused, match=r"a C compiler must be installed .* got none called 'no-such-compiler'"):
        stubs.build(wheel.find())
    monkeypatch.setenv("CC", "false")
    with pytest.raises(Refused, match="could not be built: false -shared"):
        stubs.build(wheel.find())
    assert not list((tmp_path / "npu_moe_ops").iterdir())


def test_wheel_folder_must_hold_it(monkeypatch):
    monkeypatch.setenv(wheel.FOLDER, "/nowhere")
    with pytest.raises(Refused, match="must be a folder with the package torch_npu in it, got /nowhere"):
        wheel.find()


def test_says_how_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv(wheel.FOLDER, raising=False)
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(Refused, match=r"python -m npu_moe_ops\.virtual_npu --install"):
        wheel.find()


def test_names_what_the_wheel_lacks(monkeypatch, tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu/__init__.py").touch()
    monkeypatch.setenv(wheel.FOLDER, str(tmp_path))
    monkeypatch.setattr(wheel, "HELPERS", {"no_such_module": "thing", "no_such.module": "other", "os": "os"})
    with pytest.raises(Refused, match=r"needs other, thing, got none; pip install 'npu-moe-ops\[virtual-npu\]'"):
        wheel.find()


def test_wheel_of_another_torch(monkeypatch, tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu/__init__.py").touch()
    info = tmp_path / "torch_npu-2.1.0.post3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.1.0.post3\n")
    monkeypatch.setenv(wheel.FOLDER, str(tmp_path))
    with pytest.raises(Refused, match=rf"torch's version {wheel.torch_release()}, got 2\.1\.0\.post3"):
        wheel.find()


def test_several_processes_build_at_once(tmp_path):
    code = "from npu_moe_ops.virtual_npu import stubs, wheel; print(len(stubs.build(wheel.find())))"
    done = []
    build = lambda: done.append(python("-c", code, XDG_CACHE_HOME=str(tmp_path)))  # noqa: E731
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.stdout for process in done] == ["8\n"] * 2, done[0].stderr + done[1].stderr
    assert len(list((tmp_path / "npu_moe_ops").iterdir())) == 1


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = stubs._cache_folder()
    assert folder.is_dir()
    assert tmp_path not in folder.parents


# Running a program


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    path = tmp_path / "program.py"
    path.write_text(
        "import sys\nimport torch\nimport torch_npu\nimport beside\n\n\n"
        "def fail():\n    raise KeyError('wrong')\n\n\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], (torch.ones(2).npu() * beside.VALUE).tolist())\n"
        "    if sys.argv[1] == 'raise':\n        fail()\n"
        "    sys.exit(int(sys.argv[1]))\n"
    )
    return path


def test_runs_a_script(script):
    done = python("-W", "error", "-m", "npu_moe_ops.virtual_npu", script, "7", "--install", "-m")
    assert done.stdout == "['7', '--install', '-m'] [5.0, 5.0]\n", done.stderr
    assert done.returncode == 7


def test_runs_a_module_and_shows_its_error(script):
    path = f"{REPOSITORY}{os.pathsep}{script.parent}"
    done = python("-m", "npu_moe_ops.virtual_npu", "-m", "program", "raise", "-x", PYTHONPATH=path)
    assert done.stdout.startswith("['raise', '-x'] [5.0, 5.0]\n"), done.stderr
    assert done.returncode == 1
    trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert [line.split(",")[-1] for line in trace if "File" in line] == [" in <module>", " in fail"]
    assert "KeyError: 'wrong'" in trace


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_nothing_to_run(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "a script or -m module must be given" in capsys.readouterr().err


# Memory and launches


def test_view_shares_memory():
    x = torch.arange(12.0).npu().view(3, 4)[1:, ::2]
    view = virtual_npu.view(x)
    assert view.device.type == "cpu"
    assert view.stride() == x.stride() == (4, 2)
    assert torch.equal(view, torch.tensor([[4.0, 6.0], [8.0, 10.0]]))
    view[1, 1] = -1
    assert x[1, 1].item() == -1


def test_view_of_nothing():
    assert virtual_npu.view(torch.empty(0, 3, device="npu")).shape == (0, 3)


def test_new_memory_is_poisoned():
    torch.npu.empty_cache()
    assert torch.empty(1 << 23, device="npu").isnan().all()


def test_launch_runs_now():
    a, out = torch.randn(5).npu(), torch.empty(5, device="npu")
    virtual_npu.launch(lambda a, out: torch.mul(a, 2, out=out), a, out)
    assert torch.equal(out, a + a)
    assert not virtual_npu.capturing()


def test_launch_refuses_cpu_tensors():
    with pytest.raises(Refused, match="must get tensors on 'npu', got one on 'cpu'"):
        virtual_npu.launch(lambda a: None, torch.ones(2))


def test_operators_of_cann_are_refused():
    with pytest.raises(RuntimeError, match="operator Swish was sent to CANN, which is not here"):
        torch.ops.npu.npu_silu(torch.ones(4, device="npu"))


def test_absent_aclnn_operators_are_refused():
    with pytest.raises(RuntimeError, match=r"not in libopapi\.so"):
        torch.nn.LSTMCell(6, 6).npu()(torch.ones(2, 6, device="npu"))


def test_nz_format_is_refused():
    with pytest.raises(RuntimeError):
        sys.modules["torch_npu"].npu_format_cast(torch.ones(32, 32, device="npu").half(), 29)


# Ops of torch

INTEGERS = torch.tensor([3, 1, 2, 1, 0])
FUNCTIONS = {
    "add_scalar": lambda x: x + 2,
    "add_cpu_scalar": lambda x: x + torch.tensor(2.0, dtype=x.dtype),
    "addmm": lambda x: torch.addmm(x[0, :6], x, x.t()),
    "amax": lambda x: x.amax(1),
    "any": lambda x: (x > 1).any(),
    "argmax": lambda x: x.argmax(1),
    "argsort": lambda x: x.argsort(stable=True),
    "baddbmm": lambda x: torch.baddbmm(x[None, :, :6], x[None], x.t()[None]),
    "cast": lambda x: x.to(torch.float16),
    "cat": lambda x: torch.cat([x, x[:2]]),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "contiguous": lambda x: x.t().contiguous(),
    "cummax": lambda x: x.cummax(1),
    "cumsum": lambda x: x.cumsum(0),
    "div": lambda x: x / (x.abs() + 1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "embedding": lambda x: F.embedding(INTEGERS.to(x.device), x),
    "expand": lambda x: x[:, :1].expand(6, 4) + 1,
    "flip": lambda x: x.flip(0),
    "floor_divide": lambda x: INTEGERS.to(x.device) // 2,
    "gather": lambda x: x.gather(1, INTEGERS.to(x.device)[None].expand(6, 5)),
    "gelu": lambda x: F.gelu(x),
    "index": lambda x: x[INTEGERS.to(x.device)],
    "index_add": lambda x: torch.zeros_like(x).index_add(0, INTEGERS.to(x.device), x[:5]),
    "index_by_cpu": lambda x: x[INTEGERS],
    "index_put": lambda x: x.clone().index_put((INTEGERS.to(x.device),), x[:5, 0, None], accumulate=True),
    "index_select": lambda x: x.index_select(0, INTEGERS.to(x.device)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "linspace": lambda x: torch.linspace(0, 1, 7, device=x.device, dtype=x.dtype),
    "logsumexp": lambda x: x.logsumexp(1),
    "masked": lambda x: x[x > 0],
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.5),
    "matmul": lambda x: torch.matmul(x[None], x.t()),
    "mean": lambda x: x.mean(0),
    "mm_out": lambda x: torch.mm(x, x.t(), out=torch.empty(0, dtype=x.dtype, device=x.device)),
    "nonzero": lambda x: (x > 0).nonzero(),
    "one_hot": lambda x: F.one_hot(INTEGERS.to(x.device), 4),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "repeat_interleave": lambda x: (
        x.repeat_interleave(INTEGERS.to(x.device), 0, output_size=7)
        if x.shape[0] == 5
        else x[:5].repeat_interleave(INTEGERS.to(x.device), 0)
    ),
    "roll": lambda x: x.roll(1, 0),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, INTEGERS.to(x.device)[:, None].expand(5, 8), x[:5]),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "searchsorted": lambda x: torch.searchsorted(x[0].sort()[0], x[1]),
    "setitem": lambda x: _set(x.clone()),
    "sigmoid": lambda x: x.sigmoid(),
    "silu": F.silu,
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1, descending=True),
    "split": lambda x: x.split([2, 4]),
    "std": lambda x: x.std(1),
    "sum": lambda x: x.sum(),
    "topk": lambda x: x.topk(3),
    "triu": lambda x: x.triu(),
    "unique": lambda x: INTEGERS.to(x.device).unique(return_counts=True),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "bincount": lambda x: INTEGERS.to(x.device).bincount(minlength=6),
    "histc": lambda x: torch.histc(INTEGERS.float().to(x.device), 4, 0, 3),
    "arange": lambda x: torch.arange(2, 9, 2, device=x.device),
}


def _set(x):
    x[INTEGERS.to(x.device)] = 0
    x[0, 1:3] = x[1, 2:4]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_equals_cpu(name, dtype):
    x = torch.randn(6, 8).to(dtype)
    torch.testing.assert_close(cpu(FUNCTIONS[name](x.npu())), FUNCTIONS[name](x), rtol=0, atol=0, equal_nan=True)


def test_integers_have_a_histogram():
    assert torch.equal(torch.histc(INTEGERS.npu(), 4, 0, 3).cpu(), INTEGERS.bincount())


def test_adam_trains():
    weight = torch.nn.Parameter(torch.ones(3, device="npu"))
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0)
    weight.square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach().cpu(), torch.full((3,), 0.5))


def test_in_place_and_out():
    x = torch.randn(4, 3).npu()
    before = x.cpu()
    row = x[1]
    assert row.mul_(2) is row
    assert torch.equal(x[1].cpu(), before[1] * 2)
    out = torch.empty(0, device="npu")
    assert torch.add(x, 1, out=out) is out
    assert torch.equal(out.cpu(), x.cpu() + 1)
    target = torch.zeros(4, 4, device="npu")
    torch.add(x, 1, out=target[:, 1:])
    assert torch.equal(target[:, 1:], out)


def test_mixed_devices_are_an_error():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3).npu() + torch.ones(3)


def test_random_numbers():
    torch.manual_seed(5)
    state = torch.npu.get_rng_state()
    first, second = torch.randn(4, device="npu"), torch.randn(4, device="npu")
    assert not torch.equal(first, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="npu"), first)
    host = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(9, device="npu"))
    assert torch.equal(torch.get_rng_state(), host), "the CPU's numbers are its own"
    torch.manual_seed(5)
    assert torch.equal(first.cpu(), torch.randn(4))
    generator = torch.Generator("npu").manual_seed(8)
    drawn = torch.rand(3, device="npu", generator=generator)
    assert torch.equal(drawn, torch.rand(3, device="npu", generator=generator.manual_seed(8)))


# Training


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)).masked_fill(torch.ones(5, 5, device=x.device).triu(1) > 0, -1e9)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Fused(Attention):
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))


@pytest.mark.parametrize(("model", "exact"), [(mlp, True), (Attention, True), (Fused, False)])
def test_training_equals_cpu(model, exact):
    x, labels = torch.randn(2, 5, 16), torch.randint(16, (2, 5))
    results, start = [], model()
    for place in ("cpu", "npu"):
        copy = model().to(place)
        copy.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.1, momentum=0.9)
        given = x.detach().to(place).clone().requires_grad_()
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(copy(given).flatten(0, 1), labels.flatten().to(place))
            loss.backward()
            optimizer.step()
        results.append(cpu([loss, given.grad, *copy.parameters()]))
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(results[1], results[0], **tolerance)


GRADIENTS = {  # ops for which torch_npu has a gradient of its own, which needs CANN
    "gather": lambda x: x.gather(1, INTEGERS.to(x.device)[None].expand(6, 5)),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "log_sigmoid": lambda x: F.logsigmoid(x),
    "matmul": lambda x: x @ x.t(),
    "matmul_batch": lambda x: torch.matmul(x[None], x.t()),
    "matmul_vector": lambda x: x[0] @ x.t(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "softmax": lambda x: x.softmax(-1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_equals_cpu(name):
    x = torch.randn(6, 8)
    grads = []
    for place in ("cpu", "npu"):
        leaf = x.detach().to(place).clone().requires_grad_()
        GRADIENTS[name](leaf).square().sum().backward()
        grads.append(leaf.grad.cpu())
    assert torch.equal(*grads)


def test_dropout_trains():
    x = torch.ones(1000, device="npu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert 0.6 < (y > 0).float().mean().item() < 0.9


@pytest.mark.parametrize(
    "broken",
    [lambda g: torch.ops.npu.npu_silu(g), lambda g: g + torch.ones(9), lambda g: virtual_npu.launch(print, g.cpu())],
)
def test_error_in_a_backward_is_an_exception(broken):
    x = torch.ones(9, device="npu", requires_grad=True)
    y = x * 2
    y.register_hook(broken)
    with pytest.raises(RuntimeError):
        y.sum().backward()
    assert (x.detach() + 1).sum().item() == 18


# Capture and replay


def captured(function):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function()
    return graph, result


def test_replay_follows_the_inputs():
    x, w = torch.randn(4, 8).npu(), torch.randn(8, 8).npu()
    graph, out = captured(lambda: F.silu(x @ w).cumsum(1).topk(2))
    assert out[0].isnan().all(), "nothing has been computed yet"
    for _ in range(2):
        x.copy_(torch.randn(4, 8))
        graph.replay()
        assert torch.equal(out[0], F.silu(x @ w).cumsum(1).topk(2)[0])


def test_launch_is_recorded():
    x, out, calls = torch.ones(3).npu(), torch.zeros(3).npu(), []

    def kernel(x, out):
        calls.append(1)
        out.add_(x)

    graph, _ = captured(lambda: (virtual_npu.launch(kernel, x, out), calls.append(virtual_npu.capturing())))
    assert calls == [True]
    graph.replay()
    graph.replay()
    assert out.tolist() == [2, 2, 2]


def test_in_place_and_copies_are_recorded():
    x, y = torch.ones(3).npu(), torch.zeros(3).npu()
    graph, _ = captured(lambda: (x.add_(1), y.copy_(x), y[1:].fill_(7), x.cummax(0)))
    assert x.tolist() == [1, 1, 1]
    graph.replay()
    graph.replay()
    assert x.tolist() == [3, 3, 3]
    assert y.tolist() == [3, 7, 7]


def test_numbers_from_the_host_are_kept():
    x, factor = torch.ones(3).npu(), torch.tensor(2.0)
    graph, out = captured(lambda: x * factor)
    factor.fill_(9)
    graph.replay()
    assert out.tolist() == [2, 2, 2]


def test_random_numbers_differ_in_each_replay():
    x = torch.ones(50).npu()
    graph, out = captured(lambda: torch.empty_like(x).uniform_())
    graph.replay()
    first = out.cpu()
    graph.replay()
    assert not torch.equal(out.cpu(), first)


def test_graphs_free_their_kernels():
    gc.collect()
    before = len(device._recorded)
    graph, _ = captured(lambda: torch.ones(3, device="npu") + 1)
    assert len(device._recorded) > before
    del graph
    gc.collect()
    assert len(device._recorded) == before


def test_other_streams_take_part():
    x, side = torch.ones(3).npu(), torch.npu.Stream()

    def work():
        main = torch.npu.current_stream()
        doubled = x * 2
        side.wait_stream(main)
        with torch.npu.stream(side):
            result = doubled + 1
        main.wait_stream(side)
        return result

    graph, out = captured(work)
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [9, 9, 9]
    with torch.npu.stream(side):
        assert not virtual_npu.capturing()
        assert (x + 1).tolist() == [5, 5, 5]


def test_other_threads_run_now():
    x, seen = torch.ones(3).npu(), []

    def capture():
        doubled = x * 2
        thread = threading.Thread(target=lambda: seen.append((virtual_npu.capturing(), device.view(x + 1).tolist())))
        thread.start()
        thread.join()
        return doubled

    graph, out = captured(capture)
    assert seen == [(False, [2, 2, 2])]
    graph.replay()
    assert out.tolist() == [2, 2, 2]


WAITS = {
    "item": lambda x: x.sum().item(),
    "to_host": lambda x: x.cpu(),
    "from_host": lambda x: torch.ones(3).npu(),
    "constant": lambda x: torch.tensor([1.0, 2.0], device="npu"),
    "synchronize": lambda x: torch.npu.synchronize(),
    "stream": lambda x: torch.npu.current_stream().synchronize(),
    "nonzero": lambda x: x.nonzero(),
    "masked": lambda x: x[x > 0],
    "index_by_cpu": lambda x: x[torch.tensor([0, 1])],
    "nested": lambda x: torch.npu.NPUGraph().capture_begin(),
}


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_waiting_is_refused(name, swallowed):
    x = torch.ones(3).npu()

    def work():
        try:
            WAITS[name](x)
        except RuntimeError:
            if not swallowed:
                raise

    with pytest.raises(RuntimeError, match=VOID):
        captured(work)
    assert not virtual_npu.capturing()
    graph, out = captured(lambda: x + 1)
    graph.replay()
    assert out.tolist() == [2, 2, 2], "the process is still usable"


def test_error_in_a_replay_is_an_exception():
    x = torch.tensor([0, 1, 2]).npu()
    graph, _ = captured(lambda: torch.ones(3, device="npu").index_select(0, x))
    graph.replay()
    x.fill_(99)
    with pytest.raises(RuntimeError, match="virtual NPU: IndexError in a kernel: index out of range"):
        graph.replay()
    assert [type(error) for error in device.errors] == [IndexError]
    device.errors.clear()


# Kernels in PyPTO

OWN_KERNEL = """
import pypto

ND = pypto.TileOpFormat.TILEOP_ND


def build(options):
    @pypto.frontend.jit(**options)
    def scaled_sum(
        a: pypto.Tensor([], pypto.DT_FP32, format=ND),
        b: pypto.Tensor([], pypto.DT_FP32, format=ND),
        out: pypto.Tensor([], pypto.DT_FP32, format=ND),
        factor=2.0,
    ):
        pypto.set_vec_tile_shapes(16, 16)
        for _ in pypto.loop(1, name="ONCE", idx_name="i"):
            pypto.assemble(pypto.add(pypto.mul(a, factor), b), [0, 0], out)

    return scaled_sum
"""


@pytest.fixture
def own_kernel(tmp_path, monkeypatch):
    pytest.importorskip("pypto")
    (tmp_path / "own_kernel.py").write_text(OWN_KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_kernel", raising=False)
    monkeypatch.chdir(tmp_path)
    import own_kernel

    return own_kernel.build


@pytest.mark.parametrize("options", [{}, {"runtime_options": {"run_mode": 0}}], ids=["default", "for_the_device"])
def test_own_kernel(own_kernel, options, tmp_path):
    kernel = own_kernel(options)
    a, b, out = torch.randn(16, 16).npu(), torch.randn(16, 16).npu(), torch.empty(16, 16, device="npu")
    kernel(a, b, out, factor=3.0)
    torch.testing.assert_close(out, a * 3 + b, rtol=1e-6, atol=1e-6)
    graph, _ = captured(lambda: kernel(a, b, out))
    torch.testing.assert_close(out, a * 3 + b, rtol=1e-6, atol=1e-6, msg="a capture computes nothing")
    a.fill_(1)
    graph.replay()
    torch.testing.assert_close(out, 2 + b, rtol=1e-6, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != "") == ["own_kernel.py"]


def test_own_kernel_refuses_what_it_does_not_take(own_kernel):
    x = torch.ones(16, 16, device="npu")
    with pytest.raises(Refused, match=r"scaled_sum takes \['factor'\] beside its tensors, got \(\) and \['other'\]"):
        own_kernel({})(x, x, x, other=1)
