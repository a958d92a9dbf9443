"""GE operators that read and write by index."""

import torch
from torch import Tensor

from ..operators.common import describe
from .call import Call, op


@op("Gather")
def _gather(call: Call) -> Tensor:
    return _gather_along(call, 0)


@op("GatherV2")
def _gather_v2(call: Call) -> Tensor:
    return _gather_along(call, call.axis(call.number("axis"), call["x"]))


def _gather_along(call: Call, axis: int) -> Tensor:
    call.without("batch_dims")
    x, indices = call["x"], call["indices"]
    if call.attr("negative_index_support"):
        indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    rows = call.indices(indices, x.shape[axis])
    return x.index_select(axis, rows.flatten()).reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@op("GatherElements")
def _gather_elements(call: Call) -> Tensor:
    x = call["x"]
    axis = call.axis(call.attr("dim", 0), x)
    return x.gather(axis, call.indices(call["index"], x.shape[axis]))


@op("GatherNd")
def _gather_nd(call: Call) -> Tensor:
    x, indices = call["x"], call["indices"]
    depth = indices.shape[-1]
    call.check(depth <= x.dim(), f"indices {describe(indices)} into {describe(x)}")
    return x[tuple(call.indices(indices[..., axis], x.shape[axis]) for axis in range(depth))]


@op("ScatterElements")
def _scatter_elements(call: Call) -> Tensor:
    data, updates, reduction = call["data"], call["updates"], call.attr("reduction", "none")
    call.same_dtype(data, updates)
    axis = call.axis(call.attr("axis", 0), data)
    indices = call.indices(call["indices"], data.shape[axis])
    call.check(indices.shape == updates.shape, f"indices {describe(indices)}, updates {describe(updates)}")
    call.check(reduction in ("none", "add"), f"reduction {reduction} is not implemented")
    return data.scatter(axis, indices, updates) if reduction == "none" else data.scatter_add(axis, indices, updates)


@op("InplaceIndexAdd")
def _index_add(call: Call) -> Tensor:
    target, updates, alpha = call["var"], call["updates"], call.get("alpha")
    call.same_dtype(target, updates, *(() if alpha is None else (alpha,)))
    axis = call.axis(call.attr("axis"), target)
    indices = call.indices(call["indices"], target.shape[axis])
    return target.index_add(axis, indices, updates if alpha is None else updates * alpha)


@op("IndexByTensor")
def _index(call: Call) -> Tensor:
    return call["x"][_places(call, call["x"], call.attr("indices_mask", []))].contiguous()


@op("IndexPutV2")
def _index_put(call: Call) -> Tensor:
    x, value = call["x"], call["value"]
    call.same_dtype(x, value)
    places = _places(call, x, call.ints("indexed_sizes"))
    accumulate = bool(call.attr("accumulate"))
    # As Tensor.index_put, which also adds up indices that come twice.
    result: Tensor = torch.ops.aten.index_put(
        x, [None if isinstance(i, slice) else i for i in places], value, accumulate
    )
    return result


def _places(call: Call, x: Tensor, mask: list[int]) -> tuple[Tensor | slice, ...]:
    """One entry for each axis in the mask: the next index tensor where it is set, everything where it is not."""
    given = call.many("indices")
    call.check(sum(1 for on in mask if on) == len(given), f"{len(given)} indices for mask {mask}")
    call.check(len(mask) <= x.dim(), f"mask {mask} for {describe(x)}")
    places: list[Tensor | slice] = []
    for axis, on in enumerate(mask):
        if not on:
            places.append(slice(None))
            continue
        index, size = given.pop(0), x.shape[axis]
        call.check(index.dtype == torch.int64, f"indices {describe(index)}, wanted int64")
        places.append(call.indices(torch.where(index < 0, index + size, index), size))
    return tuple(places)


@op("MaskedScatter")
def _masked_scatter(call: Call) -> Tensor:
    x, mask, updates = call["x"], call["mask"], call["updates"]
    call.same_dtype(x, updates)
    call.check(mask.dtype == torch.bool, f"mask {describe(mask)}, wanted bool")
    return x.masked_scatter(mask, updates)


@op("OneHot")
def _one_hot(call: Call) -> Tensor:
    """An index outside [0, depth) makes no hot element."""
    x, depth, on, off = call["x"], call.number("depth"), call["on_value"], call["off_value"]
    call.same_dtype(on, off)
    call.check(call.attr("axis", -1) == -1, "axis other than -1 is not implemented")
    hot = x.unsqueeze(-1) == torch.arange(depth, dtype=x.dtype)
    return torch.where(hot, on.reshape([]), off.reshape([]))
