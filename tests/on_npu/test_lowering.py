"""torch.compile(backend="npu"): the GE graphs that torchair makes of the ops, node by node and in numbers."""

import cases
import oracle
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from npu_moe_ops import SparseMoE, moe
from npu_moe_ops.npu import nodes
from npu_moe_ops.testing import TOLERANCE, expert_cumsums, routings

op = torch.ops.npu_moe
NPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
N, H, I, E, K = 23, 34, 18, 6, 3  # all distinct
ROUTERS = {
    "softmax": {},
    "softmax_raw": {"renormalize": False, "routed_scaling_factor": 1.5},
    "sigmoid": {"scoring": "sigmoid", "routed_scaling_factor": 2.5},
    "sigmoid_raw": {"scoring": "sigmoid", "renormalize": False},
    "grouped": {"scoring": "sigmoid", "n_group": 2, "topk_group": 1},
    "all_groups": {"n_group": 3, "topk_group": 3},
    "groups_of_two": {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},  # more than CANN's operator takes
    "groups_of_two_raw": {"scoring": "sigmoid", "n_group": 3, "topk_group": 2, "renormalize": False},
}
# Not arithmetic: how torchair feeds an operator.
PLUMBING = {"Data", "RefData", "Const", "NetOutput", "Cast", "Shape", "Gather", "Pack", "Fill", "Reshape", "Slice"}


def compiled(function, dynamic=None):
    return torch.compile(function, backend="npu", fullgraph=True, dynamic=dynamic)


def on_npu(function, *args, **options):
    """What function returns for these CPU tensors on 'npu', brought back."""
    moved = [a.npu() if isinstance(a, torch.Tensor) else a for a in args]
    out = function(*moved, **options)
    return tuple(t.cpu() for t in out) if isinstance(out, (tuple, list)) else out.cpu()


def arithmetic(graph):
    """Operators that the result needs, in order of execution."""
    return [node.type for node in graph.nodes if node.type not in PLUMBING]


def assert_ffn(out, x, w13, w2, counts, **swiglu):
    """Exact but for gate and up, which CANN rounds before the activation: one rounding more than the contract has."""
    expected = oracle.ffn(x, w13, w2, counts, round_to=x.dtype, **swiglu)
    tolerance = 2 * TOLERANCE[x.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert not out[sum(counts) :].any()


LAYOUTS = {
    "flat": (lambda x, a, b, c, **o: op.grouped_swiglu_ffn(x, a, b, c, **o), lambda w: w.reshape(-1, w.shape[-1])),
    "stacked": (lambda x, a, b, c, **o: op.grouped_swiglu_ffn(x, a, b, c, **o), lambda w: w),
    "transposed": (
        lambda x, a, b, c, **o: op.grouped_swiglu_ffn(x, a.transpose(1, 2), b.transpose(1, 2), c, **o),
        lambda w: w.transpose(1, 2).contiguous(),
    ),
}
CHECKED_OFFSETS = ["Maximum", "Minimum", "Cummax"]
ZEROED_TAIL = ["ReduceMax", "Range", "GreaterEqual", "Unsqueeze", "MaskedFill"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ffn_is_two_grouped_matmuls(layout, dynamic, npu_graphs):
    function, laid = LAYOUTS[layout]
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["tail_rows"], torch.bfloat16)
    out = on_npu(compiled(function, dynamic), x, laid(w13), laid(w2), c)
    assert_ffn(out, x, w13, w2, cases.SHAPES["tail_rows"][3])
    (graph,) = npu_graphs
    assert sorted(arithmetic(graph)) == sorted(
        [*CHECKED_OFFSETS, "GroupedMatmul", "SwiGlu", "GroupedMatmul", *ZEROED_TAIL]
    )
    for matmul in graph.find("GroupedMatmul"):
        assert matmul.attrs["transpose_weight"] == (layout == "transposed")
        weight = matmul.inputs["weight0"]
        assert weight.type == ("Reshape" if layout == "flat" else "Data")  # as it lies in memory
        assert matmul.inputs["group_list"].type == "Cast"


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data(), st.sampled_from(NPU_DTYPES), st.sampled_from(list(LAYOUTS)), st.sampled_from([False, True, None]))
def test_ffn_numbers(data, dtype, layout, dynamic):
    torch._dynamo.reset()
    n, experts = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 7))
    c = data.draw(expert_cumsums(experts, n))
    function, laid = LAYOUTS[layout]
    x, w13, w2, _ = cases.ffn_inputs(
        n, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 30)), [0] * experts, dtype
    )
    x[c[-1] :] = torch.nan
    weights = laid(w13).npu(), laid(w2).npu()
    for weight in weights:  # as parameters are; else torchair packs sizes of two dtypes for one transposed expert
        torch._dynamo.mark_static(weight)
    out = on_npu(compiled(function, dynamic), x, *weights, c)
    assert_ffn(out, x.nan_to_num(), w13, w2, c.diff().tolist())


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_for_every_distribution(dynamic, npu_graphs):
    x, w13, w2, _ = cases.ffn_inputs(N, H, I, [0] * E, torch.bfloat16)
    function = compiled(op.grouped_swiglu_ffn.default, dynamic)
    seen = set()

    @settings(max_examples=40)
    @given(expert_cumsums(E, N))
    def run(c):
        seen.add(tuple(c.tolist()))
        assert_ffn(on_npu(function, x, w13, w2, c), x, w13, w2, c.diff().tolist())

    run()
    (graph,) = npu_graphs
    assert len(seen) > 20
    assert graph.runs >= len(seen)


