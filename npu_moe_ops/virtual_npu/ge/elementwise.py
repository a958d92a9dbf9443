"""GE operators that work element by element, with broadcasting but without promotion."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..operators.common import describe
from .call import Call, op

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Tensor, Tensor], Tensor]

UNARY: dict[str, Unary] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsFinite": torch.isfinite,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
    "Log": torch.log,
    "Log1p": torch.log1p,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Rint": torch.round,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": torch.nn.functional.softplus,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "Tanh": torch.tanh,
}
BINARY: dict[str, Binary] = {
    "Add": torch.add,
    "AddV2": torch.add,
    "Equal": torch.eq,
    "FloorDiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "FloorMod": torch.remainder,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.fmod,
    "Mul": torch.mul,
    "NotEqual": torch.ne,
    "Pow": torch.pow,
    "Sub": torch.sub,
    "TruncateDiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
LOGICAL: dict[str, Binary] = {"LogicalAnd": torch.logical_and, "LogicalOr": torch.logical_or}
BITWISE: dict[str, Binary] = {
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}


def _enter_unary(type: str, function: Unary) -> None:
    op(type)(lambda call: function(call[0]))


def _enter_binary(type: str, function: Binary, only: tuple[torch.dtype, ...] = ()) -> None:
    @op(type)
    def _(call: Call) -> Tensor:
        call.same_dtype(call[0], call[1])
        call.check(not only or call[0].dtype in only, f"inputs {describe(call[0])}, wanted {only}")
        return function(call[0], call[1])


for _type, _unary in UNARY.items():
    _enter_unary(_type, _unary)
for _type, _binary in BINARY.items():
    _enter_binary(_type, _binary)
for _type, _binary in LOGICAL.items():
    _enter_binary(_type, _binary, (torch.bool,))
for _type, _binary in BITWISE.items():
    _enter_binary(_type, _binary, (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@op("LogicalNot")
def _logical_not(call: Call) -> Tensor:
    call.check(call[0].dtype == torch.bool, f"input {describe(call[0])}, wanted bool")
    return torch.logical_not(call[0])


@op("Div", "RealDiv")
def _div(call: Call) -> Tensor:
    """Of whole numbers: Div cuts towards zero; RealDiv is for floats."""
    x, y = call[0], call[1]
    call.same_dtype(x, y)
    if x.is_floating_point():
        return torch.div(x, y)
    call.check(call.node.type == "Div", f"inputs {describe(x)}, wanted floats")
    return torch.div(x, y, rounding_mode="trunc")


@op("Muls")
def _muls(call: Call) -> Tensor:
    factor: float = call.attr("value")
    return (call[0] * factor).to(call[0].dtype)


@op("Adds")
def _adds(call: Call) -> Tensor:
    term: float = call.attr("value")
    return (call[0] + term).to(call[0].dtype)


@op("Axpy")
def _axpy(call: Call) -> Tensor:
    call.same_dtype(call[0], call[1])
    return torch.add(call[0], call[1], alpha=call.attr("alpha"))


@op("AxpyV2")
def _axpy_v2(call: Call) -> Tensor:
    call.same_dtype(call[0], call[1], call["alpha"])
    return torch.add(call[0], call[1], alpha=call["alpha"].item())


@op("Sxpy")
def _sxpy(call: Call) -> Tensor:
    """x1 - alpha * x2: torchair has it for aten.rsub, with x1 and x2 the other way round."""
    given = [value for value in (call[0], call[1], call.get("alpha")) if value is not None]
    call.same_dtype(*given)
    return torch.sub(call[0], call[1], alpha=given[2].item() if len(given) > 2 else 1)


@op("Addcmul")
def _addcmul(call: Call) -> Tensor:
    call.same_dtype(call[0], call["x1"], call["x2"], call["value"])
    return torch.addcmul(call[0], call["x1"], call["x2"], value=call["value"].item())


@op("ClipByValue", "ClipByValueV2")
def _clip(call: Call) -> Tensor:
    x, low, high = call["x"], call["clip_value_min"], call["clip_value_max"]
    call.same_dtype(x, low, high)
    return torch.clamp(x, low, high)


@op("Select", "SelectV2")
def _select(call: Call) -> Tensor:
    call.check(call[0].dtype == torch.bool, f"condition {describe(call[0])}, wanted bool")
    call.same_dtype(call[1], call[2])
    return torch.where(call[0], call[1], call[2])


@op("MaskedFill")
def _masked_fill(call: Call) -> Tensor:
    x, mask, value = call["x"], call["mask"], call["value"]
    call.same_dtype(x, value)
    call.check(mask.dtype == torch.bool and value.numel() == 1, f"mask {describe(mask)}, value {describe(value)}")
    return x.masked_fill(mask, value.reshape([]))


@op("Triu")
def _triu(call: Call) -> Tensor:
    return call[0].triu(call.attr("diagonal", 0))


@op("Tril")
def _tril(call: Call) -> Tensor:
    return call[0].tril(call.attr("diagonal", 0))
