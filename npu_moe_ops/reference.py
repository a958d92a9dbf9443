"""The maths of the grouped SwiGLU FFN, forward and backward: the only oracle.

T tokens, K experts a token (top_k), N = T*K routed rows, E experts, H hidden size, I intermediate
size of an expert. Right on every device and dtype, fast on none: one expert after the other, in
fp32 (fp64 for fp64 input).
"""

from itertools import pairwise

import torch
from torch import Tensor

from . import checks


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def expert_weights(weight: Tensor, experts: int) -> Tensor:
    """[E*rows, cols] or [E, rows, cols] -> [E, rows, cols], as a view."""
    return weight if weight.dim() == 3 else weight.unflatten(0, (experts, -1))


def swiglu(gate: Tensor, up: Tensor, limit: float | None, alpha: float, beta: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta), with gate <= limit and |up| <= limit where one is set."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def swiglu_gradient(
    grad: Tensor, raw_gate: Tensor, raw_up: Tensor, limit: float | None, alpha: float, beta: float
) -> Tensor:
    """The gradients of gate and up, side by side, from that of swiglu().

    With s = sigmoid(alpha g) and h = g s (u + beta):
        dh/dg = s (1 + alpha g (1 - s)) (u + beta),   dh/du = g s,
    both 0 where a limit cut g or u.
    """
    gate, up = raw_gate, raw_up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(alpha * gate)
    d_gate = grad * s * (1 + alpha * gate * (1 - s)) * (up + beta)
    d_up = grad * gate * s
    if limit is not None:
        d_gate = d_gate.masked_fill(raw_gate > limit, 0)
        d_up = d_up.masked_fill(raw_up.abs() > limit, 0)
    return torch.cat((d_gate, d_up), dim=-1)


def grouped_swiglu_ffn(
    out: Tensor,
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
) -> None:
    """Write all rows of out [N, H]: each expert's FFN over its rows, zeros from row c[E] on."""
    c = checks.offsets(expert_cumsum, sorted_tokens.shape[0])
    w13, w2 = (expert_weights(w, len(c) - 1) for w in (w13, w2))
    dtype, acc = out.dtype, accumulate_dtype(out.dtype)
    for e, (start, end) in enumerate(pairwise(c)):
        gate, up = (sorted_tokens[start:end].to(acc) @ w13[e].to(acc)).chunk(2, dim=-1)
        h = swiglu(gate, up, swiglu_limit, swiglu_alpha, swiglu_beta).to(dtype)
        out[start:end] = (h.to(acc) @ w2[e].to(acc)).to(dtype)
    out[c[-1] :] = 0


def grouped_swiglu_ffn_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    output_mask: list[bool],
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
) -> None:
    """Write the gradients of (sorted_tokens, w13, w2) that output_mask asks for.

    gate and up are computed again rather than kept.
    """
    c = checks.offsets(expert_cumsum, sorted_tokens.shape[0])
    grad_tokens, grad_w13, grad_w2 = grads
    need_tokens, need_w13, need_w2 = output_mask
    w13, w2 = (expert_weights(w, len(c) - 1) for w in (w13, w2))
    if need_w13:
        grad_w13 = expert_weights(grad_w13, len(c) - 1)
    if need_w2:
        grad_w2 = expert_weights(grad_w2, len(c) - 1)
    dtype, acc = sorted_tokens.dtype, accumulate_dtype(sorted_tokens.dtype)
    for e, (start, end) in enumerate(pairwise(c)):
        if start == end:  # its weights had no part: gradients of exactly 0, and nothing to read
            for grad, need in ((grad_w13, need_w13), (grad_w2, need_w2)):
                if need:
                    grad[e] = 0
            continue
        x, dy, w1 = (t.to(acc) for t in (sorted_tokens[start:end], grad_out[start:end], w13[e]))
        gate, up = (x @ w1).chunk(2, dim=-1)
        if need_w2:
            h = swiglu(gate, up, swiglu_limit, swiglu_alpha, swiglu_beta).to(dtype).to(acc)
            grad_w2[e] = (h.t() @ dy).to(dtype)
        if need_tokens or need_w13:
            dh = dy @ w2[e].to(acc).t()
            d_gate_up = swiglu_gradient(dh, gate, up, swiglu_limit, swiglu_alpha, swiglu_beta)
            if need_w13:
                grad_w13[e] = (x.t() @ d_gate_up).to(dtype)
            if need_tokens:
                grad_tokens[start:end] = (d_gate_up @ w1.t()).to(dtype)
    if need_tokens:
        grad_tokens[c[-1] :] = 0
