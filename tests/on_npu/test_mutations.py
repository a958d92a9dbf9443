"""Wrong converters: each must be caught, by the graph engine, by torchair, or by the numbers.

A mutation is a text of lowering.py or nodes.py and what stands there instead.
"""
# ruff: noqa: E501  # one mutation, one line

import types
from pathlib import Path

import cases
import oracle
import pytest
import torch

from npu_moe_ops import ops
from npu_moe_ops.npu import lowering, nodes
from npu_moe_ops.testing import TOLERANCE

SOURCES = {module: Path(module.__file__).read_text() for module in (nodes, lowering)}
op = torch.ops.npu_moe
E, H, I, K = 6, 34, 18, 3
COUNTS = (0, 5, 1, 0, 4, 2)
N = sum(COUNTS) + 3  # with tail rows


def on_npu(function, *args, dynamic=False):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="npu", fullgraph=True, dynamic=dynamic)
    out = compiled(*(a.npu() if isinstance(a, torch.Tensor) else a for a in args))
    return tuple(t.cpu() for t in out) if isinstance(out, (tuple, list)) else out.cpu()


def check_ffn(layout="stacked", dtype=torch.float32, dynamic=False, **swiglu):
    x, w13, w2, c = cases.ffn_inputs(N, H, I, COUNTS, dtype)
    x[sum(COUNTS) :] = torch.nan
    laid = {
        "stacked": lambda w: w,
        "flat": lambda w: w.reshape(-1, w.shape[-1]),
        "transposed": lambda w: w.transpose(1, 2).contiguous(),
    }[layout]
    views = (lambda w: w.transpose(1, 2)) if layout == "transposed" else lambda w: w
    function = lambda x, a, b, c: op.grouped_swiglu_ffn(x, views(a), views(b), c, **swiglu)  # noqa: E731
    out = on_npu(function, x, laid(w13), laid(w2), c, dynamic=dynamic)
    names = {name.removeprefix("swiglu_"): value for name, value in swiglu.items()}
    expected = oracle.ffn(x.nan_to_num(), w13, w2, COUNTS, round_to=dtype, **names)
    torch.testing.assert_close(out.double(), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def check_flat():
    check_ffn("flat", torch.bfloat16)
    check_ffn("flat", dynamic=True)


def check_transposed():
    check_ffn("transposed", torch.float16)


def check_clipped():
    check_ffn(swiglu_limit=0.5, swiglu_alpha=1.7, swiglu_beta=1.0)


def check_bad_offsets():
    x, w13, w2, _ = cases.ffn_inputs(N, H, I, COUNTS)
    for offsets in ([0, -3, 30, 4, 2, 1, 9], [-9, -3, -1, 0, 0, 2, 2]):
        on_npu(op.grouped_swiglu_ffn.default, x, w13, w2, torch.tensor(offsets))


def check_router(dtype=torch.bfloat16, experts=8, **options):
    args = torch.randn(40, H).to(dtype), torch.randn(experts, H), torch.randn(experts) / 4, K
    weights, ids, logits = on_npu(lambda *a: op.topk_router(*a, **options), *args)
    expected = op.topk_router(*args, **options)
    torch.testing.assert_close((weights, ids, logits), expected)


def check_softmax():
    check_router(routed_scaling_factor=1.5)


def check_sigmoid():
    check_router(scoring="sigmoid", n_group=2, topk_group=1, routed_scaling_factor=2.5)


def check_softmax_raw():
    check_router(renormalize=False, routed_scaling_factor=1.5)


def check_small_groups():
    check_router(torch.float32, n_group=4, topk_group=2)
    same = torch.zeros(5, H), torch.randn(8, H), torch.tensor([-2.0, -2, 0, -1, -3, -3, -4, -4]), K
    router = lambda *a: op.topk_router(*a, n_group=4, topk_group=2)  # noqa: E731
    torch.testing.assert_close(on_npu(router, *same), router(*same))


def there_and_back(x, ids, weights):
    rows, c, row_of = op.permute(x, ids, E)
    return rows, c, row_of, op.unpermute(2 * rows, row_of, weights)


def check_permute(dtype=torch.float32):
    ids = torch.tensor([[0, 5, 2], [2, 2, 4], [-1, 6, 0], [2**32, 1, 5]])
    args = torch.randn(4, H).to(dtype), ids, torch.randn(4, K)
    torch.testing.assert_close(on_npu(there_and_back, *args), there_and_back(*args))


def check_unpermute():
    rows, row_of, weights = torch.randn(12, H).bfloat16(), torch.arange(12).view(4, 3).flip(0), torch.randn(4, K)
    torch.testing.assert_close(on_npu(op.unpermute.default, rows, row_of, weights),
                               op.unpermute(rows, row_of, weights), rtol=0, atol=0)  # fmt: skip
    row_of[1, 1] -= 12
    rows[row_of[1, 1]] = torch.nan
    weights[1, 1] = torch.inf
    torch.testing.assert_close(on_npu(op.unpermute.default, rows, row_of, weights), op.unpermute(rows, row_of, weights))


def check_layer(sentinels=True):
    _, w13, w2, _ = cases.ffn_inputs(N, H, I, COUNTS)

    def layer(x, router, w13, w2, lost):
        weights, ids, _ = op.topk_router(x, router, None, K)
        if sentinels:
            ids = torch.where(lost, -1, ids)
        rows, c, row_of = op.permute(x, ids, E)
        out = op.grouped_swiglu_ffn(rows + 1, w13, w2, c)
        return op.unpermute(out, row_of, weights), rows, out

    args = torch.randn(7, H), torch.randn(E, H), w13, w2, torch.rand(7, K) < 0.4
    torch.testing.assert_close(on_npu(layer, *args), layer(*args), rtol=1e-4, atol=1e-4)


def check_whole_layer():
    check_layer(sentinels=False)


def check_backward():
    for swiglu in ({}, {"swiglu_limit": 0.5, "swiglu_alpha": 1.7, "swiglu_beta": 1.0}):
        x, w13, w2, c = cases.ffn_inputs(N, H, I, COUNTS)
        backward = lambda *a, s=swiglu: op.grouped_swiglu_ffn_backward(*a, [True] * 3, **s)  # noqa: E731
        args = torch.randn(N, H), x, w13, w2, c
        torch.testing.assert_close(on_npu(backward, *args), backward(*args), rtol=1e-4, atol=1e-4)


SWAP = (
    "first, second = builder().SplitV(both, int32([18, 18]), int32(1), num_split=2)\n"
    "        return builder().SwiGlu(builder().ConcatV2([second, first], int32(1), N=2), dim=-1)"
)
GATING = "**cann.gating(n_group, topk_group, scoring)"
CLIP = "**cann.clip(limit, alpha, beta)"
ENDS = 'ge.Cast(ge.Slice(offsets, int32([1]), int32([-1])), dst_type=kind("INT64"))'
MINE = "ge.LogicalAnd(ge.GreaterEqual(topk_ids, zero), ge.Less(topk_ids, no_expert))"
COUNTED = 'ge.Cast(counts, dst_type=kind("INT32"))'
MUTATIONS = {
    "halves_swapped": (check_flat, "return builder().SwiGlu(both, dim=-1)", SWAP),
    "halves_along_rows": (check_flat, "builder().SwiGlu(both, dim=-1)", "builder().SwiGlu(both, dim=0)"),
    "counts_for_cumsum": (check_flat, "group_list_type=0", "group_list_type=1"),
    "group_list_with_the_leading_0": (check_flat, ENDS, "ge.Cast(offsets, dst_type=kind('INT64'))"),
    "group_list_one_expert_late": (check_flat, "int32([1]), int32([-1])), dst_type", "int32([0]), int32([6])), dst_type"),
    "group_list_int32": (check_flat, ENDS, "ge.Slice(offsets, int32([1]), int32([-1]))"),
    "output_dtype_asked_for": (check_flat, "dtype=-1,", "dtype=1,"),
    "result_in_parts": (check_flat, "split_item=3", "split_item=0"),
    "no_groups": (check_flat, "group_type=0", "group_type=-1"),
    "an_activation_inside": (check_flat, "act_type=0", "act_type=5"),
    "down_reshaped_the_wrong_way": (check_flat, "out = multiply_rows(h, expert_weights(w2, gate_up // 2, hidden)", "out = multiply_rows(h, expert_weights(w2, hidden, gate_up // 2)"),
    "up_reshaped_the_wrong_way": (check_flat, "h = multiply_rows(sorted_tokens, expert_weights(w13, hidden, gate_up)", "h = multiply_rows(sorted_tokens, expert_weights(w13, gate_up, hidden)"),
    "weights_exchanged": (check_flat, "[x],\n        [weight],", "[weight],\n        [x],"),
    "absent_bias_of_the_wrong_dtype": (check_flat, "absent(kind(\"FLOAT\") if dtype == kind(\"BF16\") else dtype)", "absent(kind(\"INT32\"))"),
    "bias_present": (check_flat, "ge.Fill(int32([0])", "ge.Fill(int32([1])"),
    "transposed_unnoticed": (check_transposed, "transpose_weight=weight.transposed", "transpose_weight=False"),
    "transposed_twice": (check_transposed, "else Weight(source, True)", "else Weight(weight, True)"),
    "limit_dropped": (check_clipped, CLIP, "**cann.clip(None, alpha, beta)"),
    "alpha_dropped": (check_clipped, CLIP, "**cann.clip(limit, 1.0, beta)"),
    "beta_dropped": (check_clipped, CLIP, "**cann.clip(limit, alpha, 0.0)"),
    "interleaved": (check_clipped, CLIP, "**(cann.clip(limit, alpha, beta) | {'interleaved': True})"),
    "clip_forgotten": (check_clipped, "if cann.is_plain(limit, alpha, beta):\n        return builder().SwiGlu(", "if True:\n        return builder().SwiGlu("),
    "tail_left_as_it_is": (check_flat, "return out if made(expert_cumsum, FULL_OFFSETS) else", "return out if True else"),
    "tail_begins_a_row_late": (check_flat, "ge.GreaterEqual(ge.Range", "ge.Greater(ge.Range"),
    "offsets_beyond_the_rows": (check_bad_offsets, "inside = ge.Minimum(", "inside = (lambda a, b: a)("),
    "offsets_below_0": (check_bad_offsets, "ge.Maximum(expert_cumsum, ge.Const(0, dtype))", "expert_cumsum"),
    "offsets_that_fall": (check_bad_offsets, "rising, _ = ge.Cummax(", "rising, _ = (lambda x, dim: (x, x))("),
    "offsets_trusted": (check_bad_offsets, "if made(expert_cumsum, OFFSETS) or", "if True or"),
    "router_not_transposed": (check_softmax, "transpose_x2=True", "transpose_x2=False"),
    "router_in_bfloat16": (check_softmax, "ge.MatMul(float32(hidden_states), float32(router_weight)", "ge.MatMul(hidden_states, ge.Cast(router_weight, dst_type=hidden_states.dtype)"),
    "router_of_two_dtypes": (check_softmax, "ge.MatMul(float32(hidden_states)", "ge.MatMul(hidden_states"),
    "bias_forgotten": (check_softmax, "bias = None if correction_bias is None else float32(correction_bias)", "bias = None"),
    "not_renormalized": (check_softmax, "weighs = cann.gating_weighs(scoring, renormalize, top_k)", "weighs = True"),
    "scale_dropped": (check_sigmoid, "routed_scaling_factor if weighs else 1.0", "1.0"),
    "scale_applied_twice": (check_softmax, "ge.Muls(weights, value=routed", "ge.Muls(weights, value=routed_scaling_factor * routed"),
    "scores_not_asked_for": (check_softmax, "out_flag=not weighs", "out_flag=False"),
    "group_by_its_best": (check_sigmoid, GATING, "**(cann.gating(n_group, topk_group, scoring) | {'group_select_mode': 0})"),
    "groups_exchanged": (check_sigmoid, GATING, "**cann.gating(topk_group, n_group, scoring)"),
    "softmax_for_sigmoid": (check_sigmoid, GATING, "**cann.gating(n_group, topk_group, 'softmax')"),
    "ids_int32": (check_softmax, "ge.Cast(ids, dst_type=kind(\"INT64\"), node_name=marked(ROUTED_IDS))", "ids"),
    "renormalized_over_tokens": (check_softmax, "total = ge.ReduceSum(weights, int32([-1])", "total = ge.ReduceSum(weights, int32([0])"),
    "ties_to_any": (check_small_groups, "descending=True, stable=True", "descending=True, stable=False"),
    "worst_experts": (check_small_groups, "descending=True", "descending=False"),
    "small_group_by_its_best": (check_small_groups, "int32(min(2, experts // n_group))", "int32(1)"),
    "dropped_groups_are_0": (check_small_groups, "ge.Const(float(\"-inf\")", "ge.Const(float(0)"),
    "lost_ids_in_the_last_expert": (check_permute, "owners, dtype = num_experts + 1,", "owners, dtype = num_experts,"),
    "negative_ids_kept": (check_permute, MINE, "ge.Less(topk_ids, no_expert)"),
    "large_ids_kept": (check_permute, MINE, "ge.GreaterEqual(topk_ids, zero)"),
    "ids_int64": (check_permute, "ge.Cast(topk_ids, dst_type=kind(\"INT32\"))", "topk_ids"),
    "row_numbers_scattered": (check_permute, "**cann.INIT_ROUTING", "**(cann.INIT_ROUTING | {'row_idx_type': 1})"),
    "cumsum_asked_of_cann": (check_permute, "**cann.INIT_ROUTING", "**(cann.INIT_ROUTING | {'expert_tokens_num_type': 0})"),
    "fewer_active_experts": (check_permute, "active_expert_range=[0, owners]", "active_expert_range=[1, owners]"),
    "counts_for_offsets": (check_permute, f"ge.Cumsum({COUNTED}, int32(0))", COUNTED),
    "offsets_shifted": (check_permute, "ge.ConcatV2([int32([0]), ends]", "ge.ConcatV2([ends, int32([0])]"),
    "lost_rows_kept": (check_permute, "sorted_tokens = zero_tail(sorted_tokens, offsets, hidden_states.dtype)", "pass"),
    "lost_rows_counted_from_the_front": (check_permute, "ge.SelectV2(mine, row_of, ge.Sub(row_of, length(sorted_tokens)))", "row_of"),
    "slots_token_by_token": (check_unpermute, "ge.Transpose(row_of, int32([1, 0]))", "row_of"),
    "unpermute_in_bfloat16": (check_unpermute, "int32([1, 0])), int32([-1]))\n    weights = float32(topk_weights)", "int32([1, 0])), int32([-1]))\n    weights = float32(ge.Cast(topk_weights, dst_type=expert_out.dtype))"),
    "lost_rows_multiplied": (check_unpermute, "ge.MaskedFill(ge.Cast(rows, dst_type=kind(\"FLOAT\")), ge.Unsqueeze(lost, axes=[1]), nothing)", "ge.Cast(rows, dst_type=kind(\"FLOAT\"))"),
    "lost_weights_multiplied": (check_unpermute, "weights = ge.MaskedFill(", "ge.MaskedFill("),
    "lost_rows_taken_for_good": (check_permute, "if made(row_of, FULL_ROWS) and", "if"),
    "lost_slots_forgotten": (check_layer, "name = marked(FULL_OFFSETS if full else OFFSETS)", "name = marked(FULL_OFFSETS)"),
    "any_ids_taken_for_routed": (check_layer, "full = made(topk_ids, ROUTED_IDS)", "full = True"),
    "slots_token_by_token_in_a_layer": (check_whole_layer, "ge.Transpose(row_of, int32([1, 0]))", "row_of"),
    "gradient_by_the_wrong_weights": (check_backward, "down.flipped()", "down"),
    "gradient_of_the_tail_kept": (check_backward, "grad_tokens = zero_tail(grad_tokens, offsets, dtype)", "pass"),
    "gradient_of_weights_exchanged": (check_backward, "multiply_experts(sorted_tokens, grad_both, ends, dtype)", "multiply_experts(grad_both, sorted_tokens, ends, dtype)"),
    "gradient_not_transposed": (check_backward, "transpose_x=True", "transpose_x=False"),
    "gradient_without_activation": (check_backward, "multiply_experts(_activation(both, *swiglu), grad_out", "multiply_experts(ge.Slice(both, int32([0, 0]), int32([-1, gate_up // 2])), grad_out"),
    "gradient_through_the_limit": (check_backward, "d_gate = ge.MaskedFill(d_gate, ge.Greater(raw_gate, high), zero)", "pass"),
    "gradient_of_a_limit_on_one_side": (check_backward, "ge.Greater(ge.Abs(raw_up), high)", "ge.Greater(raw_up, high)"),
}  # fmt: skip
CHECKS = sorted({check for check, _, _ in MUTATIONS.values()}, key=lambda check: check.__name__)


@pytest.mark.parametrize("check", CHECKS)
def test_the_converters_pass(check):
    check()


def mutated(right, wrong):
    """lowering, from the changed texts; nothing of it is left in the package."""
    found = {module: text.count(right) for module, text in SOURCES.items()}
    assert sum(found.values()) == 1, "the text of a converter has changed: write this mutation anew"
    made = []
    for module, text in SOURCES.items():
        copy = types.ModuleType(module.__name__)
        copy.__package__ = module.__package__
        exec(compile(text.replace(right, wrong), module.__name__, "exec"), copy.__dict__)
        made.append(copy)
    building, converters = made
    imported = vars(building).keys() & vars(converters).keys()
    vars(converters).update({name: vars(building)[name] for name in imported if not name.startswith("__")})
    return converters


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_converter_is_caught(mutation, monkeypatch):
    check, right, wrong = MUTATIONS[mutation]
    converters = mutated(right, wrong)
    for name in ops.LOWERINGS:
        overload = getattr(op, name).default
        monkeypatch.setattr(overload, "_ge_converter", ops._converter(name, getattr(converters, name)))
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whoever notices
        check()
    error = caught.value
    while error is not None:
        assert not isinstance(error, (NameError, SyntaxError)), "the mutation itself is broken"
        error = error.__cause__
