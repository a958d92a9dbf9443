"""GE operators along axes: sums, extremes, running sums, sorting."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..operators.common import describe
from .call import Call, op
from .decode import ge_dtype

Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return wide.sum(axes, keepdim=keep).to(x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.float().mean(axes, keepdim=keep).to(x.dtype)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


REDUCTIONS: dict[str, Reduction] = {
    "ReduceAll": lambda x, axes, keep: torch.all(x, axes, keepdim=keep),
    "ReduceAny": lambda x, axes, keep: torch.any(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMean": _mean,
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceSum": _sum,
}


def _enter_reduction(type: str, function: Reduction) -> None:
    @op(type)
    def _(call: Call) -> Tensor:
        x = call["x"]
        if type in ("ReduceAll", "ReduceAny"):
            call.check(x.dtype == torch.bool, f"x {describe(x)}, wanted bool")
        axes = [call.axis(axis, x) for axis in call.ints("axes")]
        # Without axes GE sums nothing or everything, by the operator and its version: no converter should rely on it.
        call.check(bool(axes) or x.dim() == 0, "no axes is not implemented")
        return function(x, axes, bool(call.attr("keep_dims"))) if x.dim() else x.clone()


for _type, _function in REDUCTIONS.items():
    _enter_reduction(_type, _function)


@op("ArgMaxV2")
def _arg_max(call: Call) -> Tensor:
    return call["x"].argmax(call.axis(call.number("dimension"), call["x"])).to(_index_dtype(call, "dtype", 9))


@op("ArgMin")
def _arg_min(call: Call) -> Tensor:
    return call["x"].argmin(call.axis(call.number("dimension"), call["x"])).to(_index_dtype(call, "dtype", 9))


@op("SearchSorted")
def _search_sorted(call: Call) -> Tensor:
    call.check(call.get("sorter") is None, "sorter is not implemented")
    sequence, values = call["sorted_sequence"], call["values"]
    call.same_dtype(sequence, values)
    found = torch.searchsorted(sequence, values, right=bool(call.attr("right")))
    return found.to(_index_dtype(call, "dtype", 9))


@op("ArgMaxWithValue")
def _arg_max_with_value(call: Call) -> tuple[Tensor, Tensor]:
    axis, keep = call.axis(call.attr("dimension"), call[0]), bool(call.attr("keep_dims"))
    values, indices = call[0].max(axis, keepdim=keep)
    return indices.int(), values


@op("Cumsum")
def _cumsum(call: Call) -> Tensor:
    call.without("exclusive", "reverse")
    x, axis = call["x"], call.axis(call.number("axis"), call["x"])
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return wide.cumsum(axis).to(x.dtype)


@op("Cummax")
def _cummax(call: Call) -> tuple[Tensor, Tensor]:
    values, indices = call[0].cummax(call.axis(call.attr("dim"), call[0]))
    return values, indices.to(call.node.dtypes[1] or torch.int64)


@op("Cummin")
def _cummin(call: Call) -> tuple[Tensor, Tensor]:
    values, indices = call[0].cummin(call.axis(call.attr("axis"), call[0]))
    return values, indices.to(call.node.dtypes[1] or torch.int64)


@op("TopKV2")
def _topk(call: Call) -> tuple[Tensor, Tensor]:
    x, k = call["x"], call.number("k")
    axis = call.axis(call.attr("dim", -1), x)
    call.check(0 <= k <= x.shape[axis], f"k = {k} of {describe(x)}")
    largest, ordered = bool(call.attr("largest", True)), bool(call.attr("sorted", True))
    call.check(ordered, "sorted = False is not implemented")
    values, indices = _last_first(x, axis, largest)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k).int()


@op("Sort")
def _sort(call: Call) -> tuple[Tensor, Tensor]:
    x, descending = call["x"], bool(call.attr("descending"))
    axis = call.axis(call.attr("axis", -1), x)
    if call.attr("stable"):
        values, indices = x.sort(dim=axis, descending=descending, stable=True)
    else:
        values, indices = _last_first(x, axis, descending)
    return values, indices.to(_index_dtype(call, "y2_dtype", 3))


def _last_first(x: Tensor, axis: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Sorted, the last first among equals: where no order is promised, nobody shall get the one that looks natural."""
    values, indices = x.flip(axis).sort(dim=axis, descending=descending, stable=True)
    return values, x.shape[axis] - 1 - indices if x.dim() else indices


def _index_dtype(call: Call, attr: str, default: int) -> torch.dtype:
    dtype = ge_dtype(call.attr(attr, default))
    call.check(dtype in (torch.int32, torch.int64), f"{attr} {dtype}, wanted int32 or int64")
    return dtype
