"""torch.compile, export, AOTInductor, opcheck, autocast, vmap, meta: the op in PyTorch's machinery."""

import subprocess
import sys

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import npu_moe_ops
from npu_moe_ops import SparseMoE, moe
from npu_moe_ops.testing import expert_cumsums, routings

op = torch.ops.npu_moe
MANY_N = (0, 1, 2, 3, 5, 8, 17, 64, 1000)
LAYER = {
    "shared_intermediate_size": 6,
    "correction_bias": True,
    "scoring": "sigmoid",
    "n_group": 3,
    "topk_group": 2,
    "swiglu_limit": 3.0,
}


def even(n, experts):
    return torch.linspace(0, n, experts + 1).int()


def layer(**options):
    return SparseMoE(16, 10, 6, 3, **(LAYER | options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_one_graph_for_every_distribution(backend, fresh_compiler):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(op.grouped_swiglu_ffn, fullgraph=True, backend=counter)
    n, experts = 24, 5
    x, w13, w2, _ = cases.ffn_inputs(n, 12, 7, (0,) * experts)
    seen = set()

    @settings(max_examples=50)
    @given(expert_cumsums(experts, n))
    def run(c):
        seen.add(tuple(c.tolist()))
        assert torch.equal(compiled(x, w13, w2, c), op.grouped_swiglu_ffn(x, w13, w2, c))

    run()
    assert len(seen) > 20
    assert counter.frame_count == 1
    assert counter.op_count == 1


@pytest.mark.parametrize("what", ["op", "layer"])
def test_at_most_three_compilations_over_many_n(what, fresh_compiler):
    counter = CompileCounterWithBackend("aot_eager")
    if what == "layer":
        function = layer()
        arguments = lambda n: (torch.randn(n, 16),)  # noqa: E731
    else:
        function = op.grouped_swiglu_ffn
        _, w13, w2, _ = cases.ffn_inputs(0, 12, 7, (0,) * 5)
        arguments = lambda n: (torch.randn(n, 12), w13, w2, even(n, 5))  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for n in MANY_N:
        args = arguments(n)
        torch.testing.assert_close(compiled(*args), function(*args))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layer_forward_and_backward_in_one_graph(backend, fresh_compiler):
    module, counter = layer(), CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    x = torch.randn(2, 9, 16, requires_grad=True)
    grads = []
    for run in (module, compiled):
        x.grad = None
        module.zero_grad()
        run(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, True, None])
def test_moe_function_with_explicit_dynamic(dynamic, fresh_compiler):
    weights = torch.randn(5, 8), torch.randn(5, 8, 12), torch.randn(5, 6, 8)
    compiled = torch.compile(lambda x: moe(x, *weights, top_k=2), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (4, 7):
        x = torch.randn(3, tokens, 8)
        torch.testing.assert_close(compiled(x), moe(x, *weights, top_k=2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_moe_function_refuses_in_a_graph(dynamic, fresh_compiler):
    compiled = torch.compile(lambda *a: moe(*a, top_k=2), fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.raises(Exception, match=r"moe: w13 must be .* from router_weight"):
        compiled(torch.randn(3, 8), torch.randn(6, 8), torch.randn(5, 8, 12), torch.randn(5, 6, 8))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_in_a_graph(backend, fresh_compiler):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["tail_rows"])

    def into(x, out):
        op.grouped_swiglu_ffn.out(x, w13, w2, c, out=out)
        return out + 1

    out = torch.full_like(x, torch.nan)
    expected = op.grouped_swiglu_ffn(x, w13, w2, c)
    assert torch.equal(torch.compile(into, fullgraph=True, backend=backend)(x, out), expected + 1)
    assert torch.equal(out, expected)


class Ffn(torch.nn.Module):
    def __init__(self, w13, w2):
        super().__init__()
        self.w13, self.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)

    def forward(self, x, c):
        return op.grouped_swiglu_ffn(x, self.w13, self.w2, c)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_rows(strict, tmp_path):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"])
    model = Ffn(w13, w2)
    program = torch.export.export(
        model, (x, c), dynamic_shapes=({0: torch.export.Dim("N", min=0)}, None), strict=strict
    )
    torch.export.save(program, tmp_path / "ffn.pt2")
    loaded = torch.export.load(tmp_path / "ffn.pt2").module()
    for n in (0, 1, 7):
        args = torch.randn(n, x.shape[1]), even(n, len(c) - 1)
        assert torch.equal(program.module()(*args), model(*args))
        assert torch.equal(loaded(*args), model(*args))


def test_export_a_layer_with_dynamic_tokens():
    module = layer().eval()
    program = torch.export.export(module, (torch.randn(5, 16),), dynamic_shapes=({0: torch.export.Dim("T", min=0)},))
    names = [n.target.name() for n in program.graph.nodes if "npu_moe" in str(n.target)]
    assert names == [
        "npu_moe::topk_router",
        "npu_moe::permute",
        "npu_moe::grouped_swiglu_ffn",
        "npu_moe::unpermute",
        "npu_moe::grouped_swiglu_ffn",  # the shared expert
    ]
    for tokens in (0, 1, 7):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(program.module()(x), module(x))


def test_aot_inductor_package_in_a_fresh_process(tmp_path):
    module = layer().eval()
    program = torch.export.export(module, (torch.randn(5, 16),), dynamic_shapes=({0: torch.export.Dim("T", min=0)},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    inputs = [torch.randn(tokens, 16) for tokens in (0, 1, 7)]
    torch.save((inputs, [module(x).detach() for x in inputs]), tmp_path / "data.pt")
    script = f"""
import torch, npu_moe_ops
layer = torch._inductor.aoti_load_package({package!r})
for x, expected in zip(*torch.load({str(tmp_path / "data.pt")!r})):
    torch.testing.assert_close(layer(x), expected)
print("all right")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "all right", run.stderr


OPCHECK_MEMORY = {**cases.MEMORY, "expanded": lambda t: t[:1].expand(t.shape)}


OPCHECKS = {
    **{f"memory_{name}": ("mixed", memory, torch.float32) for name, memory in OPCHECK_MEMORY.items()},
    **{f"shape_{name}": (name, OPCHECK_MEMORY["contiguous"], torch.float32) for name in cases.SHAPES},
    **{f"{dtype}": ("tail_rows", OPCHECK_MEMORY["transposed"], dtype) for dtype in cases.DTYPES},
}


@pytest.mark.parametrize("case", OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck_ffn(case):
    name, memory, dtype = case
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES[name], dtype)
    grad = torch.randn(x.shape).to(dtype)
    for form in (cases.flat, lambda w: w):
        args = (memory(x) if len(x) else x, memory(form(w13)), memory(form(w2)))
        asked = [t.detach().requires_grad_() for t in args]
        opcheck(op.grouped_swiglu_ffn.default, (*args, c), {"swiglu_limit": 1.0})
        opcheck(op.grouped_swiglu_ffn.default, (*asked, c.long()))
        opcheck(op.grouped_swiglu_ffn.out, (*args, c), {"out": torch.empty(x.shape, dtype=dtype)})
        opcheck(op.grouped_swiglu_ffn_backward.default, (grad, *args, c, [True, False, True]))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_opcheck_routing(dtype, grad):
    for tokens, top_k in ((7, 3), (1, 1), (0, 2)):
        x = torch.randn(tokens, 6).to(dtype).requires_grad_(grad)
        weight = torch.randn(8, 6).requires_grad_(grad)
        opcheck(op.topk_router.default, (x, weight, None, top_k))
        opcheck(op.topk_router.default, (x, weight, torch.randn(8), top_k),
                {"scoring": "sigmoid", "n_group": 4, "topk_group": 3, "renormalize": False})  # fmt: skip
        ids = torch.randint(-1, 6, (tokens, top_k))
        opcheck(op.permute.default, (x, ids, 5))
        opcheck(op.permute.default, (x, ids.int(), 5))
        rows, _, row_of = op.permute(x.detach(), ids, 5)
        opcheck(
            op.unpermute.default, (rows.requires_grad_(grad), row_of, torch.rand(tokens, top_k).requires_grad_(grad))
        )


def test_meta_device():
    x, w13, w2, c = (t.to("meta") for t in cases.ffn_inputs(*cases.SHAPES["mixed"], torch.bfloat16))
    y = op.grouped_swiglu_ffn(x.t().contiguous().t(), w13, w2, c)
    assert (y.shape, y.dtype, y.device.type, y.is_contiguous()) == (x.shape, x.dtype, "meta", True)
    with torch.device("meta"):
        module = layer(dtype=torch.bfloat16)
        assert module(torch.empty(2, 5, 16, dtype=torch.bfloat16)).shape == (2, 5, 16)


def test_inference_mode():
    inputs = cases.ffn_inputs(*cases.SHAPES["mixed"])
    with torch.inference_mode():
        assert torch.equal(op.grouped_swiglu_ffn(*inputs), op.grouped_swiglu_ffn(*inputs))
        assert layer()(torch.randn(4, 16)).shape == (4, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(dtype, compiled, fresh_compiler):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"])
    weights = [w.requires_grad_() for w in (w13, w2)]
    run = (
        torch.compile(op.grouped_swiglu_ffn, fullgraph=True, backend="aot_eager") if compiled else op.grouped_swiglu_ffn
    )
    with torch.autocast("cpu", dtype=dtype):
        y = run(x, *weights, c)
        with torch.autocast("cpu", enabled=False):
            assert op.grouped_swiglu_ffn(x, *weights, c).dtype == torch.float32
        exact = op.grouped_swiglu_ffn(x.double(), w13.double(), w2.double(), c)
    assert y.dtype == dtype
    assert torch.equal(y, op.grouped_swiglu_ffn(x.to(dtype), w13.to(dtype), w2.to(dtype), c))
    assert exact.dtype == torch.float64
    y.float().sum().backward()
    assert all(w.grad.dtype == torch.float32 and w.grad.isfinite().all() for w in weights)


def test_autocast_leaves_the_router_in_fp32():
    """Also inside the op: its matmul must not become a bf16 one."""
    x, weight = torch.randn(9, 64), torch.randn(8, 64)
    plain = op.topk_router(x, weight, None, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routed = op.topk_router(x, weight, None, 2)
        rows, _, row_of = op.permute(x, routed[1], 8)
        assert rows.dtype == torch.float32
        assert op.unpermute(rows, row_of, routed[0]).dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(plain, routed, strict=True))


def test_autocast_for_the_npu_is_in_place():
    for name in ("grouped_swiglu_ffn", "topk_router", "permute", "unpermute"):
        for key in ("AutocastCPU", "AutocastPrivateUse1"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu_moe::{name}", key)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("npu_moe::grouped_swiglu_ffn.out", "AutocastPrivateUse1")


@pytest.mark.parametrize("batched", [(0, None, None, None), (1, None, None, 0), (0, 0, None, None), (None, 0, 0, 0),
                                     (0, 2, 1, 1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("form", [cases.flat, lambda w: w], ids=["flat", "3d"])
def test_vmap(batched, form):
    batch, counts = 3, ((2, 0, 4), (0, 0, 0), (1, 5, 1))
    entries = [cases.ffn_inputs(7, 8, 5, c, torch.float64) for c in counts]
    entries = [(x, form(w13), form(w2), c) for x, w13, w2, c in entries]
    args = [
        entries[0][i] if dim is None else torch.stack([e[i] for e in entries], dim=dim) for i, dim in enumerate(batched)
    ]
    got = torch.vmap(op.grouped_swiglu_ffn, in_dims=batched)(*args)
    for b in range(batch):
        one = [a if dim is None else a.select(dim, b) for a, dim in zip(args, batched, strict=True)]
        torch.testing.assert_close(got[b], op.grouped_swiglu_ffn(*one))


def test_vmap_nested_with_options_and_gradients():
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True)
    _, w13, w2, _ = cases.ffn_inputs(6, 8, 5, (2, 0, 4), torch.float64)
    c = torch.stack([cases.offsets((2, 0, 4)), cases.offsets((1, 1, 1))])
    c = torch.stack([c, c.flip(0), c])

    def one(x, c):
        return op.grouped_swiglu_ffn(x, w13, w2, c, swiglu_limit=1.0)

    got = torch.vmap(torch.vmap(one), in_dims=(1, 0))(x, c)
    want = torch.stack([torch.stack([one(x[j, i], c[i, j]) for j in range(2)]) for i in range(3)])
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.square().sum(), x)
    (expected,) = torch.autograd.grad(want.square().sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_vmap_in_a_graph(backend, fresh_compiler):
    """A graph cannot look at offsets while it is traced; it refuses bad ones when it runs."""
    _, w13, w2, c = cases.ffn_inputs(7, 8, 5, (2, 0, 4))
    batched = torch.vmap(lambda x, c: op.grouped_swiglu_ffn(x, w13, w2, c))
    compiled = torch.compile(batched, fullgraph=True, backend=backend)
    x, c = torch.randn(3, 7, 8), torch.stack([c, cases.offsets((0, 0, 7)), cases.offsets((0, 0, 0))])
    torch.testing.assert_close(compiled(x, c), batched(x, c))
    for bad in ([0, 3, 2, 6], [1, 2, 3, 4], [0, 1, 2, 8]):
        with pytest.raises(ValueError, match="expert_cumsum must hold E\\+1 = 4 offsets"):
            compiled(x, torch.tensor([[0, 2, 4, 6], bad, [0, 0, 0, 0]], dtype=torch.int32))
    assert batched(x[:0], c[:0]).shape == (0, 7, 8)


def test_vmap_refuses_as_the_op_does():
    x, w13, w2, c = cases.ffn_inputs(7, 8, 5, (2, 0, 4))
    bad = torch.stack([c, torch.tensor([0, 3, 2, 6], dtype=torch.int32)])
    with pytest.raises(ValueError, match="c\\[1\\] = 3 > c\\[2\\] = 2"):
        torch.vmap(op.grouped_swiglu_ffn, in_dims=(None, None, None, 0))(x, w13, w2, bad)
    with pytest.raises(ValueError, match="w2 must be"):
        torch.vmap(op.grouped_swiglu_ffn, in_dims=(0, None, None, None))(x.expand(2, 7, 8), w13, w13, c)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_compiled_layer_on_any_routing(data):
    """The three ops behind the router, one graph, any ids."""
    ids = data.draw(routings(9, 5, 2))
    x, w13, w2, _ = cases.ffn_inputs(9, 12, 7, (0,) * 5)
    weights = torch.rand(9, 2)
    torch.testing.assert_close(ROUTED(x, ids, w13, w2, weights), routed(x, ids, w13, w2, weights))


def routed(x, ids, w13, w2, weights):
    rows, c, row_of = npu_moe_ops.permute(x, ids, 5)
    return npu_moe_ops.unpermute(npu_moe_ops.grouped_swiglu_ffn(rows, w13, w2, c), row_of, weights)


ROUTED = torch.compile(routed, fullgraph=True, backend="aot_eager")
