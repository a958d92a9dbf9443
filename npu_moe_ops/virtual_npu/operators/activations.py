"""SwiGLU in its plain and its clipped form, and the gradient of the plain one."""

import torch
from torch import Tensor

from .common import FLOATS, describe, want, want_absent, want_tensor


def check_swiglu(x: Tensor, dim: int = -1, *, name: str = "npu_swiglu") -> None:
    """npu_swiglu in `_op_plugin_docs.py`: 1 to 8 axes, fp32, fp16 or bf16, halves along dim."""
    want(1 <= x.dim() <= 8, f"{name}: x", "of 1 to 8 axes", describe(x))
    want(x.dtype in FLOATS, f"{name}: x", "float16, bfloat16 or float32", describe(x))
    want(-x.dim() <= dim < x.dim(), f"{name}: dim", f"an axis of {describe(x)}", dim)
    want(x.shape[dim] % 2 == 0, f"{name}: x", f"even along axis {dim}", describe(x))


def swiglu(x: Tensor, dim: int = -1, *, name: str = "npu_swiglu") -> Tensor:
    """silu(first half) * second half."""
    check_swiglu(x, dim, name=name)
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def check_swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1, *, name: str = "npu_swiglu_backward") -> None:
    check_swiglu(x, dim, name=name)
    shape = list(x.shape)
    shape[dim] //= 2
    want_tensor(f"{name}: grad_output", grad, shape, x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1, *, name: str = "npu_swiglu_backward") -> Tensor:
    """The gradient of swiglu by x, in x's layout (`npu_swiglugrad_meta`)."""
    check_swiglu_backward(grad, x, dim, name=name)
    gate, up = x.float().chunk(2, dim)
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    wide = grad.float()
    return torch.cat([wide * up * slope, wide * gate * sigmoid], dim).to(x.dtype)


def check_clipped_swiglu(
    x: Tensor,
    group_index: Tensor | None = None,
    *,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
    name: str = "npu_clipped_swiglu",
) -> None:
    """npu_clipped_swiglu in `_op_plugin_docs.py`: more than one axis, contiguous, even along dim."""
    want_absent(name, group_index=group_index)
    check_swiglu(x, dim, name=name)
    want(x.dim() > 1, f"{name}: x", "of more than one axis", describe(x))
    want(x.is_contiguous(), f"{name}: x", "contiguous", f"strides {tuple(x.stride())}")
    want(limit > 0, f"{name}: limit", "> 0", limit)


def clipped_swiglu(
    x: Tensor,
    group_index: Tensor | None = None,
    *,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
    name: str = "npu_clipped_swiglu",
) -> Tensor:
    """g * sigmoid(alpha * g) * (u + bias), g clamped from above and u from both sides at limit.

    The documented formula first folds the axes from dim on into one, and takes halves, or odd and even positions, of
    that: with interleaved, neighbours along dim would be neighbours in memory, which holds for the last axis alone.
    """
    check_clipped_swiglu(
        x, group_index, dim=dim, alpha=alpha, limit=limit, bias=bias, interleaved=interleaved, name=name
    )
    axis = dim % x.dim()
    want(not interleaved or axis == x.dim() - 1, f"{name}: dim", "the last axis when interleaved", dim)
    wide = x.float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, axis)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)
