"""The gradient of the grouped FFN on 'npu': grouped matmuls of torch_npu, once over rows and once over experts.

gate and up are computed again rather than kept. No value is copied to the host.
"""

import torch
from torch import Tensor

from ..reference import expert_weights, swiglu_gradient
from . import cann, toolchain
from .launch import safe_offsets, zero_tail


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
    """Fill the gradients of (sorted_tokens, w13, w2) that output_mask asks for. The formula is in reference.py."""
    op = "grouped_swiglu_ffn_backward"
    grad_tokens, grad_w13, grad_w2 = grads
    need_tokens, need_w13, need_w2 = output_mask
    rows, hidden = sorted_tokens.shape
    experts = len(expert_cumsum) - 1
    cann.refuse_float64(op, "sorted_tokens", sorted_tokens.dtype)
    cann.refuse_grouped_matmul(op, experts, hidden, w13.shape[-1])
    toolchain.require_torch_npu(op)
    if not rows:
        for grad in grads:
            grad.zero_()
        return
    up, down = expert_weights(w13, experts), expert_weights(w2, experts)
    offsets = safe_offsets(expert_cumsum, rows)
    ends = offsets[1:].long()
    swiglu = (swiglu_limit, swiglu_alpha, swiglu_beta)

    gate_up = _by_rows(sorted_tokens, up, ends)
    if need_w2:
        expert_weights(grad_w2, experts).copy_(_by_experts(_activation(gate_up, *swiglu), grad_out, ends))
    if not (need_tokens or need_w13):
        return
    grad_h = _by_rows(grad_out, down.transpose(1, 2), ends)
    grad_gate_up = _activation_gradient(grad_h, gate_up, *swiglu)
    if need_w13:
        expert_weights(grad_w13, experts).copy_(_by_experts(sorted_tokens, grad_gate_up, ends))
    if need_tokens:
        zero_tail(grad_tokens, _by_rows(grad_gate_up, up.transpose(1, 2), ends), offsets)


def _by_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [N, K] with each expert's [K, M] -> [N, M]; rows of no expert are undefined."""
    return _grouped_matmul(x.contiguous(), weight, ends, group_type=0)


def _by_experts(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """x [N, K], y [N, M] -> [E, K, M]: each expert's x^T @ y, 0 for one without rows."""
    return _grouped_matmul(x.contiguous().t(), y.contiguous(), ends, group_type=2)


def _grouped_matmul(x: Tensor, y: Tensor, ends: Tensor, group_type: int) -> Tensor:
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [x], [y], group_list=ends, split_item=3, group_type=group_type, group_list_type=0
    )
    result: Tensor = out
    return result


def _activation(gate_up: Tensor, limit: float | None, alpha: float, beta: float) -> Tensor:
    if cann.is_plain(limit, alpha, beta):
        h: Tensor = torch.ops.npu.npu_swiglu(gate_up, -1)
    else:
        h = torch.ops.npu.npu_clipped_swiglu(gate_up, **cann.clip(limit, alpha, beta))
    return h


def _activation_gradient(grad_h: Tensor, gate_up: Tensor, limit: float | None, alpha: float, beta: float) -> Tensor:
    if cann.is_plain(limit, alpha, beta):
        grad: Tensor = torch.ops.npu.npu_swiglu_backward(grad_h, gate_up, -1)
        return grad
    gate, up = gate_up.float().chunk(2, dim=-1)
    return swiglu_gradient(grad_h.float(), gate, up, limit, alpha, beta).to(gate_up.dtype)
