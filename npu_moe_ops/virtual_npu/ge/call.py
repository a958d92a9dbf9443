"""What an implementation of a GE operator is given, and the table that it enters itself into."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..operators.common import describe
from ..refused import Refused

if TYPE_CHECKING:
    from .graph import Node

Result = Tensor | tuple[Tensor | None, ...]
Implementation = Callable[["Call"], Result]

OPS: dict[str, Implementation] = {}


def op(*types: str) -> Callable[[Implementation], Implementation]:
    """Enter a function into the table."""

    def enter(implementation: Implementation) -> Implementation:
        for type in types:
            assert type not in OPS, type
            OPS[type] = implementation
        return implementation

    return enter


class Call:
    """One node with the values of its inputs."""

    def __init__(self, node: "Node", values: dict[str, Tensor | None]) -> None:
        self.node = node
        self.values = values

    def __getitem__(self, key: int | str) -> Tensor:
        """An input by place or by name; it has to be there."""
        value = self.get(key)
        if value is None:
            raise Refused(f"{self.node}: input {key} is missing")
        return value

    def get(self, key: int | str) -> Tensor | None:
        """An input by place or by name, None if it is left out."""
        if isinstance(key, str):
            return self.values.get(key)
        return list(self.values.values())[key] if key < len(self.values) else None

    def many(self, name: str) -> list[Tensor]:
        """The tensors of a dynamic input: name0, name1, ..."""
        found = [value for key, value in self.values.items() if re.fullmatch(name + r"\d+", key)]
        return [value for value in found if value is not None]

    def attr(self, name: str, default: Any = None) -> Any:
        value = self.node.attrs.get(name)
        return default if value is None else value

    def without(self, *attrs: str) -> None:
        """Refuse options that are set but not implemented."""
        used = [name for name in attrs if self.attr(name)]
        self.check(not used, f"{', '.join(used)} is not implemented")

    def check(self, ok: bool, complaint: str) -> None:
        if not ok:
            raise Refused(f"{self.node}: {complaint}")

    def same_dtype(self, *tensors: Tensor) -> None:
        """GE promotes nothing: converters have to cast."""
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        self.check(len(dtypes) == 1, f"inputs of {' and '.join(dtypes)}: a GE operator takes one dtype")

    def ints(self, key: int | str) -> list[int]:
        """The values of an index input."""
        value = self[key]
        self.check(
            value.dtype in (torch.int32, torch.int64), f"input {key} is {describe(value)}, wanted int32 or int64"
        )
        return [int(number) for number in value.flatten().tolist()]

    def number(self, key: int | str) -> int:
        """The value of an index input of one element."""
        values = self.ints(key)
        self.check(len(values) == 1, f"input {key} has {len(values)} elements, wanted 1")
        return values[0]

    def axis(self, axis: int, tensor: Tensor) -> int:
        """An axis counted from the front."""
        rank = max(tensor.dim(), 1)
        self.check(-rank <= axis < rank, f"axis {axis} of {describe(tensor)}")
        return axis % rank

    def indices(self, tensor: Tensor, size: int) -> Tensor:
        """Indices as torch wants them; outside [0, size) a device would read anything."""
        self.check(tensor.dtype in (torch.int32, torch.int64), f"indices {describe(tensor)}, wanted int32 or int64")
        if tensor.numel():
            low, high = int(tensor.min()), int(tensor.max())
            self.check(low >= 0 and high < size, f"indices {low}..{high} outside [0, {size})")
        return tensor.long()

    def describe(self) -> str:
        inputs = ", ".join(f"{name}={describe(value)}" for name, value in self.values.items())
        return f"{self.node}: {inputs}; {self.node.attrs}"
