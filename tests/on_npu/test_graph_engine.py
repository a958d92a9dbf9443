"""CANN's fused operators and the graph engine of the virtual NPU, against plain Python in float64.

Run with -p npu_moe_ops.virtual_npu.plugin.
"""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("torch_npu", reason="needs the virtual NPU: pytest -p npu_moe_ops.virtual_npu.plugin")
from torchair._ge_concrete_graph.ge_ir_pb2 import DataType, ModelDef

from npu_moe_ops.virtual_npu import Refused, operators
from npu_moe_ops.virtual_npu.ge import hook

npu_ops = torch.ops.npu
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(LIMIT)


def close(got, wanted):
    limit = LIMIT[got.dtype]
    assert_close(got.cpu().double(), wanted.double(), rtol=limit, atol=limit, equal_nan=True)


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.device.type == "npu"
        assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)


def to_npu(value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.npu(), value)


def everywhere(op, result, *args, **options):
    """An eager call and a compiled one, with static and with unknown sizes, give what the operator gave."""
    args, options = to_npu(args), to_npu(options)
    result = result if isinstance(result, tuple) else (result,)

    def call(*args, **options):
        results = op(*args, **options)
        return tuple(results) if isinstance(results, list | tuple) else (results,)

    same(call(*args, **options), result)
    for dynamic in (False, True):
        torch._dynamo.reset()
        same(torch.compile(call, backend="npu", fullgraph=True, dynamic=dynamic)(*args, **options), result)


# Operators


def silu(x):
    return x / (1 + torch.exp(-x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(3, 0, 4, 2), (0, 0, 9, 0), (0, 0, 0, 0), (2, 2)])
@pytest.mark.parametrize("list_type", [0, 1])
def test_grouped_matmul(dtype, counts, list_type):
    rows, inner, width = sum(counts) + 2, 5, 7  # two rows more than the groups have
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(len(counts), inner, width).to(dtype)
    wanted = torch.full((rows, width), math.nan, dtype=torch.float64)
    start = 0
    for group, count in enumerate(counts):
        for row in range(start, start + count):
            for column in range(width):
                wanted[row, column] = sum(x[row, k].double() * weight[group, k, column].double() for k in range(inner))
        start += count
    ends = torch.tensor(counts) if list_type else torch.tensor(counts).cumsum(0)
    got = operators.grouped_matmul(x, weight, ends, group_list_type=list_type)
    close(got, wanted)
    turned = operators.grouped_matmul(
        x, weight.transpose(1, 2).contiguous(), ends, group_list_type=list_type, transpose_weight=True
    )
    close(turned, wanted)


def grouped(x, weight, ends, list_type=0, group_type=0, **options):
    return npu_ops.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=group_type, group_list_type=list_type, **options
    )


@pytest.mark.parametrize("list_type", [0, 1])
def test_grouped_matmul_everywhere(list_type, npu_graphs):
    x, weight, ends = torch.randn(9, 6), torch.randn(3, 6, 8), torch.tensor([4, 4, 7])
    if list_type:
        ends = torch.tensor([4, 0, 3])
    result = operators.grouped_matmul(x, weight, ends, group_list_type=list_type)
    everywhere(partial(grouped, list_type=list_type), result, x, weight, ends)
    assert all(graph.types()["GroupedMatmul"] == 1 for graph in npu_graphs)


def test_grouped_matmul_takes_a_transposed_weight():
    x, weight, ends = torch.randn(9, 6), torch.randn(3, 8, 6), torch.tensor([4, 4, 7])
    wanted = operators.grouped_matmul(x, weight, ends, transpose_weight=True)
    lying = weight.npu().transpose(1, 2)
    same(grouped(x.npu(), lying, ends.npu()), [wanted])
    compiled = torch.compile(lambda x, w, e: grouped(x, w.transpose(1, 2), e), backend="npu", fullgraph=True)
    close(compiled(x.npu(), weight.npu(), ends.npu())[0], wanted)


