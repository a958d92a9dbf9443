"""GE's protobuf messages in terms of torch."""

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..refused import Refused

# torchair.ge.DataType: the numbers in attributes such as Cast's dst_type.
DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}
# Descriptions of tensors use the enumeration of the messages themselves, which is numbered otherwise.
PROTO_NAMES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_INT8": torch.int8,
    "DT_UINT8": torch.uint8,
    "DT_INT16": torch.int16,
    "DT_INT32": torch.int32,
    "DT_INT64": torch.int64,
    "DT_UINT64": torch.uint64,
    "DT_DOUBLE": torch.float64,
    "DT_BOOL": torch.bool,
    "DT_BF16": torch.bfloat16,
}
_META = re.compile(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\(\[(.*?)\]\)")


def ge_dtype(number: Any) -> torch.dtype:
    """The dtype of an attribute."""
    if number not in DTYPES:
        raise Refused(f"GE graph: data type {number} is not implemented")
    return DTYPES[number]


def proto_dtype(number: int) -> torch.dtype | None:
    """The dtype of a description; None for those that torch lacks or that nothing here computes with."""
    return _proto_dtypes().get(number)


def attribute(message: Any) -> Any:
    """An attribute's value: number, str, list of these, or None for kinds that only GE itself reads."""
    kind = message.WhichOneof("value")
    if kind == "list":
        for field in ("i", "f", "b", "s"):
            values = list(getattr(message.list, field))
            if values:
                return [_text(value) for value in values]
        return []
    if kind in ("s", "i", "f", "b", "dt"):
        return _text(getattr(message, kind))
    return None


def constant(message: Any) -> Tensor:
    """The tensor of a Const's attribute `value`."""
    dtype = proto_dtype(message.desc.dtype)
    if dtype is None:
        raise Refused(f"GE graph: a constant of data type {message.desc.dtype} is not implemented")
    shape = list(message.desc.shape.dim)
    size = torch.Size(shape).numel()
    if size * dtype.itemsize != len(message.data):
        raise Refused(f"GE graph: a constant {shape} {dtype} has {len(message.data)} bytes")
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(message.data), dtype=dtype).reshape(shape)


def traced_shape(meta: str | None) -> Sequence[int | str] | None:
    """What Dynamo traced for an output, from the `_meta` that torchair leaves: sizes, and symbols for unknown ones."""
    found = _META.search(meta or "")
    if found is None:
        return None
    sizes = [size.strip() for size in found[2].split(",") if size.strip()]
    return [int(size) if size.isdigit() else size for size in sizes]


def messages() -> Any:
    """torchair's protobuf classes."""
    return import_module("torchair._ge_concrete_graph.ge_ir_pb2")


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


@cache
def _proto_dtypes() -> dict[int, torch.dtype]:
    numbers = messages().DataType
    return {numbers.Value(name): dtype for name, dtype in PROTO_NAMES.items()}
