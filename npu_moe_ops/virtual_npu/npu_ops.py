"""torch.ops.npu.* in eager mode: the operators that a MoE block calls, run on the memory of npu tensors.

On a device they are aclnn kernels. What is not here stays as the wheel has it: it asks for CANN and fails.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import device, operators
from .operators.common import describe, want, want_absent, want_value
from .operators.matmul import SPLIT_K

OUTPUT_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
CAST_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    7: torch.float64,
    11: torch.bool,
} | OUTPUT_DTYPES

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register the kernels, over the wheel's own. Call it once, after torch_npu is imported."""
    if _libraries:
        return
    library = torch.library.Library("npu", "IMPL", "PrivateUse1")
    for name, kernel in KERNELS.items():
        # Not to be traced, which Dynamo would try in a frame that it resumes after a graph break.
        library.impl(name, torch._dynamo.disable(kernel), allow_override=True)
    _libraries.append(library)


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    operators.check_swiglu(x, dim)
    return _one("npu_swiglu", operators.swiglu, x, dim)


def _swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    operators.check_swiglu_backward(grad, x, dim)
    return _one("npu_swiglu_backward", operators.swiglu_backward, grad, x, dim)


def _clipped_swiglu(x: Tensor, **options: Any) -> Tensor:
    operators.check_clipped_swiglu(x, **options)
    return _one("npu_clipped_swiglu", operators.clipped_swiglu, x, **options)


def _moe_gating_top_k(x: Tensor, k: int, **options: Any) -> tuple[Tensor, ...]:
    operators.check_moe_gating_top_k(x, k, **options)
    return _several("npu_moe_gating_top_k", operators.moe_gating_top_k, x, k, **options)


def _moe_init_routing_v2(x: Tensor, expert_idx: Tensor, **options: Any) -> tuple[Tensor, ...]:
    operators.check_moe_init_routing_v2(x, expert_idx, **options)
    return _several("npu_moe_init_routing_v2", operators.moe_init_routing_v2, x, expert_idx, **options)


def _moe_finalize_routing(*args: Any) -> Tensor:
    operators.check_moe_finalize_routing(*args)
    return _one("npu_moe_finalize_routing", operators.moe_finalize_routing, *args)


def _grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    name = "npu_grouped_matmul"
    want_absent(name, **{option: value or None for option, value in others.items()})
    want(len(x) == 1 and len(weight) == 1, f"{name}: x, weight", "one tensor each", (len(x), len(weight)))
    want_value(f"{name}: split_item", split_item, 2, 3)
    want_value(f"{name}: act_type", act_type, 0)
    if output_dtype is not None:
        want(OUTPUT_DTYPES.get(output_dtype) == x[0].dtype, f"{name}: output_dtype", "that of x", output_dtype)
    (left,), (right,) = x, weight
    options: dict[str, Any] = {"group_type": group_type, "group_list_type": group_list_type}
    if group_type == SPLIT_K:
        # Sums over groups of the inner axis read x row by row as (K, M): on a device only a transposed view will do.
        want(
            left.t().is_contiguous(), f"{name}: x", "the transpose of a contiguous (K, M) for group_type 2", _lie(left)
        )
    else:
        want(_by_rows(left), f"{name}: x", "laid out row by row", _lie(left))
    if right.dim() == 3 and not _by_rows(right):
        right = right.transpose(1, 2)
        options["transpose_weight"] = True
    want(_by_rows(right), f"{name}: weight", "laid out row by row or transposed", _lie(weight[0]))
    operators.check_grouped_matmul(left, right, group_list, **options)
    assert group_list is not None
    result = _allocate(name, x, weight, group_list=group_list, split_item=split_item, **_meta_options(options))

    def compute(y: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
        y.copy_(operators.grouped_matmul(left, right, ends, **options))

    device.launch(compute, result[0], left, right, group_list)
    return list(result)


def _meta_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "transpose_weight"}


def _dtype_cast(x: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    want_absent("npu_dtype_cast", input_dtype=input_dtype)
    want(dtype in CAST_DTYPES, "npu_dtype_cast: dtype", f"one of {sorted(CAST_DTYPES)}", dtype)
    return _old_dtype_cast(x, CAST_DTYPES[dtype])


def _old_dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty_like(x, dtype=dtype, device=x.device)
    device.launch(lambda y, x: y.copy_(x), result, x)
    return result


def _one(name: str, operator: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    (result,) = _several(name, lambda *a, **o: (operator(*a, **o),), *args, **options)
    return result


def _several(name: str, operator: Callable[..., Any], *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Launch operator(*args, **options) on views; results are allocated as the wheel's meta function says."""
    results = _allocate(name, *args, **options)
    values = [*args, *options.values()]
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    tensors = [values[place] for place in places]
    rest = [None if isinstance(value, Tensor) else value for value in values]  # no tensor is kept by a recorded launch

    def compute(*views: Tensor) -> None:
        given = list(rest)
        for place, view in zip(places, views[len(results) :], strict=True):
            given[place] = view
        named = dict(zip(options, given[len(args) :], strict=True))
        for result, value in zip(views, operator(*given[: len(args)], **named), strict=False):
            result.copy_(value)

    device.launch(compute, *results, *tensors)
    return results


def _allocate(name: str, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    meta_args, meta_options = tree_map_only(Tensor, _meta, (args, options))
    shaped = getattr(torch.ops.npu, name).default(*meta_args, **meta_options)
    shaped = (shaped,) if isinstance(shaped, Tensor) else shaped
    return tuple(torch.empty(meta.shape, dtype=meta.dtype, device="npu") for meta in shaped)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _by_rows(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.stride(-1) == 1


def _lie(tensor: Tensor) -> str:
    return f"{describe(tensor)} with strides {tuple(tensor.stride())}"


KERNELS: dict[str, Callable[..., Any]] = {
    "_npu_dtype_cast": _old_dtype_cast,
    "npu_clipped_swiglu": _clipped_swiglu,
    "npu_dtype_cast": _dtype_cast,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_finalize_routing": _moe_finalize_routing,
    "npu_moe_gating_top_k": _moe_gating_top_k,
    "npu_moe_init_routing_v2": _moe_init_routing_v2,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
}