def test_grouped_matmul_over_the_inner_axis():
    counts = (3, 0, 4)
    x, weight = torch.randn(7, 5), torch.randn(7, 6)
    ends = torch.tensor(counts).cumsum(0)
    parts = zip(x.double().split(counts), weight.double().split(counts), strict=True)
    wanted = torch.stack([part.t() @ other for part, other in parts])
    result = operators.grouped_matmul(x.t(), weight, ends, group_type=2)
    close(result, wanted)
    assert result[1].eq(0).all()
    everywhere(lambda x, w, e: grouped(x.t(), w, e, group_type=2), result, x, weight, ends)
    with pytest.raises(Refused, match="transpose of a contiguous"):
        grouped(x.t().contiguous().npu(), weight.npu(), ends.npu(), group_type=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(dtype, dim):
    x = torch.randn(6, 8).to(dtype)
    gate, up = x.double().chunk(2, dim)
    result = operators.swiglu(x, dim)
    close(result, silu(gate) * up)
    if dtype == torch.bfloat16:
        everywhere(npu_ops.npu_swiglu, result, x, dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_backward(dtype):
    x, grad = torch.randn(6, 8).to(dtype), torch.randn(6, 4).to(dtype)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (silu(gate) * up).backward(grad.double())
    result = operators.swiglu_backward(grad, x)
    close(result, wide.grad)
    everywhere(npu_ops.npu_swiglu_backward, result, grad, x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_clipped_swiglu(interleaved):
    x = torch.randn(6, 8) * 5
    wanted = torch.empty(6, 4, dtype=torch.float64)
    for row in range(6):
        for i in range(4):
            gate, up = (x[row, 2 * i], x[row, 2 * i + 1]) if interleaved else (x[row, i], x[row, i + 4])
            gate, up = min(gate.item(), 3.0), max(-3.0, min(up.item(), 3.0))
            wanted[row, i] = gate / (1 + math.exp(-1.5 * gate)) * (up + 0.5)
    options = {"alpha": 1.5, "limit": 3.0, "bias": 0.5, "interleaved": interleaved}
    result = operators.clipped_swiglu(x, **options)
    close(result, wanted)
    everywhere(partial(npu_ops.npu_clipped_swiglu, **options), result, x)


GATING = {  # experts, k, options; each with another way to choose
    "softmax": (6, 2, {}),
    "sigmoid": (6, 3, {"norm_type": 1, "routed_scaling_factor": 2.5}),
    "best_of_a_group": (12, 3, {"norm_type": 1, "k_group": 2, "group_count": 4}),
    "two_best_of_a_group": (12, 3, {"norm_type": 1, "k_group": 2, "group_count": 4, "group_select_mode": 1}),
    "softmax_in_groups": (12, 2, {"k_group": 1, "group_count": 3, "out_flag": True}),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", GATING)
def test_gating(case, biased):
    experts, k, options = GATING[case]
    x = torch.randn(5, experts)
    bias = torch.randn(experts) if biased else None
    weights, chosen, scores = result = operators.moe_gating_top_k(x, k, bias=bias, **options)
    groups, size = options.get("group_count", 1), experts // options.get("group_count", 1)
    for token, row in enumerate(x.double().tolist()):
        if options.get("norm_type"):
            score = [1 / (1 + math.exp(-logit)) for logit in row]
        else:
            score = [math.exp(logit) / sum(map(math.exp, row)) for logit in row]
        choice = [s + (bias[e].item() if biased else 0) for e, s in enumerate(score)]
        count = 2 if options.get("group_select_mode") else 1
        value = [sum(sorted(choice[g * size : (g + 1) * size])[-count:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -value[g])[: options.get("k_group", 1)]
        allowed = [e for e in range(experts) if e // size in kept]
        wanted = sorted(allowed, key=lambda e: -choice[e])[:k]
        assert chosen[token].tolist() == wanted
        total = sum(score[e] for e in wanted) if options.get("norm_type") else 1
        factor = options.get("routed_scaling_factor", 1.0)
        close(weights[token], torch.tensor([score[e] / total * factor for e in wanted]))
        close(scores[token], torch.tensor(score if options.get("out_flag") else [math.nan] * experts))
    everywhere(partial(npu_ops.npu_moe_gating_top_k, **options), result, x, k, bias=bias)


def test_gating_prefers_the_lower_number():
    weights, chosen, _ = operators.moe_gating_top_k(torch.zeros(2, 6, dtype=torch.bfloat16), 3)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert chosen.dtype == torch.int32
    assert weights.dtype == torch.bfloat16


ROUTING = {
    "expert_num": 5,
    "active_num": -1,
    "expert_capacity": -1,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
}


@pytest.mark.parametrize("active", [[], [0, 5], [1, 4]])
@pytest.mark.parametrize("row_idx_type", [0, 1])
def test_init_routing(row_idx_type, active):
    tokens, choices = 7, 2
    x, ids = torch.randn(tokens, 3), torch.randint(0, 5, (tokens, choices), dtype=torch.int32)
    ids[:4, 0] = torch.tensor([0, 1, 3, 4])  # some active, some not
    first, last = active or (0, 5)
    slots = [(e, slot) for slot, e in enumerate(ids.flatten().tolist()) if first <= e < last]
    order = [slot for _, slot in sorted(slots)]
    options = ROUTING | {"active_expert_range": active, "row_idx_type": row_idx_type}
    rows, row_idx, counts, scale = result = operators.moe_init_routing_v2(x, ids, **options)
    assert rows[: len(order)].equal(torch.stack([x[slot // choices] for slot in order]))
    assert rows[len(order) :].isnan().all()
    assert counts.tolist() == [sum(1 for e, _ in slots if e == expert) for expert in range(first, last)]
    assert scale.isnan().all()
    if row_idx_type == 0:
        assert row_idx.tolist() == [order.index(slot) if slot in order else -1 for slot in range(tokens * choices)]
    else:
        assert row_idx[: len(order)].tolist() == order
        assert (row_idx[len(order) :] < -(2**30)).all()
    call = partial(npu_ops.npu_moe_init_routing_v2, **options)
    if active:
        everywhere(call, result, x, ids)
    else:  # torchair's converter fails without a range: Dynamo leaves it out, as it is the default
        same(call(x.npu(), ids.npu()), result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["", "s", "1", "12", "sb", "1sb", "12sb"])
def test_finalize_routing(dtype, given):
    tokens, choices, width, experts = 4, 3, 5, 6
    rows = torch.randn(tokens * choices, width).to(dtype)
    row_idx = torch.randperm(tokens * choices).int()
    scales = torch.rand(tokens, choices).to(dtype) if "s" in given else None
    bias = torch.randn(experts, width).to(dtype) if "b" in given else None
    expert_idx = torch.randint(0, experts, (tokens, choices), dtype=torch.int32) if "b" in given else None
    skip1 = torch.randn(tokens, width).to(dtype) if "1" in given else None
    skip2 = torch.randn(tokens, width).to(dtype) if "2" in given else None
    wanted = torch.zeros(tokens, width, dtype=torch.float64)
    for i in range(tokens):
        wanted[i] += sum(skip[i].double() for skip in (skip1, skip2) if skip is not None)
        for k in range(choices):
            row = rows[row_idx[i + k * tokens]].double()
            row = row if bias is None else row + bias[expert_idx[i, k]].double()
            wanted[i] += row if scales is None else scales[i, k].double() * row
    args = (rows, skip1, skip2, bias, scales, row_idx, expert_idx, 0, choices)
    result = operators.moe_finalize_routing(*args)
    close(result, wanted)
    if dtype == torch.bfloat16:
        everywhere(npu_ops.npu_moe_finalize_routing, result, *args)


def test_routing_there_and_back():
    """Routing, then finalizing with weights of 1/K, gives the tokens back: the two agree on what a row number is."""
    x, ids = torch.randn(6, 4), torch.stack([torch.randperm(5)[:2] for _ in range(6)]).int()

    def there_and_back(x, ids, scales):
        rows, row_idx, _, _ = npu_ops.npu_moe_init_routing_v2(x, ids, **ROUTING, active_expert_range=[0, 5])
        by_choice = row_idx.view(6, 2).t().reshape(-1)
        return npu_ops.npu_moe_finalize_routing(rows, None, None, None, scales, by_choice, None)

    args = to_npu((x, ids, torch.full((6, 2), 0.5)))
    close(there_and_back(*args), x)
    close(torch.compile(there_and_back, backend="npu", fullgraph=True)(*args), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_dtype_cast(dtype):
    x = torch.randn(3, 4) * 5
    code = {torch.bfloat16: 15, torch.float16: 5, torch.int32: 3}[dtype]
    everywhere(npu_ops.npu_dtype_cast, x.to(dtype), x, code)
    same([npu_ops._npu_dtype_cast(x.npu(), dtype)], [x.to(dtype)])


def test_operators_that_have_gradients_run_forward_with_them():
    x = torch.randn(4, 8)
    wanted = operators.swiglu(x), operators.moe_gating_top_k(x, 2)[0]
    leaf = x.npu().requires_grad_()
    for need in (True, False):
        with torch.set_grad_enabled(need):
            close(npu_ops.npu_swiglu(leaf).detach(), wanted[0])
            close(npu_ops.npu_moe_gating_top_k(leaf, 2)[0].detach(), wanted[1])


def test_the_gradient_of_swiglu():
    x = torch.randn(4, 8)
    leaf = x.npu().requires_grad_()
    npu_ops.npu_swiglu(leaf).sum().backward()
    close(leaf.grad, operators.swiglu_backward(torch.ones(4, 4), x))


def test_capture_and_replay():
    x, ends, weight = torch.randn(6, 4).npu(), torch.tensor([2, 6]).npu(), torch.randn(2, 4, 8).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = npu_ops.npu_swiglu(grouped(x, weight, ends)[0])
        with pytest.raises(Refused, match="even along axis"):  # what sizes alone tell is said at once
            npu_ops.npu_swiglu(x[:, :3])
    for split in (0, 3, 6):
        x.copy_(torch.randn(6, 4))
        ends.copy_(torch.tensor([split, 6]))
        graph.replay()
        same([y], [operators.swiglu(operators.grouped_matmul(x.cpu(), weight.cpu(), ends.cpu()))])


# Refusals

X, W, ENDS, IDS = torch.randn(4, 6), torch.randn(2, 6, 8), torch.tensor([1, 4]), torch.ones(4, 2, dtype=torch.int32)
ROWS, ROW_IDX, SCALES = torch.randn(8, 6), torch.arange(8, dtype=torch.int32), torch.ones(4, 2)
gmm, gate = operators.grouped_matmul, operators.moe_gating_top_k
route = partial(operators.moe_init_routing_v2, **ROUTING)
REFUSED = {
    "weight .*8.* float32": lambda: gmm(X, W.transpose(1, 2), ENDS),
    "weight must be .*bfloat16": lambda: gmm(X.bfloat16(), W, ENDS),
    "x must be .*got .*float64": lambda: gmm(X.double(), W.double(), ENDS),
    "group_list must be .*int64, got .*int32": lambda: gmm(X, W, ENDS.int()),
    "group_list must be ends that never fall": lambda: gmm(X, W, torch.tensor([4, 1])),
    "ends that never fall, within 0..4": lambda: gmm(X, W, torch.tensor([1, 5])),
    "never fall.*-1": lambda: gmm(X, W, torch.tensor([-1, 4])),
    "counts >= 0": lambda: gmm(X, W, torch.tensor([-1, 4]), group_list_type=1),
    "counts of at most 4": lambda: gmm(X, W, torch.tensor([3, 2]), group_list_type=1),
    "more than one group when it holds counts": lambda: gmm(X, W[:1], torch.tensor([3]), group_list_type=1),
    "1 to 1024 groups": lambda: gmm(X, torch.zeros(1025, 6, 1), torch.zeros(1025, dtype=torch.int64)),
    "shorter than 65536": lambda: gmm(X[:, :1], torch.zeros(2, 1, 65536), ENDS),
    "group_type must be 0 or 2": lambda: gmm(X, W, ENDS, group_type=1),
    "group_list_type must be 0 or 1": lambda: gmm(X, W, ENDS, group_list_type=2),
    "weight must be as it lies": lambda: gmm(X, W[0], ENDS, group_type=2, transpose_weight=True),
    "x must be even along axis": lambda: operators.swiglu(X[:, :5]),
    "x must be float16": lambda: operators.swiglu(X.double()),
    "dim must be an axis": lambda: operators.swiglu(X, 2),
    "grad_output must be": lambda: operators.swiglu_backward(X, X),
    "group_index must be None": lambda: operators.clipped_swiglu(X, ENDS),
    "of more than one axis": lambda: operators.clipped_swiglu(X[0]),
    "clipped_swiglu: x must be contiguous": lambda: operators.clipped_swiglu(X.t()),
    "the last axis when interleaved": lambda: operators.clipped_swiglu(X, dim=0),
    "input_ids must be None": lambda: gate(X, 1, input_ids=IDS),
    "at most 2048 experts": lambda: gate(torch.zeros(1, 2049), 1),
    "bias must be .*float32": lambda: gate(X, 1, bias=torch.zeros(6).bfloat16()),
    "bias must be .6.": lambda: gate(X, 1, bias=torch.zeros(5)),
    "group_count must be > 0": lambda: gate(X, 1, group_count=0),
    "a divisor of 6": lambda: gate(X, 1, group_count=4),
    "more than 2 of 6": lambda: gate(X, 1, group_count=3),
    "which makes 2080": lambda: gate(torch.zeros(1, 65 * 3), 1, group_count=65),
    "k_group must be within 1..2": lambda: gate(X, 1, group_count=2, k_group=3),
    "k must be within 1..3": lambda: gate(X, 4, group_count=2),
    "k must be within 1..6": lambda: gate(X, 0),
    "group_select_mode must be": lambda: gate(X, 1, group_select_mode=2),
    "renorm must be 0": lambda: gate(X, 1, renorm=1),
    "norm_type must be": lambda: gate(X, 1, norm_type=2),
    "expert_idx must be within .0, 5.": lambda: route(X, IDS * 5),
    "expert_idx must be within .0, 5., got -1": lambda: route(X, -IDS),
    "expert_idx must be .*int64": lambda: route(X, IDS.long()),
    "expert_idx must be .4, any": lambda: route(X, IDS[:3]),
    "quant_mode must be": lambda: route(X, IDS, quant_mode=1),
    "drop_pad_mode must be 0": lambda: route(X, IDS, drop_pad_mode=1),
    "expert_tokens_num_type must be 1": lambda: operators.moe_init_routing_v2(X, IDS, expert_num=5),
    "expert_tokens_num_flag must be True": lambda: operators.moe_init_routing_v2(
        X, IDS, expert_num=5, expert_tokens_num_type=1
    ),
    "row_idx_type must be": lambda: route(X, IDS, row_idx_type=2),
    "active_expert_range must be": lambda: route(X, IDS, active_expert_range=[2, 6]),
    "active_num must be": lambda: operators.moe_init_routing_v2(X, IDS, **(ROUTING | {"active_num": 3})),
    "scale must be None": lambda: route(X, IDS, scale=torch.ones(4)),
    "scales must be .*bfloat16": lambda: finalize(ROWS.bfloat16(), scales=SCALES),
    "dst_row must be within .0, 8.": lambda: finalize(row_idx=ROW_IDX + 1),
    "dst_row must be .8. int32": lambda: finalize(row_idx=ROW_IDX.long()),
    "rows must be of 3 . 2 rows": lambda: finalize(scales=SCALES[:3]),
    "skip1 must be given": lambda: finalize(skip2=X),
    "skip1 must be .4, 6.": lambda: finalize(skip1=ROWS),
    "source_row must be given with bias": lambda: finalize(bias=X),
    "source_row must be within .0, 4.": lambda: finalize(bias=X, expert_idx=IDS * 4),
    "finalize_routing: drop_pad_mode must be 0": lambda: finalize(mode=1),
    "k must be > 0 without scales": lambda: finalize(scales=None, k=0),
}


def finalize(
    rows=ROWS, skip1=None, skip2=None, bias=None, scales=SCALES, row_idx=ROW_IDX, expert_idx=None, mode=0, k=2
):
    return operators.moe_finalize_routing(rows, skip1, skip2, bias, scales, row_idx, expert_idx, mode, k)


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    with pytest.raises(Refused, match=text):
        REFUSED[text]()


def test_refused_on_the_device_and_in_a_graph():
    bad = to_npu((X, W, torch.tensor([1, 5])))
    for function in (grouped, torch.compile(grouped, backend="npu")):
        with pytest.raises(Refused, match=r"ends that never fall, within 0\.\.4"):
            function(*bad)
    x, weight, ends = to_npu((X, W, ENDS))
    for text, options in {"act_type": {"act_type": 1}, "bias": {"bias": [weight[:, 0]]}}.items():
        with pytest.raises(Refused, match=text):
            grouped(x, weight, ends, **options)
        with pytest.raises(Refused, match=text):
            torch.compile(lambda *a, o=options: grouped(*a, **o), backend="npu")(x, weight, ends)
    with pytest.raises(Refused, match="split_item"):
        npu_ops.npu_grouped_matmul([x], [weight], group_list=ends, split_item=0, group_type=0)
    with pytest.raises(Refused, match="one tensor each"):
        npu_ops.npu_grouped_matmul([x, x], [weight], group_list=ends, split_item=3, group_type=0)
    with pytest.raises(Refused, match="x must be laid out row by row"):
        grouped(weight[0].t(), weight.transpose(1, 2), ends)
    with pytest.raises(Refused, match="weight must be laid out row by row or transposed"):
        grouped(x, torch.randn(2, 6, 16).npu()[..., ::2], ends)


# Graphs


class Builder:
    """A GE model written by hand."""

    def __init__(self, *outputs, dtypes=(9,), placements=(1, 1)):
        self.model = ModelDef()
        self.graph = self.model.graph.add(name="by_hand")
        self.graph.attr["_output_dtypes"].list.i.extend(dtypes)
        self.graph.attr["_input_placements"].list.i.extend(placements)
        self.outputs = outputs

    def data(self, name, index, dtype="DT_INT64", shape=(3,)):
        node = self.graph.op.add(name=name, type="Data")
        node.attr["index"].i = index
        description = node.output_desc.add(name="y", dtype=DataType.Value(dtype))
        description.shape.dim.extend(shape)
        return self

    def op(self, type, *sources, name=None, inputs=None, meta=None, **attrs):
        node = self.graph.op.add(name=name or type, type=type, input=list(sources))
        for place in range(len(sources)):
            node.input_desc.add(name=inputs[place] if inputs else f"x{place + 1}")
        for key, value in attrs.items():
            node.attr[key].i = value
        description = node.output_desc.add(name="y", dtype=DataType.Value("DT_INT64"))
        if meta:
            description.attr["_meta"].s = meta.encode()
        return self

    def load(self):
        if self.outputs:
            self.op("NetOutput", *self.outputs)
        return hook.decode(self.model.SerializeToString())


def added(**options):
    return Builder("Add:0", **options).data("a", 0).data("b", 1).op("Add", "a:0", "b:0")


def test_a_graph_by_hand():
    graph = added().op("Neg", "a:0").load()
    one, two = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    same(graph.run([one.npu(), two.npu()]), [one + two])
    target = torch.zeros(3, dtype=torch.int64).npu()
    (result,) = graph.run([one.npu(), two.npu()], [target])
    assert result is target
    same([target], [one + two])
    assert graph.runs == 2
    assert graph.types() == {"Data": 2, "Add": 1, "NetOutput": 1}  # nothing needs Neg
    (node,) = graph.find("Add")
    assert node.inputs["x1"].name == "a"
    assert {n.name for n in graph.ancestors(node)} == {"a", "b"}
    assert "Add = Add(x1=a:0, x2=b:0)" in graph.describe()


@pytest.mark.parametrize(
    ("text", "build"),
    {
        "not implemented: Cholesky, Foo$": lambda: added().op("Foo", "a:0").op("Cholesky", "a:0"),
        "more than one node called a, b$": lambda: added().data("a", 0).data("b", 0),
        "reads c:0: no such node": lambda: added().op("Neg", "c:0"),
        "0 nodes of type NetOutput": lambda: Builder().data("a", 0),
        "needs itself": lambda: Builder("Neg:0").op("Neg", "Abs:0").op("Abs", "Neg:0"),
        "two inputs called x": lambda: added().op("Neg", "a:0", "b:0", inputs=["x", "x"]),
        "1 outputs, 2 declared": lambda: added(dtypes=(9, 9)),
        "data type 77 is not implemented": lambda: added(dtypes=(77,)),
    }.items(),
)
def test_graphs_refused_when_loaded(text, build):
    with pytest.raises(Refused, match=text):
        build().load()


def long(*shape):
    return torch.ones(shape, dtype=torch.int64).npu()


def on_one(type, **options):
    return Builder(f"{type}:0").data("a", 0).op(type, "a:0", **options)


def on_two(type, second="DT_INT64", **options):
    return Builder(f"{type}:0").data("a", 0).data("b", 1, second).op(type, "a:0", "b:0", **options)


SIZE_2 = "Tensor(dtype=torch.int64, shape=torch.Size([2])"
RUN = {
    "int32, the graph wants torch.int64": lambda: (added(), long(3).int(), long(3)),
    "wants .3.": lambda: (added(), long(4), long(4)),
    "1. int64, the graph wants .3.": lambda: (added(), long(3, 1), long(3, 1)),
    "lies on cpu, the graph wants npu": lambda: (added(), long(3).cpu(), long(3).cpu()),
    "lies on npu:0, the graph wants cpu": lambda: (added(placements=(0, 0)), long(3), long(3)),
    "input 1 of 1": lambda: (added(), long(3)),
    "output 0 is .3. int64, declared torch.int32": lambda: (added(dtypes=(3,)), long(3), long(3)),
    "int32 and torch.int64: a GE operator takes one": lambda: (on_two("Add", "DT_INT32"), long(3), long(3).int()),
    "declared torch.int64": lambda: (on_one("Cast", dst_type=3, meta="no tensor"), long(3)),
    "traced as .2.": lambda: (on_one("Neg", meta=SIZE_2), long(3)),
    "is output 1 of": lambda: (Builder("Neg:1").data("a", 0).op("Neg", "a:0"), long(3)),
    "input 1 is missing": lambda: (Builder("Add:0").data("a", 0).op("Add", "a:0", ""), long(3)),
    "indices 3..3 outside .0, 3.": lambda: (on_two("Gather", inputs=["x", "indices"]), long(3), long(3) * 3),
    r"Pack.Pack.: inputs of": lambda: (on_two("Pack", "DT_INT32", inputs=["x0", "x1"], N=2), long(3), long(3).int()),
    "inputs, N is 3": lambda: (on_two("Pack", inputs=["x0", "x1"], N=3), long(3), long(3)),
    "wanted bool": lambda: (on_one("LogicalNot"), long(3)),
    "data type 77": lambda: (on_one("Cast", dst_type=77), long(3)),
}


@pytest.mark.parametrize("text", RUN)
def test_graphs_refused_when_run(text):
    builder, *inputs = RUN[text]()
    graph = builder.load()
    with pytest.raises(Refused, match=text):
        graph.run(inputs)


GE_OPS = {  # what torchair makes of a few lines; each line is another node type or option
    "max": lambda x, i: x.max(-1),
    "rsub": lambda x, i: torch.rsub(x, 2 * x, alpha=3) + (1 - x),
    "sums": lambda x, i: (x.sum(), x.mean(-1, keepdim=True), x.sum(0), x.any()),
    "clamp": lambda x, i: (x.clamp(-1, 1), i.clamp(min=2)),
    "topk": lambda x, i: x.topk(2, -1),
    "sort": lambda x, i: x.sort(0, descending=True),
    "where": lambda x, i: (torch.where(x > 0, x, 0.0), x.masked_fill(x > 0, -torch.inf)),
    "index": lambda x, i: (x[i], x[:, i], x[i, i], x.index_select(0, i), x.gather(1, i[:, None])),
    "scatter": lambda x, i: (x.scatter(1, i[:, None], 1.0), x.scatter_add(1, i[:, None], x[:, :1])),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i, 8).sum(0),
    "cumsum": lambda x, i: (i.cumsum(0), x.cumsum(0), i.cumsum(0, dtype=torch.int32)),
    "powers": lambda x, i: (x.pow(2), x**3, x.abs().sqrt(), x.abs().rsqrt(), 2.0**x),
    "whole_numbers": lambda x, i: (i // 3, i % 3, i / 2, i.div(3, rounding_mode="trunc"), (i > 0) & (i < 3), ~(i > 1)),
    "activations": lambda x, i: (torch.nn.functional.silu(x), x.sigmoid(), x.tanh(), x.softmax(-1), x.log_softmax(-1)),
    "norms": lambda x, i: (
        torch.nn.functional.rms_norm(x, (4,), x[0], 1e-6),
        torch.nn.functional.layer_norm(x, (4,), x[0], x[1]),
    ),
    "matmuls": lambda x, i: (
        x @ x.t(),
        torch.nn.functional.linear(x[None], x, x[:, 0]),
        torch.bmm(x[None], x.t()[None]),
        torch.einsum("ij,kj->ik", x, x),
    ),
    "joins": lambda x, i: (torch.cat([x, x], -1), torch.stack([x, x]), x.split(2, -1), x.chunk(2, 1)),
    "cuts": lambda x, i: (x[1:, ::2], x[..., -1], x.narrow(0, 1, 2), x.tril(), x.triu(1), x.flip(0)),
    "shapes": lambda x, i: (x.repeat(2, 1), x[:, None].expand(4, 3, 4).reshape(12, 4), x.t() + 1),
    "new": lambda x, i: (
        torch.arange(x.shape[0], device=x.device) + 1,
        torch.full((3, x.shape[0]), 2.0, device=x.device),
        torch.zeros_like(x),
    ),
    "casts": lambda x, i: (x.int(), x.bfloat16(), x.bool(), i.float()),
    "extremes": lambda x, i: (x.argmax(-1), x.argmin(0), x.max(), x.sin(), x.cos(), x.exp(), x.abs().log1p()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GE_OPS)
def test_torch_in_a_graph(name, dynamic, npu_graphs):
    x, i = torch.randn(4, 4), torch.randint(0, 4, (4,))
    compiled = torch.compile(GE_OPS[name], backend="npu", fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        assert_close(
            torch.utils._pytree.tree_map(torch.Tensor.cpu, compiled(x.npu(), i.npu())),
            GE_OPS[name](x, i),
            rtol=1e-5,
            atol=1e-5,
        )
    (graph,) = npu_graphs
    assert graph.runs == 2


def test_no_order_among_equals_is_not_the_natural_one():
    """A program that relies on one works here by chance, and not on a device."""
    x = torch.tensor([[2.0, 1, 2, 1]])
    ids = torch.compile(lambda x: (x.topk(3)[1], x.sort(descending=True)[1]), backend="npu")(x.npu())
    assert [i.tolist() for i in ids] == [[[2, 0, 3]], [[2, 0, 3, 1]]]


def test_inputs_written_in_place():
    def write(x, y):
        before = x.clone()
        x.add_(1)
        y[0] = 2.0
        return x + y, before

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    on_npu = x.npu(), y.npu()
    result = torch.compile(write, backend="npu", fullgraph=True)(*on_npu)
    for got, wanted in zip(result, write(x, y), strict=True):
        close(got, wanted)
    close(on_npu[0], x)
    close(on_npu[1], y)


def test_an_output_that_is_an_input_keeps_its_value():
    graph = Builder("Add:0", "a:0", dtypes=(9, 9)).data("a", 0).data("b", 1).op("Add", "a:0", "b:0").load()
    a = long(3)
    same(graph.run([a, long(3)], [a, None]), [torch.full((3,), 2), torch.ones(3, dtype=torch.int64)])


def test_one_graph_for_all_sizes(npu_graphs):
    def block(x, w13, w2, ends):
        return grouped(npu_ops.npu_swiglu(grouped(x, w13, ends.to(torch.int64))[0]), w2, ends.to(torch.int64))[0]

    w13, w2 = torch.randn(3, 4, 10), torch.randn(3, 5, 4)
    compiled = torch.compile(block, backend="npu", fullgraph=True, dynamic=True)
    for ends in ([2, 2, 9], [0, 0, 6], [7, 8, 12]):
        x, last = torch.randn(ends[-1], 4), torch.tensor(ends, dtype=torch.int32)
        wide = operators.swiglu(operators.grouped_matmul(x, w13, last.long()))
        close(compiled(*to_npu((x, w13, w2, last))), operators.grouped_matmul(wide, w2, last.long()))
    (graph,) = npu_graphs
    assert graph.runs == 3
    nodes = graph.find("GroupedMatmul")
    assert len(nodes) == 2
    assert all(node.inputs["group_list"].type == "Cast" for node in nodes), graph.describe()
    assert graph.find("SwiGlu")[0] in graph.ancestors(nodes[1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_llama(dynamic, npu_graphs):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1 if dynamic else 2,  # tracing unknown sizes is slow
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        compiled = torch.compile(model.npu(), backend="npu", dynamic=dynamic)
        got = compiled(input_ids=ids.npu(), attention_mask=mask.npu(), use_cache=False).logits
    close(got[mask.bool().npu()], wanted[mask.bool()])
    assert len(npu_graphs) == 1