@pytest.mark.parametrize("marked", [False, True])
def test_one_graph_for_every_number_of_rows(marked, npu_graphs):
    function = compiled(op.grouped_swiglu_ffn.default, None if marked else True)
    _, w13, w2, _ = cases.ffn_inputs(N, H, I, [0] * E, torch.bfloat16)
    weights = w13.npu(), w2.npu()
    for n in (5, 9, 23):
        counts = [0, 2, 0, n - 3, 0, 0]
        x, c = torch.randn(n, H).bfloat16(), cases.offsets(counts)
        moved = x.npu()
        if marked:
            torch._dynamo.mark_dynamic(moved, 0)
        assert_ffn(function(moved, *weights, c.npu()).cpu(), x, w13, w2, counts)
    assert len(npu_graphs) == 1
    for n in (0, 1):  # torch makes graphs of their own for these
        x, counts = torch.randn(n, H).bfloat16(), [0, 0, n, 0, 0, 0]
        assert_ffn(on_npu(function, x, w13, w2, cases.offsets(counts)), x, w13, w2, counts)


@pytest.mark.parametrize("swiglu", [{"swiglu_limit": 0.7}, {"swiglu_alpha": 1.7, "swiglu_beta": 1.0},
                                    {"swiglu_limit": 0.9, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}])  # fmt: skip
def test_clipped(swiglu, npu_graphs):
    x, w13, w2, c = cases.ffn_inputs(N, H, I, cases.SHAPES["mixed"][3], torch.float32)
    out = on_npu(compiled(op.grouped_swiglu_ffn.default), 3 * x, w13, w2, c, **swiglu)
    names = {name.removeprefix("swiglu_"): value for name, value in swiglu.items()}
    assert_ffn(out, 3 * x, w13, w2, cases.SHAPES["mixed"][3], **names)
    assert "ClippedSwiglu" in arithmetic(npu_graphs[0])


@pytest.mark.parametrize(
    "offsets", [[0, -3, 30, 4, 2, 1, 9], [5, 5, 5, 5, 5, 5, 5], [-1, -1, -1, -1, -1, -1, 2**31 - 1]]
)
def test_bad_offsets_do_no_harm(offsets):
    """The engine refuses a group list that falls or leaves the rows."""
    x, w13, w2, _ = cases.ffn_inputs(N, H, I, [0] * E, torch.float32)
    out = on_npu(compiled(op.grouped_swiglu_ffn.default), x, w13, w2, torch.tensor(offsets))
    assert out.isfinite().all()


