"""GE operators that make, move and cut tensors."""

import torch
from torch import Tensor

from ..operators.common import describe, poison
from .call import Call, op
from .decode import ge_dtype


@op("Cast")
def _cast(call: Call) -> Tensor:
    return call[0].to(ge_dtype(call.attr("dst_type")))


@op("Bitcast")
def _bitcast(call: Call) -> Tensor:
    dtype = ge_dtype(call.attr("type"))
    call.check(dtype.itemsize == call[0].dtype.itemsize, f"{call[0].dtype} as {dtype} is not implemented")
    return call[0].view(dtype)


@op("Shape")
def _shape(call: Call) -> Tensor:
    return torch.tensor(list(call[0].shape), dtype=ge_dtype(call.attr("dtype", 3)))


@op("Size")
def _size(call: Call) -> Tensor:
    return torch.tensor(call[0].numel(), dtype=ge_dtype(call.attr("dtype", 3)))


@op("Rank")
def _rank(call: Call) -> Tensor:
    return torch.tensor(call[0].dim(), dtype=torch.int32)


@op("Identity", "TensorMove", "Clone")
def _identity(call: Call) -> Tensor:
    return call[0].clone()


@op("Fill")
def _fill(call: Call) -> Tensor:
    call.check(call["value"].numel() == 1, f"value is {describe(call['value'])}, wanted one element")
    return call["value"].reshape([]).expand(call.ints("dims")).contiguous()


@op("Empty")
def _empty(call: Call) -> Tensor:
    shape, dtype = call.ints("shape"), ge_dtype(call.attr("dtype", 3))
    return torch.zeros(shape, dtype=dtype) if call.attr("init") else poison(shape, dtype)


@op("ZerosLike")
def _zeros_like(call: Call) -> Tensor:
    return torch.zeros_like(call[0])


@op("OnesLike")
def _ones_like(call: Call) -> Tensor:
    return torch.ones_like(call[0])


@op("Range")
def _range(call: Call) -> Tensor:
    """torchair gives it int32 and int64 at once, for arange(n): the one exception to one dtype."""
    bounds = [call[name] for name in ("start", "limit", "delta")]
    if not {bound.dtype for bound in bounds} <= {torch.int32, torch.int64}:
        call.same_dtype(*bounds)
    start, limit, delta = (bound.item() for bound in bounds)
    wide = any(bound.dtype == torch.int64 for bound in bounds)
    return torch.arange(start, limit, delta, dtype=torch.int64 if wide else bounds[0].dtype)


@op("Reshape")
def _reshape(call: Call) -> Tensor:
    call.without("axis")
    return call[0].reshape(call.ints(1))


@op("FlattenV2")
def _flatten(call: Call) -> Tensor:
    return call[0].flatten(call.attr("axis", 1), call.attr("end_axis", -1))


