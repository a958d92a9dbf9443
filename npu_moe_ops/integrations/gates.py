"""What a class's `_apply_gate` computes, read from its source.

A gate is SwiGLU here only if every statement of the method is understood and the whole comes out as

    gate, up = halves of the argument             or  min(gate, limit), clamp(up, -limit, limit)
    return   gate * sigmoid(alpha * gate) * (up + beta)

with numbers or attributes of the module for limit, alpha and beta. Reading instead of running proves it
for all inputs, costs nothing at run time, and leaves the attributes' values to each call.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

Scalar = str | float  # the name of an attribute of the module, or a number


class SwiGLU(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + beta); with uses_act the sigmoid is in `act_fn`, to be checked."""

    limit: Scalar | None = None
    alpha: Scalar = 1.0
    beta: Scalar = 0.0
    uses_act: bool = False


class Term(NamedTuple):
    """A node of the formula: a leaf (gate, up, input), a scalar (number, attribute), or an operation."""

    kind: str
    args: tuple[Any, ...] = ()


class _NotUnderstoodError(Exception):
    pass


INPUT, GATE, UP, NONE = Term("input"), Term("gate"), Term("up"), Term("none")
FUNCTIONS: dict[Callable[..., Any], str] = {
    functional.silu: "silu",
    functional.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.clamp: "clamp",
    torch.chunk: "chunk",
}
METHODS = {"sigmoid", "clamp", "chunk", "float", "to"}
SIGNATURES = {"clamp": ("min", "max"), "chunk": ("chunks", "dim"), "to": ("dtype",)}


def swiglu_of(apply_gate: Any) -> SwiGLU | None:
    """The SwiGLU that an `_apply_gate` of a class computes, or None if it computes another gate or cannot be read."""
    if not inspect.isfunction(apply_gate) or hasattr(apply_gate, "__wrapped__"):  # its source is not what runs
        return None
    try:
        return _match(_Reader(apply_gate).result())
    except (_NotUnderstoodError, OSError, SyntaxError):  # OSError: no source
        return None


