"""Tensors on 'npu' outside a GE graph: eager, captured and replayed, with gradients, and in PyTorch's machinery.

The grouped FFN is the PyPTO kernel in pypto's interpreter, a second or more a call, so sizes and calls are few.
"""

import warnings

import cases
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from npu_moe_ops import SparseMoE, moe
from npu_moe_ops.testing import TOLERANCE, routings

op = torch.ops.npu_moe
NPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
N, H, I, E, K = 9, 32, 16, 6, 3
COUNTS = ([2, 0, 4, 0, 1, 0], [0, 0, 0, 0, 0, 9], [0] * 6)  # tail rows; one expert; none


def reduce_overhead():
    import torchair

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that npugraph_ex will replace it
        return torchair.get_npu_backend(compiler_config=config)


# Made before npugraph_ex is used: after it torchair cannot be set up, both register the same things.
BACKENDS = {"reduce-overhead": reduce_overhead(), "npugraph_ex": "npugraph_ex"}


def compiled(function, backend, dynamic=False):
    return torch.compile(function, backend=BACKENDS[backend], fullgraph=True, dynamic=dynamic)


def npu(*tensors):
    return [t.npu() if isinstance(t, torch.Tensor) else t for t in tensors]


def inputs(counts, dtype=torch.float32):
    x, w13, w2, c = cases.ffn_inputs(N, H, I, counts, dtype)
    x[sum(counts) :] = torch.nan
    return x, w13, w2, c


def assert_ffn(out, x, w13, w2, counts, **swiglu):
    expected = oracle.ffn(x.nan_to_num(), w13, w2, counts, round_to=x.dtype, **swiglu)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2 * TOLERANCE[x.dtype], atol=2 * TOLERANCE[x.dtype])


@pytest.mark.parametrize("dtype", NPU_DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_ffn(counts, dtype):
    args = inputs(counts, dtype)
    out = op.grouped_swiglu_ffn(*npu(*args))
    assert out.device.type == "npu"
    assert_ffn(out, *args[:3], counts)


def test_ffn_transposed_and_out():
    x, w13, w2, c = inputs(COUNTS[0])
    stored = w13.transpose(1, 2).contiguous().npu(), w2.transpose(1, 2).contiguous().npu()
    out = torch.full((N, H), torch.nan, device="npu")
    returned = op.grouped_swiglu_ffn.out(x.npu(), *(w.transpose(1, 2) for w in stored), c.npu(), out=out)
    assert returned is out
    assert_ffn(out, x, w13, w2, COUNTS[0])


def test_ffn_of_no_rows():
    _, w13, w2, _ = inputs(COUNTS[2])
    assert op.grouped_swiglu_ffn(*npu(torch.randn(0, H), w13, w2, torch.zeros(E + 1).int())).shape == (0, H)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ffn_captured_and_replayed(backend, dynamic):
    """One capture serves every distribution: offsets are read when the graph runs."""
    _, w13, w2, _ = inputs(COUNTS[2], torch.bfloat16)
    weights = npu(w13, w2)
    function = compiled(op.grouped_swiglu_ffn.default, backend, dynamic)
    for counts in COUNTS:
        x, _, _, c = inputs(counts, torch.bfloat16)
        assert_ffn(function(x.npu(), *weights, c.npu()), x, w13, w2, counts)


def test_transposed_ffn_captured_and_replayed():
    _, w13, w2, _ = inputs(COUNTS[2], torch.bfloat16)
    stored = npu(w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous())
    function = lambda x, a, b, c: op.grouped_swiglu_ffn(x, a.transpose(1, 2), b.transpose(1, 2), c)  # noqa: E731
    run = compiled(function, "npugraph_ex")
    for counts in COUNTS[:2]:
        x, _, _, c = inputs(counts, torch.bfloat16)
        assert_ffn(run(x.npu(), *stored, c.npu()), x, w13, w2, counts)


ROUTERS = (
    {},
    {"renormalize": False, "routed_scaling_factor": 1.5},
    {"scoring": "sigmoid", "n_group": 2, "topk_group": 1},
    {"scoring": "sigmoid", "renormalize": False},
)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("options", ROUTERS)
def test_router(options, backend):
    args = torch.randn(7, H).bfloat16(), torch.randn(E, H), torch.randn(E), K
    function = lambda *a: op.topk_router(*a, **options)  # noqa: E731
    run = function if backend is None else compiled(function, backend)
    for _ in range(2):
        args = torch.randn(7, H).bfloat16(), *args[1:]
        weights, ids, logits = run(*npu(*args))
        expected = function(*args)
        assert torch.equal(ids.cpu(), expected[1])
        torch.testing.assert_close((weights.cpu(), logits.cpu()), (expected[0], expected[2]))


@pytest.mark.parametrize("way", ["small_groups", "by_choice"])
def test_router_by_our_kernel(way, monkeypatch):
    """Where CANN's operator cannot, and where the user says so."""
    options = {"n_group": 3, "topk_group": 2} if way == "small_groups" else {}
    if way == "by_choice":
        monkeypatch.setenv("NPU_MOE_ROUTER", "pypto")
    monkeypatch.delattr(torch.ops.npu, "npu_moe_gating_top_k")
    args = torch.randn(7, H), torch.randn(E, H), torch.randn(E), K
    weights, ids, _ = op.topk_router(*npu(*args), **options)
    expected = op.topk_router(*args, **options)
    assert torch.equal(ids.cpu(), expected[1])
    torch.testing.assert_close(weights.cpu(), expected[0])


def there_and_back(x, ids, weights):
    rows, c, row_of = op.permute(x, ids, E)
    return rows, c, row_of, op.unpermute(2 * rows + 1, row_of, weights)


def assert_there_and_back(got, args):
    *moved, total = there_and_back(*args)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, moved, strict=False))
    torch.testing.assert_close(got[3].cpu(), total)