def router_inputs(tokens, dtype, bias=True, experts=E):
    return (torch.randn(tokens, H).to(dtype), torch.randn(experts, H), torch.randn(experts) if bias else None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_router(options, bias, dynamic, npu_graphs):
    for top_k in (1, 2):
        torch._dynamo.reset()
        args = (*router_inputs(11, torch.bfloat16, bias), top_k)
        function = compiled(lambda *a, o=options: op.topk_router(*a, **o), dynamic)
        weights, ids, logits = on_npu(function, *args)
        expected = op.topk_router(*args, **options)
        assert torch.equal(ids, expected[1])
        torch.testing.assert_close((weights, logits), (expected[0], expected[2]))
        fused = options.get("topk_group") != 2
        assert (arithmetic(npu_graphs[-1])[:2] == ["MatMul", "MoeGatingTopK"]) == fused


@pytest.mark.parametrize("groups", [{}, {"n_group": 3, "topk_group": 2}])
def test_router_ties_and_nan(groups):
    hidden = torch.zeros(5, H)
    hidden[2] = torch.nan
    args = hidden, torch.randn(E, H), None, K
    weights, ids, _ = on_npu(compiled(lambda *a: op.topk_router(*a, **groups)), *args)
    assert ids[[0, 1, 3, 4]].tolist() == op.topk_router(*args, **groups)[1][[0, 1, 3, 4]].tolist()
    assert ((ids >= 0) & (ids < E)).all()
    assert weights[2].isnan().all()


def test_router_of_many_experts(npu_graphs):
    """More than CANN's operator takes."""
    args = (*router_inputs(3, torch.float32, experts=2100), 4)
    weights, ids, _ = on_npu(compiled(op.topk_router.default), *args)
    expected = op.topk_router(*args)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0])
    assert "MoeGatingTopK" not in arithmetic(npu_graphs[0])


@settings(max_examples=20)
@given(st.data(), st.integers(0, 12), st.integers(0, 4), st.sampled_from([torch.int32, torch.int64]),
       st.sampled_from([False, True]))  # fmt: skip
def test_permute_and_back(data, tokens, top_k, index, dynamic):
    torch._dynamo.reset()
    ids = data.draw(routings(tokens, E, top_k)).to(index)
    x, weights = torch.randn(tokens, H), torch.randn(tokens, top_k)

    def there_and_back(x, ids, weights):
        rows, c, row_of = op.permute(x, ids, E)
        return rows, c, row_of, op.unpermute(2 * rows + 1, row_of, weights)

    out = on_npu(compiled(there_and_back, dynamic), x, ids, weights)
    *moved, total = there_and_back(x, ids, weights)
    assert all(map(torch.equal, out, moved))
    torch.testing.assert_close(out[3], total)


def test_ids_beyond_32_bits_own_no_expert():
    ids = torch.tensor([[2**32 + 1, 1], [2**33, -(2**32)]])
    for got, expected in zip(on_npu(compiled(lambda x, i: op.permute(x, i, E)), torch.randn(2, H), ids),
                             op.permute(torch.randn(2, H), ids, E), strict=True):  # fmt: skip
        assert got.shape == expected.shape
    _, c, row_of = on_npu(compiled(lambda x, i: op.permute(x, i, E)), torch.randn(2, H), ids)
    assert c.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert row_of.tolist() == [[-3, 0], [-2, -1]]


@pytest.mark.parametrize("dtype", NPU_DTYPES)
def test_unpermute_never_looks_at_rows_of_no_expert(dtype):
    rows, row_of, weights = torch.randn(9, H).to(dtype), torch.randint(0, 6, (4, K)), torch.randn(4, K)
    row_of[1, 2], row_of[3, 0] = -1, -3
    rows[6:] = torch.nan  # N is not T * K, and rows are read more than once
    args = rows, row_of, weights
    torch.testing.assert_close(on_npu(compiled(op.unpermute.default), *args), op.unpermute(*args))


