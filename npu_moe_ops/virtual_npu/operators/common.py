"""What the operators share: how to say no, and what undefined memory holds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..refused import Refused

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def want(ok: bool, argument: str, wanted: str, got: object) -> None:
    """Refuse unless ok. `argument` begins with the operator's name."""
    if not ok:
        raise Refused(f"{argument} must be {wanted}, got {got}")


def want_tensor(
    argument: str, tensor: Tensor, shape: Sequence[int | None], dtypes: torch.dtype | Sequence[torch.dtype]
) -> None:
    """Refuse another rank, size (None: any) or dtype."""
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    names = " or ".join(_name(dtype) for dtype in allowed)
    want(fits and tensor.dtype in allowed, argument, f"({sizes}) {names}", describe(tensor))


def want_value(argument: str, value: Any, *allowed: Any) -> None:
    """Refuse an option outside the few values that are implemented."""
    same = any(type(value) is type(one) and value == one for one in allowed)
    want(same, argument, " or ".join(str(one) for one in allowed), value)


def want_absent(operator: str, **arguments: Any) -> None:
    """Refuse arguments that only quantised or hash variants take."""
    for name, value in arguments.items():
        want(value is None, f"{operator}: {name}", "None", type(value).__name__)


def want_indices(argument: str, indices: Tensor, size: int) -> None:
    """Refuse values outside [0, size)."""
    if indices.numel() == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    want(low >= 0 and high < size, argument, f"within [0, {size})", f"{low}..{high}")


def describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"({', '.join(map(str, tensor.shape))}) {_name(tensor.dtype)}"


def poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that nobody wrote: NaN, or a number that is no index, count or weight."""
    if dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=dtype)
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(tuple(shape), value, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