@settings(max_examples=30)
@given(st.data(), st.integers(0, 12), st.integers(0, 4), st.sampled_from(NPU_DTYPES))
def test_permute_and_back(data, tokens, top_k, dtype):
    args = torch.randn(tokens, H).to(dtype), data.draw(routings(tokens, E, top_k)), torch.randn(tokens, top_k)
    assert_there_and_back(there_and_back(*npu(*args)), args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_permute_and_back_captured(backend):
    function = compiled(there_and_back, backend)
    for low, high in ((0, E), (-1, E + 2), (2, 3)):
        args = torch.randn(7, H), torch.randint(low, high, (7, K)), torch.randn(7, K)
        assert_there_and_back(function(*npu(*args)), args)


def test_unpermute_never_looks_at_rows_of_no_expert():
    rows, row_of = torch.randn(9, H), torch.randint(0, 6, (4, K))
    row_of[1, 2], row_of[3, 0] = -1, -3
    rows[6:] = torch.nan
    args = rows, row_of, torch.randn(4, K)
    torch.testing.assert_close(op.unpermute(*npu(*args)).cpu(), op.unpermute(*args))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_whole_layer(backend):
    """Captured once, replayed with other tokens, which go to other experts."""
    _, w13, w2, _ = cases.ffn_inputs(N, H, I, [0] * E)
    weights = torch.randn(E, H), w13, w2
    moved = npu(*weights)
    function = lambda x, *w: moe(x, *w, K, scoring="sigmoid")  # noqa: E731
    run = function if backend is None else compiled(function, backend)
    for _ in range(2):
        x = torch.randn(7, H)
        torch.testing.assert_close(run(x.npu(), *moved).cpu(), function(x, *weights), rtol=1e-4, atol=1e-4)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(SparseMoE(H, I, E, K, scoring="sigmoid") for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("backend", [None, "npugraph_ex"])
def test_two_layer_model(backend):
    model, inputs = Model(), [torch.randn(2, 3, H) for _ in range(2)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        model.npu()
        run = model if backend is None else compiled(model, backend)
        for x, right in zip(inputs, expected, strict=True):
            torch.testing.assert_close(run(x.npu()).cpu(), right, rtol=1e-4, atol=1e-4)


GRADIENTS = {
    "plain": (COUNTS[0], {}),
    "one_expert": (COUNTS[1], {}),
    "no_expert": (COUNTS[2], {}),
    "clipped": (COUNTS[0], {"swiglu_limit": 0.7, "swiglu_alpha": 1.7, "swiglu_beta": 1.0}),
    "shaped": (COUNTS[0], {"swiglu_alpha": 1.3}),
}


@pytest.mark.parametrize("layout", ["stacked", "flat", "transposed"])
@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_backward(case, layout):
    """Against the reference. Without the forward: it is another kernel, and slow here."""
    counts, swiglu = case
    x, w13, w2, c = inputs(counts)
    if layout == "flat":
        w13, w2 = cases.flat(w13), cases.flat(w2)
    if layout == "transposed":
        w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2))
    args = torch.randn(N, H), x, w13, w2, c
    for mask in ([True] * 3, [True, False, False], [False, True, False], [False, False, True]):
        got = op.grouped_swiglu_ffn_backward(*npu(*args), mask, **swiglu)
        expected = op.grouped_swiglu_ffn_backward(*args, mask, **swiglu)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
            assert a.stride() == b.stride()


def test_gradients_of_the_layer():
    torch.manual_seed(0)
    layer = SparseMoE(H, I, E, K, shared_intermediate_size=8)
    x = torch.randn(7, H)

    def gradients(layer, x):
        x.requires_grad_()
        layer(x).square().sum().backward()
        grads = [x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())]
        layer.zero_grad(set_to_none=True)
        return grads

    expected = gradients(layer, x)
    for a, b in zip(gradients(layer.npu(), x.detach().npu()), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_bad_offsets_do_no_harm(monkeypatch):
    x, w13, w2, _ = inputs([9, 0, 0, 0, 0, 0])
    bad = torch.tensor([0, -3, 30, 4, 2, 1, 9])
    args = npu(x, w13, w2, bad)
    assert op.grouped_swiglu_ffn(*args).cpu().isfinite().all()
    for grad in op.grouped_swiglu_ffn_backward(torch.randn(N, H).npu(), *args, [True] * 3):
        assert grad.cpu().isfinite().all()
    monkeypatch.setenv("NPU_MOE_VALIDATE", "1")
    with pytest.raises(ValueError, match="expert_cumsum must"):
        op.grouped_swiglu_ffn(*args)


def test_opcheck():
    x, w13, w2, c = npu(*cases.ffn_inputs(N, H, I, COUNTS[0]))
    for function, args in (
        (op.grouped_swiglu_ffn.default, (x, w13, w2, c)),
        (op.grouped_swiglu_ffn_backward.default, (x, x, w13, w2, c, [True] * 3)),
        (op.topk_router.default, (x, *npu(torch.randn(E, H)), None, K)),
        (op.permute.default, (x, *npu(torch.randint(-1, E, (N, K))), E)),
        (op.unpermute.default, (x, *npu(torch.randint(0, N, (3, K)), torch.randn(3, K)))),
    ):
        opcheck(function, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    _, w13, w2, _ = cases.ffn_inputs(N, H, I, [0] * E)

    class Layer(torch.nn.Module):
        def forward(self, x, router, w13, w2):
            return moe(x, router, w13, w2, K)

    tokens = torch.export.Dim("tokens")
    weights = npu(torch.randn(E, H), w13, w2)
    shapes = {"x": {0: tokens}, "router": None, "w13": None, "w2": None}
    program = torch.export.export(Layer(), (torch.randn(5, H).npu(), *weights), dynamic_shapes=shapes, strict=strict)
    for n in (1, 7):
        x = torch.randn(n, H)
        expected = moe(x, *(w.cpu() for w in weights), K)
        torch.testing.assert_close(program.module()(x.npu(), *weights).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_capture_that_copies_to_the_host_is_refused():
    def reads(x):
        return x * x.sum().item()

    x = torch.randn(4).npu()
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError), torch.npu.graph(graph):
        reads(x)
    torch.testing.assert_close(reads(x).cpu(), reads(x.cpu()))  # and the process goes on


def test_float64_is_refused():
    x, w13, w2, c = npu(*inputs(COUNTS[0], torch.float64))
    for call in (
        lambda: op.grouped_swiglu_ffn(x, w13, w2, c),
        lambda: op.grouped_swiglu_ffn_backward(x, x, w13, w2, c, [True] * 3),
        lambda: op.topk_router(x, x[:5], None, 2),
        lambda: op.permute(x, torch.zeros(N, 2).long().npu(), E),
        lambda: op.unpermute(x, torch.zeros(N, 1).long().npu(), x[:, :1]),
    ):
        with pytest.raises(TypeError, match="must be bfloat16, float16 or float32 on 'npu', got float64"):
            call()
