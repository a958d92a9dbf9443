"""The ops as Python functions: typed, documented, and nothing more than the call."""

import torch
from torch import Tensor


def grouped_swiglu_ffn(
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    *,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The SwiGLU feed-forward of all experts in one call.

    For expert e and its rows x = sorted_tokens[c[e]:c[e+1]], with c = expert_cumsum:

        gate, up = (x @ w13[e]).split(I)
        gate, up = min(gate, limit), clamp(up, -limit, limit)      if swiglu_limit is set
        h = gate * sigmoid(alpha * gate) * (up + beta)
        y = h @ w2[e]

    Products are summed in fp32 (fp64 for fp64), h and y are rounded to the input dtype.

    Args:
        sorted_tokens: [N, H] bf16, fp16, fp32 or fp64; rows sorted by expert.
        w13: [E*H, 2*I] or [E, H, 2*I], dtype of sorted_tokens; gate columns first, then up.
        w2: [E*I, H] or [E, I, H], dtype of sorted_tokens.
        expert_cumsum: [E+1] int32 or int64; 0 = c[0] <= c[1] <= ... <= c[E] <= N.
        swiglu_limit: bound on gate (above) and up (both sides), or None.
        swiglu_alpha: factor in the sigmoid. swiglu_beta: added to up.
        out: [N, H], where to write; no gradients then.

    Weights may have any strides: `gate_up_proj.transpose(1, 2)` of a [E, 2*I, H] parameter is not copied.

    Returns:
        [N, H], dtype of sorted_tokens, contiguous; rows from c[E] on are exactly 0.

    Raises:
        ValueError: a size, a device, an offset or an option is wrong; the message says which and how.
        TypeError: a dtype or a layout is wrong.
        NotImplementedError: on 'npu', until its kernel is there.

    Source: SwiGLU: Shazeer 2020, GLU Variants Improve Transformer, eq. 6; limit, alpha and beta as in gpt-oss.
    """
    options = {"swiglu_limit": swiglu_limit, "swiglu_alpha": swiglu_alpha, "swiglu_beta": swiglu_beta}
    result: Tensor
    if out is None:
        result = torch.ops.npu_moe.grouped_swiglu_ffn(sorted_tokens, w13, w2, expert_cumsum, **options)
    else:
        result = torch.ops.npu_moe.grouped_swiglu_ffn.out(sorted_tokens, w13, w2, expert_cumsum, **options, out=out)
    return result


def topk_router(
    hidden_states: Tensor,
    router_weight: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    *,
    scoring: str = "softmax",
    n_group: int | None = 1,
    topk_group: int | None = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose top_k experts a token and weigh them.

        scores = softmax(logits) or sigmoid(logits),   logits = hidden_states @ router_weight^T
        choose by scores + correction_bias; weigh by scores alone, divided by (their sum + 1e-20)
        if renormalize and top_k > 1, times routed_scaling_factor

    With n_group > 1, experts [0, E/n_group), ... form groups; only the topk_group groups whose two best
    biased scores have the largest sum take part. Ties go to the lowest id.

    Args:
        hidden_states: [T, H] bf16, fp16, fp32 or fp64.
        router_weight: [E, H], any of these dtypes; need not be that of hidden_states.
        correction_bias: [E] or None; takes part in the choice only and gets no gradient.
        top_k: experts a token, 1..E.
        scoring: "softmax" or "sigmoid".
        n_group, topk_group: groups and how many are kept; n_group None, 0 or 1 means ungrouped.
        renormalize: divide the chosen scores by their sum.
        routed_scaling_factor: factor on the weights.

    Returns:
        topk_weights [T, top_k], topk_ids [T, top_k] int64 best first, router_logits [T, E]; weights and
        logits are fp32 (fp64 for fp64 tokens). A row with NaN gets ids within 0..E-1.

    Raises:
        ValueError: a size or an option is wrong, or options contradict each other.
        TypeError: a dtype or a layout is wrong.

    Source: grouped choice and bias: DeepSeek-V3 technical report 2024, section 2.1.2; LLaDA2.0 routes the same way.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.npu_moe.topk_router(
        hidden_states,
        router_weight,
        correction_bias,
        top_k,
        scoring=scoring,
        n_group=n_group,
        topk_group=topk_group,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
    )
    return result


def permute(hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each of its experts, sorted by expert, in token order within an expert.

    An id outside 0..num_experts-1 (expert parallelism uses -1 or num_experts for "not mine") owns no
    expert: its rows come last, from expert_cumsum[-1] on, and are 0. An expert may stand twice in a row of ids.

    Args:
        hidden_states: [T, H] bf16, fp16, fp32 or fp64.
        topk_ids: [T, K] int32 or int64.
        num_experts: E.

    Returns:
        sorted_tokens [T*K, H]; expert_cumsum [E+1] int32, what grouped_swiglu_ffn takes; row_of [T, K]
        int64, the row of each (token, slot), counted from the end (row - T*K, so below 0) where the slot
        owns no expert. That is how `unpermute` knows; `sorted_tokens[row_of]` works for both.

    Raises:
        ValueError: a size is wrong, or T*K >= 2**31.
        TypeError: a dtype or a layout is wrong.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.npu_moe.permute(hidden_states, topk_ids, num_experts)
    return result


def unpermute(expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> Tensor:
    """Weighted sum of each token's rows: out[t] = sum_k topk_weights[t, k] * expert_out[row_of[t, k]].

    Summed in fp32 (fp64 for fp64) in the order of k, rounded once. A negative row_of adds exactly 0,
    whatever that row holds.

    Args:
        expert_out: [N, H] bf16, fp16, fp32 or fp64.
        row_of: [T, K] int64, as permute gives it.
        topk_weights: [T, K], any of these dtypes.

    Returns:
        [T, H], dtype of expert_out.

    Raises:
        ValueError: a size is wrong, or (on a CPU) row_of names a row outside -N..N-1.
        TypeError: a dtype or a layout is wrong.
    """
    result: Tensor = torch.ops.npu_moe.unpermute(expert_out, row_of, topk_weights)
    return result
