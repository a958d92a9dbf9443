"""The ops as nodes of a GE graph: what torch.compile(backend="npu") asks torchair for.

Each function takes the arguments of its op, with torchair's symbolic tensors, and returns such tensors. Sizes of
weights are constants of a graph; numbers of tokens and rows may be symbols, and are read from tensors when it runs.

What CANN's operators do is documented in torch_npu's wheel: see cann.py, and torchair's own converters of
npu_grouped_matmul, npu_swiglu, npu_clipped_swiglu, npu_moe_gating_top_k, npu_moe_init_routing_v2 and
npu_moe_finalize_routing in torchair/_ge_concrete_graph/ge_converter/custom.
"""

from . import cann
from .nodes import (
    FULL_OFFSETS,
    FULL_ROWS,
    OFFSETS,
    ROUTED_IDS,
    Node,
    always,
    builder,
    ends_of,
    expert_weights,
    float32,
    int32,
    kind,
    length,
    made,
    marked,
    multiply_experts,
    multiply_rows,
    safe_offsets,
    zero_tail,
    zeros,
)


def grouped_swiglu_ffn(
    sorted_tokens: Node,
    w13: Node,
    w2: Node,
    expert_cumsum: Node,
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
) -> Node:
    """GroupedMatmul -> SwiGlu or ClippedSwiglu -> GroupedMatmul, and 0 in the rows of no expert."""
    hidden, gate_up = _sizes("grouped_swiglu_ffn", sorted_tokens, w13, w2, expert_cumsum)
    offsets, dtype = safe_offsets(expert_cumsum, sorted_tokens), sorted_tokens.dtype
    ends = ends_of(offsets)
    h = multiply_rows(sorted_tokens, expert_weights(w13, hidden, gate_up), ends, dtype)
    h = _activation(h, swiglu_limit, swiglu_alpha, swiglu_beta)
    out = multiply_rows(h, expert_weights(w2, gate_up // 2, hidden), ends, dtype)
    return out if made(expert_cumsum, FULL_OFFSETS) else zero_tail(out, offsets, dtype)


def grouped_swiglu_ffn_backward(
    grad_out: Node,
    sorted_tokens: Node,
    w13: Node,
    w2: Node,
    expert_cumsum: Node,
    output_mask: list[bool],
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
) -> tuple[Node, Node, Node]:
    """gate and up again, then GroupedMatmul over rows for the tokens and over experts for the weights."""
    ge = builder()
    hidden, gate_up = _sizes("grouped_swiglu_ffn_backward", sorted_tokens, w13, w2, expert_cumsum)
    dtype, swiglu = sorted_tokens.dtype, (swiglu_limit, swiglu_alpha, swiglu_beta)
    tensors = (sorted_tokens, w13, w2)
    if always(sorted_tokens.symsize[0] == 0):
        shapes = (t.symsize if asked else [0] for t, asked in zip(tensors, output_mask, strict=True))
        grad_tokens, grad_w13, grad_w2 = (zeros(shape, dtype) for shape in shapes)
        return grad_tokens, grad_w13, grad_w2
    need_tokens, need_w13, need_w2 = output_mask
    grad_tokens = grad_w13 = grad_w2 = None
    up, down = expert_weights(w13, hidden, gate_up), expert_weights(w2, gate_up // 2, hidden)
    offsets = safe_offsets(expert_cumsum, sorted_tokens)
    ends = ends_of(offsets)
    both = multiply_rows(sorted_tokens, up, ends, dtype)
    if need_w2:
        grad_w2 = multiply_experts(_activation(both, *swiglu), grad_out, ends, dtype)
    if need_tokens or need_w13:
        grad_h = multiply_rows(grad_out, down.flipped(), ends, dtype)
        grad_both = _activation_gradient(grad_h, both, gate_up // 2, dtype, *swiglu)
        if need_w13:
            grad_w13 = multiply_experts(sorted_tokens, grad_both, ends, dtype)
        if need_tokens:
            grad_tokens = multiply_rows(grad_both, up.flipped(), ends, dtype)
            if not made(expert_cumsum, FULL_OFFSETS):
                grad_tokens = zero_tail(grad_tokens, offsets, dtype)
    grads = []
    for grad, tensor in zip((grad_tokens, grad_w13, grad_w2), tensors, strict=True):
        if grad is None:
            grad = zeros([0], dtype)
        elif tensor is not sorted_tokens and len(tensor.symsize) == 2:
            grad = ge.Reshape(grad, int32([-1, int(tensor.symsize[1])]))
        grads.append(grad)
    return grads[0], grads[1], grads[2]


def topk_router(
    hidden_states: Node,
    router_weight: Node,
    correction_bias: Node | None,
    top_k: int,
    scoring: str,
    n_group: int | None,
    topk_group: int | None,
    renormalize: bool,
    routed_scaling_factor: float,
) -> tuple[Node, Node, Node]:
    """MatMul in float32 -> MoeGatingTopK; where CANN's weights are not ours, from its scores."""
    ge = builder()
    cann.refuse_float64("topk_router", "hidden_states", hidden_states.meta.dtype)
    experts = int(router_weight.symsize[0])
    n_group, topk_group = cann.groups(experts, n_group, topk_group)
    logits = ge.MatMul(float32(hidden_states), float32(router_weight), None, transpose_x2=True)
    bias = None if correction_bias is None else float32(correction_bias)
    weighs = cann.gating_weighs(scoring, renormalize, top_k)
    if cann.gates(experts, n_group):
        weights, ids, scores = ge.MoeGatingTopK(
            logits,
            bias,
            None,
            None,
            k=top_k,
            out_flag=not weighs,
            routed_scaling_factor=routed_scaling_factor if weighs else 1.0,
            **cann.gating(n_group, topk_group, scoring),
        )
    else:
        weighs = False
        scores = ge.Sigmoid(logits) if scoring == "sigmoid" else ge.SoftmaxV2(logits, axes=[-1])
        choice = scores if bias is None else ge.Add(scores, bias)
        ids = _best(choice, experts, top_k, n_group, topk_group)
    # A row of NaN has no best expert: whatever CANN answers, ids stay within [0, E).
    ids = ge.Minimum(ge.Maximum(ids, int32(0)), int32(experts - 1))
    if not weighs:
        weights = ge.GatherElements(scores, ids, dim=1)
        if renormalize and top_k > 1:
            total = ge.ReduceSum(weights, int32([-1]), keep_dims=True)
            weights = ge.RealDiv(weights, ge.Adds(total, value=1e-20))
        weights = ge.Muls(weights, value=routed_scaling_factor)
    return weights, ge.Cast(ids, dst_type=kind("INT64"), node_name=marked(ROUTED_IDS)), logits


def permute(hidden_states: Node, topk_ids: Node, num_experts: int) -> tuple[Node, Node, Node]:
    """MoeInitRoutingV3. Ids of no expert become those of one expert more, whose rows come last and are then zeroed."""
    ge = builder()
    cann.refuse_float64("permute", "hidden_states", hidden_states.meta.dtype)
    cann.refuse_routing(num_experts)
    tokens, top_k = topk_ids.symsize
    if always(tokens * top_k == 0):
        offsets = ge.Const([0] * (num_experts + 1), kind("INT32"), node_name=marked(FULL_OFFSETS))
        rows = zeros([0, hidden_states.symsize[1]], hidden_states.dtype)
        return rows, offsets, zeros(topk_ids.symsize, kind("INT64"))
    full = made(topk_ids, ROUTED_IDS)
    owners, mine = num_experts, None
    if not full:
        owners, dtype = num_experts + 1, topk_ids.dtype
        zero, no_expert = ge.Const(0, dtype), ge.Const(num_experts, dtype)
        mine = ge.LogicalAnd(ge.GreaterEqual(topk_ids, zero), ge.Less(topk_ids, no_expert))
        topk_ids = ge.SelectV2(mine, topk_ids, no_expert)
    sorted_tokens, row_of, counts, _ = ge.MoeInitRoutingV3(
        hidden_states,
        ge.Cast(topk_ids, dst_type=kind("INT32")),
        None,
        None,
        expert_num=owners,
        active_expert_range=[0, owners],
        **cann.INIT_ROUTING,
    )
    ends = ge.Cumsum(ge.Cast(counts, dst_type=kind("INT32")), int32(0))
    if not full:
        ends = ge.Slice(ends, int32([0]), int32([num_experts]))
    name = marked(FULL_OFFSETS if full else OFFSETS)
    offsets = ge.ConcatV2([int32([0]), ends], int32(0), N=2, node_name=name)
    row_of = ge.Reshape(row_of, int32([-1, int(top_k)]))
    if not full:
        row_of = ge.SelectV2(mine, row_of, ge.Sub(row_of, length(sorted_tokens)))
        sorted_tokens = zero_tail(sorted_tokens, offsets, hidden_states.dtype)
    return (
        sorted_tokens,
        offsets,
        ge.Cast(row_of, dst_type=kind("INT64"), node_name=marked(FULL_ROWS) if full else None),
    )


def unpermute(expert_out: Node, row_of: Node, topk_weights: Node) -> Node:
    """MoeFinalizeRoutingV2 in float32, since it wants weights of the rows' dtype. It reads slots k by k, not t by t.

    Slots of no expert get rows of zeros: it would multiply whatever memory holds.
    """
    ge = builder()
    cann.refuse_float64("unpermute", "expert_out", expert_out.meta.dtype)
    tokens, top_k = row_of.symsize
    if always(top_k == 0):
        return zeros([tokens, expert_out.symsize[1]], expert_out.dtype)
    slots = ge.Reshape(ge.Transpose(row_of, int32([1, 0])), int32([-1]))
    weights = float32(topk_weights)
    if made(row_of, FULL_ROWS) and always(expert_out.symsize[0] == tokens * top_k):
        rows, source = float32(expert_out), ge.Cast(slots, dst_type=kind("INT32"))
    else:
        zero, nothing = ge.Const(0, kind("INT64")), ge.Const(0.0, kind("FLOAT"))
        lost = ge.Less(slots, zero)
        from_front = ge.Add(slots, ge.Cast(length(expert_out), dst_type=kind("INT64")))
        rows = ge.GatherV2(expert_out, ge.SelectV2(lost, from_front, slots), int32(0))
        rows = ge.MaskedFill(ge.Cast(rows, dst_type=kind("FLOAT")), ge.Unsqueeze(lost, axes=[1]), nothing)
        weights = ge.MaskedFill(weights, ge.Less(row_of, zero), nothing)
        source = ge.Range(int32(0), length(slots), int32(1))
    out = ge.MoeFinalizeRoutingV2(rows, source, None, None, None, weights, None, drop_pad_mode=0, k=int(top_k))
    return ge.Cast(out, dst_type=expert_out.dtype)


def _sizes(op: str, sorted_tokens: Node, w13: Node, w2: Node, expert_cumsum: Node) -> tuple[int, int]:
    """(H, 2I), checked."""
    hidden, gate_up = int(w2.symsize[-1]), int(w13.symsize[-1])
    cann.refuse_float64(op, "sorted_tokens", sorted_tokens.meta.dtype)
    cann.refuse_grouped_matmul(op, int(expert_cumsum.symsize[0]) - 1, hidden, gate_up)
    return hidden, gate_up


def _activation(both: Node, limit: float | None, alpha: float, beta: float) -> Node:
    if cann.is_plain(limit, alpha, beta):
        return builder().SwiGlu(both, dim=-1)
    return builder().ClippedSwiglu(both, None, **cann.clip(limit, alpha, beta))


def _activation_gradient(
    grad_h: Node, both: Node, width: int, dtype: int, limit: float | None, alpha: float, beta: float
) -> Node:
    """The formula is in reference.py."""
    ge = builder()
    if cann.is_plain(limit, alpha, beta):
        return ge.SwiGluGrad(grad_h, both, dim=-1)
    one, grad_h = ge.Const(1.0, kind("FLOAT")), ge.Cast(grad_h, dst_type=kind("FLOAT"))
    both = ge.Cast(both, dst_type=kind("FLOAT"))
    raw_gate, raw_up = ge.SplitV(both, int32([width, width]), int32(1), num_split=2)
    gate, up = raw_gate, raw_up
    if limit is not None:
        high, low = ge.Const(limit, kind("FLOAT")), ge.Const(-limit, kind("FLOAT"))
        gate, up = ge.Minimum(gate, high), ge.Minimum(ge.Maximum(up, low), high)
    s = ge.Sigmoid(ge.Muls(gate, value=alpha))
    slope = ge.Add(one, ge.Mul(ge.Muls(gate, value=alpha), ge.Sub(one, s)))
    d_gate = ge.Mul(ge.Mul(ge.Mul(grad_h, s), slope), ge.Adds(up, value=beta))
    d_up = ge.Mul(ge.Mul(grad_h, gate), s)
    if limit is not None:
        zero = ge.Const(0.0, kind("FLOAT"))
        d_gate = ge.MaskedFill(d_gate, ge.Greater(raw_gate, high), zero)
        d_up = ge.MaskedFill(d_up, ge.Greater(ge.Abs(raw_up), high), zero)
    return ge.Cast(ge.ConcatV2([d_gate, d_up], int32(1), N=2), dst_type=dtype)


def _best(choice: Node, experts: int, top_k: int, n_group: int, topk_group: int) -> Node:
    """Ids of the top_k, best first, the lowest first among equals; experts outside the best groups are -inf."""
    ge = builder()
    if n_group > 1:
        grouped = ge.Reshape(choice, int32([-1, n_group, experts // n_group]))
        two, _ = ge.TopKV2(grouped, int32(min(2, experts // n_group)))
        group_score = ge.ReduceSum(two, int32([-1]))
        kept = _sorted_ids(group_score, topk_group)
        ones = ge.OnesLike(_first(group_score, topk_group))
        keep = ge.ScatterElements(ge.ZerosLike(group_score), kept, ones, axis=1)
        dropped = ge.Unsqueeze(ge.Less(keep, ge.Const(0.5, kind("FLOAT"))), axes=[2])
        masked = ge.MaskedFill(grouped, dropped, ge.Const(float("-inf"), kind("FLOAT")))
        choice = ge.Reshape(masked, int32([-1, experts]))
    return _sorted_ids(choice, top_k)


def _sorted_ids(scores: Node, count: int) -> Node:
    _, ids = builder().Sort(scores, axis=-1, descending=True, stable=True)
    return _first(ids, count)


def _first(matrix: Node, count: int) -> Node:
    return builder().Slice(matrix, int32([0, 0]), int32([-1, count]))