@op("Unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x = call[0]
    rank = x.dim() + len(call.attr("axes", []))
    for axis in sorted(axis % rank for axis in call.attr("axes", [])):
        x = x.unsqueeze(axis)
    return x


@op("ExpandDims")
def _expand_dims(call: Call) -> Tensor:
    return call["x"].unsqueeze(call.number("axis"))


@op("Squeeze")
def _squeeze(call: Call) -> Tensor:
    x = call[0]
    axes = [call.axis(axis, x) for axis in call.attr("axis", [])] or [i for i, n in enumerate(x.shape) if n == 1]
    for axis in sorted(axes, reverse=True):
        call.check(x.shape[axis] == 1, f"axis {axis} of {describe(call[0])} is not of size 1")
        x = x.squeeze(axis)
    return x


@op("Transpose")
def _transpose(call: Call) -> Tensor:
    order = call.ints("perm")
    call.check(sorted(order) == list(range(call[0].dim())), f"perm {order} of {describe(call[0])}")
    return call[0].permute(order).contiguous()


@op("ReverseV2")
def _reverse(call: Call) -> Tensor:
    return call[0].flip([call.axis(axis, call[0]) for axis in call.ints(1)])


@op("BroadcastTo")
def _broadcast_to(call: Call) -> Tensor:
    return call[0].broadcast_to(call.ints("shape")).contiguous()


@op("Expand")
def _expand(call: Call) -> Tensor:
    return call[0].broadcast_to(torch.broadcast_shapes(call[0].shape, call.ints("shape"))).contiguous()


@op("Tile")
def _tile(call: Call) -> Tensor:
    times = call.ints("multiples")
    call.check(len(times) == call[0].dim(), f"{len(times)} multiples for {describe(call[0])}")
    return call[0].repeat(times)


@op("AsStrided")
def _as_strided(call: Call) -> Tensor:
    return call[0].as_strided(call.ints("size"), call.ints("stride"), call.number("storage_offset")).contiguous()


@op("Slice")
def _slice(call: Call) -> Tensor:
    x, offsets, sizes = call["x"], call.ints("offsets"), call.ints("size")
    call.check(len(offsets) == len(sizes) == x.dim(), f"offsets {offsets} and size {sizes} of {describe(x)}")
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        length = x.shape[axis] - offset if size == -1 else size
        inside = offset >= 0 and length >= 0 and offset + length <= x.shape[axis]
        call.check(inside, f"[{offset}, {offset + length}) of axis {axis} of {describe(call['x'])}")
        x = x.narrow(axis, offset, length)
    return x.contiguous()


@op("StridedSlice", "StridedSliceV2", "StridedSliceV3")
def _strided_slice(call: Call) -> Tensor:
    call.without("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    x, begins, ends = call["x"], call.ints("begin"), call.ints("end")
    axes = list(range(len(begins))) if call.get("axes") is None else call.ints("axes")
    strides = [1] * len(begins) if call.get("strides") is None else call.ints("strides")
    call.check(len(begins) == len(ends) == len(axes) == len(strides), "begin, end, axes and strides differ in length")
    cut = [slice(None)] * x.dim()
    for place, (axis, begin, end, stride) in enumerate(zip(axes, begins, ends, strides, strict=True)):
        call.check(stride > 0, f"stride {stride} is not implemented")
        first = None if call.attr("begin_mask", 0) >> place & 1 else begin
        last = None if call.attr("end_mask", 0) >> place & 1 else end
        cut[call.axis(axis, x)] = slice(first, last, stride)
    return x[tuple(cut)].contiguous()


@op("Pack")
def _pack(call: Call) -> Tensor:
    parts = call.many("x")
    call.same_dtype(*parts)
    call.check(len(parts) == call.attr("N"), f"{len(parts)} inputs, N is {call.attr('N')}")
    return torch.stack(parts, call.attr("axis", 0))


@op("Unpack")
def _unpack(call: Call) -> tuple[Tensor, ...]:
    return tuple(part.contiguous() for part in call[0].unbind(call.attr("axis", 0)))


@op("ConcatV2")
def _concat(call: Call) -> Tensor:
    parts = call.many("x")
    call.same_dtype(*parts)
    call.check(len(parts) == call.attr("N", 1), f"{len(parts)} inputs, N is {call.attr('N', 1)}")
    call.check(len({part.dim() for part in parts}) == 1, "inputs of different rank")
    return torch.cat(parts, call.number("concat_dim"))


@op("ConcatD")
def _concat_d(call: Call) -> Tensor:
    parts = call.many("x")
    call.same_dtype(*parts)
    return torch.cat(parts, call.attr("concat_dim"))


@op("SplitV")
def _split_v(call: Call) -> tuple[Tensor, ...]:
    x, sizes, axis = call["x"], call.ints("size_splits"), call.axis(call.number("split_dim"), call["x"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[axis] - sum(size for size in sizes if size != -1)
    call.check(len(sizes) == call.attr("num_split"), f"sizes {sizes}, num_split is {call.attr('num_split')}")
    return tuple(part.contiguous() for part in x.split(sizes, axis))


@op("Split")
def _split(call: Call) -> tuple[Tensor, ...]:
    return _equal_parts(call, call.number("split_dim"))


@op("SplitD")
def _split_d(call: Call) -> tuple[Tensor, ...]:
    return _equal_parts(call, call.attr("split_dim"))


def _equal_parts(call: Call, dim: int) -> tuple[Tensor, ...]:
    x, parts = call["x"], call.attr("num_split")
    axis = call.axis(dim, x)
    call.check(x.shape[axis] % parts == 0, f"{describe(x)} does not split into {parts} along axis {axis}")
    return tuple(part.contiguous() for part in x.split(x.shape[axis] // parts, axis))
