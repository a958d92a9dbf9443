"""What the dispatcher calls for tensors on 'npu': bring the arguments into the kernel's form, launch it.

No value is copied to the host. Set NPU_MOE_VALIDATE=1 to have expert_cumsum checked first, which does.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from .. import checks
from . import cann, tiling, toolchain

PLAN = "NPU_MOE_PLAN"
VALIDATE = "NPU_MOE_VALIDATE"


@dataclass(frozen=True)
class Call:
    """One launch: what the kernel is built for, and the tensors it gets."""

    problem: tiling.Problem
    tensors: tuple[Tensor, ...]  # x, w13, w2, offsets


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
    """Write all rows of out [N, H] on the NPU. Raises toolchain.Missing without pypto or CANN."""
    if os.environ.get(VALIDATE, "0") not in ("", "0"):
        checks.offsets(expert_cumsum, len(sorted_tokens))
    call = prepare(sorted_tokens, w13, w2, expert_cumsum)
    preset = os.environ.get(PLAN) or "auto"
    launch(kernel_for(call.problem, preset, swiglu_limit, swiglu_alpha, swiglu_beta), call, out)


def kernel_for(
    problem: tiling.Problem, preset: str, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0
) -> Callable[..., None]:
    """The kernel for calls like this one, built once for each plan; it compiles on its first launch."""
    plan = tiling.choose(problem, preset)
    return _kernel(replace(problem, rows=0), plan, limit, alpha, beta)


def prepare(sorted_tokens: Tensor, w13: Tensor, w2: Tensor, expert_cumsum: Tensor) -> Call:
    """Contiguous 2-D tensors without copying a weight in either layout, and offsets that can do no harm."""
    rows, hidden = sorted_tokens.shape
    experts = expert_cumsum.shape[0] - 1
    cann.refuse_float64("grouped_swiglu_ffn", "sorted_tokens", sorted_tokens.dtype)
    w13_flat, w13_transposed = _flat("w13", w13)
    w2_flat, w2_transposed = _flat("w2", w2)
    for name, flat in (("w13", w13_flat), ("w2", w2_flat), ("sorted_tokens", sorted_tokens)):
        if flat.shape[1] > tiling.INNER_AXIS:
            raise ValueError(
                f"grouped_swiglu_ffn: {name} must have rows of at most {tiling.INNER_AXIS} elements in memory on "
                f"'npu', got {flat.shape[1]}"
            )
    problem = tiling.Problem(
        experts, hidden, w13.shape[-1] // 2, rows, sorted_tokens.dtype, w13_transposed, w2_transposed
    )
    tensors = (sorted_tokens.contiguous(), w13_flat, w2_flat, safe_offsets(expert_cumsum, rows))
    return Call(problem, tensors)


def safe_offsets(expert_cumsum: Tensor, rows: int) -> Tensor:
    """As int32. Bad values can do no harm: all lie within [0, rows] and never fall."""
    return expert_cumsum.clamp(0, rows).to(torch.int32).cummax(0).values


def zero_tail(out: Tensor, rows: Tensor, offsets: Tensor) -> None:
    """Write rows [N, H] into out; 0 from the last offset on, whatever memory holds there."""
    tail = torch.arange(len(rows), device=rows.device) >= offsets[-1:]
    torch.where(tail.unsqueeze(1), rows.new_zeros(()), rows, out=out)


def launch(kernel: Callable[..., None], call: Call, out: Tensor) -> None:
    """Rows of no expert are 0: the kernel writes those of the experts only."""
    if not call.problem.rows:
        return
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    target.zero_()
    kernel(*call.tensors, target)
    if target is not out:
        out.copy_(target)


@cache
def _kernel(
    problem: tiling.Problem, plan: tiling.TilePlan, limit: float | None, alpha: float, beta: float
) -> Callable[..., None]:
    toolchain.require_npu("grouped_swiglu_ffn")
    from . import kernel

    swiglu, order = kernel.SwiGLU(limit, alpha, beta), toolchain.must_order_bounds()
    options = toolchain.runtime_options(plan.stitch, simulated=False)
    return kernel.build(problem, plan, swiglu, order, runtime_options=options)


def _flat(name: str, weight: Tensor) -> tuple[Tensor, bool]:
    """The weight as one contiguous matrix, and whether it lies transposed, as Hugging Face's do."""
    if weight.is_contiguous():
        return weight.reshape(-1, weight.shape[-1]), False
    if weight.dim() == 3 and weight.transpose(1, 2).is_contiguous():
        return weight.transpose(1, 2).reshape(-1, weight.shape[1]), True
    warnings.warn(
        f"grouped_swiglu_ffn: {name} with strides {list(weight.stride())} is copied on every call; make it "
        f"contiguous, or a transpose of a contiguous tensor, once",
        stacklevel=2,
    )
    return weight.contiguous().reshape(-1, weight.shape[-1]), False