class _Reader:
    """Evaluates a straight-line method on symbols."""

    def __init__(self, method: Any) -> None:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
        if not isinstance(function, ast.FunctionDef):
            raise _NotUnderstoodError
        arguments = function.args
        names = [a.arg for a in arguments.args]
        if len(names) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            raise _NotUnderstoodError
        self.globals, self.module = method.__globals__, names[0]
        self.body = function.body[1:] if ast.get_docstring(function) else function.body
        self.names: dict[str, Term | tuple[Term, Term]] = {names[1]: INPUT}

    def result(self) -> Term:
        *assignments, last = self.body
        for statement in assignments:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise _NotUnderstoodError
            self._assign(statement.targets[0], self._value(statement.value))
        if not isinstance(last, ast.Return) or last.value is None:
            raise _NotUnderstoodError
        return self._term(last.value)

    def _assign(self, target: ast.expr, value: Term | tuple[Term, Term]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, tuple) and not isinstance(value, Term):
            for part, item in zip(target.elts, value, strict=False):
                self._assign(part, item)
            if len(target.elts) == len(value):
                return
        elif isinstance(target, ast.Name) and target.id != self.module:
            self.names[target.id] = value
            return
        raise _NotUnderstoodError

    def _term(self, node: ast.expr) -> Term:
        value = self._value(node)
        if not isinstance(value, Term):
            raise _NotUnderstoodError
        return value

    def _value(self, node: ast.expr) -> Term | tuple[Term, Term]:
        match node:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Constant(value=None):
                return NONE
            case ast.Constant(value=float() | int() as number) if not isinstance(number, bool):
                return Term("number", (float(number),))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._term(operand)
                return Term("number", (-value.args[0],)) if value.kind == "number" else Term("negative", (value,))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.module:
                return Term("attribute", (attribute,))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return Term("product", (self._term(left), self._term(right)))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return Term("sum", (self._term(left), self._term(right)))
            case ast.Call():
                return self._call(node)
        raise _NotUnderstoodError

    def _call(self, node: ast.Call) -> Term | tuple[Term, Term]:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="act_fn") if name == self.module:
                kind, positional = "act", node.args
            case ast.Attribute(value=owner, attr=method) if method in METHODS and self._global(owner) is None:
                kind, positional = method, [owner, *node.args]
            case function:
                called = self._global(function)
                kind = next((name for known, name in FUNCTIONS.items() if known is called), "")
                positional = node.args
        if not positional:
            raise _NotUnderstoodError
        x, *rest = positional
        parameters = SIGNATURES.get(kind, ())
        given = dict(zip(parameters, rest, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
        if len(given) != len(rest) + len(node.keywords) or set(given) - set(parameters):
            raise _NotUnderstoodError
        return self._operation(kind, x, given)

    def _operation(self, kind: str, x: ast.expr, given: dict[str, ast.expr]) -> Term | tuple[Term, Term]:
        match kind:
            case "act" | "silu" | "sigmoid":
                return Term(kind, (self._term(x),))
            case "clamp":
                low, high = (self._term(given[k]) if k in given else NONE for k in ("min", "max"))
                return Term("clamp", (self._term(x), low, high))
            case "chunk" if {k: ast.unparse(v) for k, v in given.items()} == {"chunks": "2", "dim": "-1"}:
                if self._term(x) == INPUT:
                    return GATE, UP
            case "float":  # the op computes in fp32 at least
                return self._term(x)
            case "to":  # back to the dtype of what came in, as the op does
                match given.get("dtype"):
                    case ast.Attribute(value=like, attr="dtype") if self._term(like) in (INPUT, GATE, UP):
                        return self._term(x)
        raise _NotUnderstoodError

    def _global(self, node: ast.expr) -> Any:
        """The object that a dotted global name stands for, or None if the node is none."""
        match node:
            case ast.Name(id=name) if name not in self.names and name != self.module:
                return self.globals.get(name)
            case ast.Attribute(value=owner, attr=attribute):
                return getattr(self._global(owner), attribute, None)
        return None


def _match(term: Term) -> SwiGLU:
    factors = _factors(term)
    sigmoids = [f for f in factors if f.kind in ("sigmoid", "act_sigmoid")]
    gates = [f for f in factors if _is_gate(f)]
    ups = [f for f in factors if f not in sigmoids and f not in gates]
    if (len(sigmoids), len(gates), len(ups)) != (1, 1, 1):
        raise _NotUnderstoodError
    (sigmoid,), (gate,), (up,) = sigmoids, gates, ups
    beta: Scalar = 0.0
    if up.kind == "sum":
        up, beta = _with_scalar(up)
    alpha: Scalar = 1.0
    (inside,) = sigmoid.args
    if inside.kind == "product":
        inside, alpha = _with_scalar(inside)
    limit = gate.args[2] if gate.kind == "clamp" else None
    wanted = UP if limit is None else Term("clamp", (UP, _negative(limit), limit))
    if inside != gate or up != wanted:
        raise _NotUnderstoodError
    return SwiGLU(_scalar(limit) if limit else None, alpha, beta, sigmoid.kind == "act_sigmoid")


def _factors(term: Term) -> list[Term]:
    if term.kind == "product":
        return [factor for part in term.args for factor in _factors(part)]
    if term.kind in ("silu", "act"):  # silu(x) = x * sigmoid(x)
        return [*_factors(term.args[0]), Term("sigmoid" if term.kind == "silu" else "act_sigmoid", term.args)]
    return [term]


def _is_gate(term: Term) -> bool:
    return term == GATE or (term.kind == "clamp" and term.args[:2] == (GATE, NONE) and term.args[2] != NONE)


def _negative(scalar: Term) -> Term:
    return Term("number", (-scalar.args[0],)) if scalar.kind == "number" else Term("negative", (scalar,))


def _scalar(term: Term) -> Scalar:
    if term.kind not in ("number", "attribute"):
        raise _NotUnderstoodError
    value: Scalar = term.args[0]
    return value


def _with_scalar(term: Term) -> tuple[Term, Scalar]:
    """Of a sum or product of two: the tensor and the scalar."""
    tensor, scalar = sorted(term.args, key=lambda t: t.kind in ("number", "attribute"))
    return tensor, _scalar(scalar)