ROUTED = ["MatMul", "MoeGatingTopK", "Maximum", "Minimum"]
EXPERTS = ["MoeInitRoutingV3", "Cumsum", "ConcatV2", "GroupedMatmul", "SwiGlu", "GroupedMatmul"]
BACK = ["Transpose", "MoeFinalizeRoutingV2"]
WEIGHED = {
    "softmax": ["GatherElements", "ReduceSum", "Adds", "RealDiv", "Muls"],
    "softmax_raw": [],
    "sigmoid": [],
    "sigmoid_raw": ["GatherElements", "Muls"],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("router", WEIGHED)
def test_whole_layer(router, dynamic, npu_graphs):
    """Ids come from a router and offsets from a permutation: nothing is checked or masked a second time."""
    _, w13, w2, _ = cases.ffn_inputs(N, H, I, [0] * E, torch.bfloat16)
    args = torch.randn(7, H).bfloat16(), torch.randn(E, H), w13, w2
    function = lambda *a: moe(*a, K, **ROUTERS[router])  # noqa: E731
    out = on_npu(compiled(function, dynamic), *args)
    torch.testing.assert_close(out, function(*args), rtol=4e-2, atol=4e-2)
    (graph,) = npu_graphs
    assert sorted(arithmetic(graph)) == sorted([*ROUTED, *WEIGHED[router], *EXPERTS, *BACK])


class Model(torch.nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        options = {"scoring": "sigmoid", "correction_bias": True, "shared_intermediate_size": 10}
        self.layers = torch.nn.ModuleList(SparseMoE(H, I, E, K, **options) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


# In bf16 a second router would see tokens that differ by a rounding, and could choose other experts.
@pytest.mark.parametrize(
    ("dtype", "layers", "tolerance"), [(torch.float32, 2, 1e-4), (torch.bfloat16, 1, 4e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("dynamic", [False, True, "marked"])
def test_whole_model(dynamic, dtype, layers, tolerance, npu_graphs):
    model = Model(layers).to(dtype)
    inputs = [torch.randn(2, tokens, H, dtype=dtype) for tokens in (5, 5, 3)]
    expected = [model(x) for x in inputs]
    model.npu()
    function = compiled(model, None if dynamic == "marked" else dynamic)
    with torch.no_grad():
        for x, right in zip(inputs, expected, strict=True):
            moved = x.npu()
            if dynamic == "marked":
                torch._dynamo.mark_dynamic(moved, 1)
            torch.testing.assert_close(function(moved).cpu(), right, rtol=tolerance, atol=tolerance)
    assert len(npu_graphs) == (2 if dynamic is False else 1)
    for graph in npu_graphs:
        assert arithmetic(graph).count("GroupedMatmul") == 4 * layers  # the shared expert is one of the op too
        assert arithmetic(graph).count("MoeFinalizeRoutingV2") == layers


GRADIENTS = {
    "plain": {},
    "clipped": {"swiglu_limit": 0.5, "swiglu_alpha": 1.7, "swiglu_beta": 1.0},
    "shaped": {"swiglu_alpha": 1.3},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("swiglu", GRADIENTS.values(), ids=GRADIENTS)
def test_ffn_gradients(swiglu, layout, dynamic, npu_graphs):
    """Of every tensor and of each alone: what nobody asks for is not in the graph."""
    function, laid = LAYOUTS[layout]
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["tail_rows"])
    tensors, grad_out = (x, laid(w13), laid(w2)), torch.randn_like(x)
    compiles = compiled(lambda *a: function(*a, **swiglu), dynamic)
    for asked in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        leaves = [t.clone().requires_grad_(ask) for t, ask in zip(tensors, asked, strict=True)]
        moved = [t.npu().requires_grad_(ask) for t, ask in zip(tensors, asked, strict=True)]
        function(*leaves, c, **swiglu).backward(grad_out)
        compiles(*moved, c.npu()).backward(grad_out.npu())
        for ask, leaf, there in zip(asked, leaves, moved, strict=True):
            assert ask == (there.grad is not None)
            if ask:
                torch.testing.assert_close(there.grad.cpu(), leaf.grad, rtol=1e-4, atol=1e-4)
        matmuls = npu_graphs[-1].types()["GroupedMatmul"]
        assert matmuls == {(True, True, True): 5, (True, False, False): 3, (False, True, False): 3}.get(asked, 2)


def test_gradients_of_no_rows():
    _, w13, w2, c = cases.ffn_inputs(0, H, I, [0] * E)
    backward = lambda *a: op.grouped_swiglu_ffn_backward(*a, [False, True, True])  # noqa: E731
    tokens, up, down = on_npu(compiled(backward), torch.randn(0, H), torch.randn(0, H), w13, w2, c)
    assert tokens.shape == (0,)
    assert torch.equal(up, torch.zeros_like(w13))
    assert torch.equal(down, torch.zeros_like(w2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_trains(dynamic, npu_graphs):
    model, inputs = Model(), [torch.randn(2, tokens, H) for tokens in (5, 7)]

    def gradients(run, place):
        grads = []
        for x in inputs:
            x = x.detach().to(place).requires_grad_()
            run(x).square().sum().backward()
            grads += [x.grad.cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
            model.zero_grad(set_to_none=True)
        return grads

    expected = gradients(model, "cpu")
    model.npu()
    for got, right in zip(gradients(compiled(model, dynamic), "npu"), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)
    assert len(npu_graphs) == (2 if dynamic else 4)  # forward and backward


def refuse(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # torch wraps it in an error of its own
        on_npu(compiled(function), *args)
    return str(caught.value)


def test_refusals_while_the_graph_is_made():
    x, w13, w2, c = cases.ffn_inputs(N, H, I, [0] * E, torch.float64)
    message = "must be bfloat16, float16 or float32 on 'npu', got float64"
    assert f"sorted_tokens {message}" in refuse(op.grouped_swiglu_ffn.default, x, w13, w2, c)
    assert f"hidden_states {message}" in refuse(lambda x, i: op.permute(x, i, E), x, torch.zeros(N, 2).long())
    assert f"expert_out {message}" in refuse(op.unpermute.default, x, torch.zeros(N, 1).long(), x[:, :1])
    assert f"hidden_states {message}" in refuse(lambda x, r: op.topk_router(x, r, None, 2), x, x[:5])
    many = torch.zeros(1025, 2, 2), torch.zeros(1025, 1, 2), torch.zeros(1026).int()
    assert "at most 1024 experts here on 'npu', got 1025" in refuse(
        op.grouped_swiglu_ffn.default, torch.zeros(3, 2), *many
    )
    wide = torch.zeros(1, 70000), torch.zeros(1, 70000, 2), torch.zeros(1, 1, 70000), torch.zeros(2).int()
    assert "H must be at most 65535 on 'npu', got 70000" in refuse(op.grouped_swiglu_ffn.default, *wide)
    permute = lambda x, i: op.permute(x, i, 10240)  # noqa: E731
    assert "num_experts must be at most 10239 on 'npu', got 10240" in refuse(
        permute, x.float(), torch.zeros(N, 2).long()
    )
    wrong = refuse(op.grouped_swiglu_ffn.default, x.float(), w13.float(), w2.float()[1:], c)
    assert "grouped_swiglu_ffn: w2 must be" in wrong


def test_names_mark_what_they_say():
    """A prefix of another would make one kind of node pass for the other."""
    names = nodes.ROUTED_IDS, nodes.OFFSETS, nodes.FULL_OFFSETS, nodes.FULL_ROWS
    assert not [(a, b) for a in names for b in names if a != b and a.startswith(b)]
