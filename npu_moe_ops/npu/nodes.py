"""Nodes of a GE graph, as lowering.py needs them, over torchair's builders, which are imported when called."""

from dataclasses import dataclass, replace
from typing import Any

Node = Any  # torchair's Tensor: one output of a node

# Names that mark what lowering.py has made. An op that reads a marked node of its own graph may rely on it.
ROUTED_IDS = "npu_moe_routed_ids"  # within [0, E)
OFFSETS = "npu_moe_offsets"  # begin at 0, never fall, end at N or before
FULL_OFFSETS = "npu_moe_full_offsets"  # and end at N
FULL_ROWS = "npu_moe_full_rows"  # row_of without slots of no expert: each row once


@dataclass(frozen=True)
class Weight:
    """The experts' matrices [E, K, M], or [E, M, K] if transposed, as they lie in memory."""

    stored: Node
    transposed: bool

    def flipped(self) -> "Weight":
        return replace(self, transposed=not self.transposed)


def expert_weights(weight: Node, rows: int, cols: int) -> Weight:
    """[E*rows, cols] or [E, rows, cols]; what a node of this graph transposed is taken from before that."""
    if len(weight.symsize) == 2:
        return Weight(builder().Reshape(weight, int32([-1, rows, cols])), False)
    source = _before_transpose(weight)
    return Weight(weight, False) if source is None else Weight(source, True)


def multiply_rows(x: Node, weight: Weight, ends: Node, dtype: int) -> Node:
    """x [N, K] times its expert's [K, M] -> [N, M]; rows of no expert are undefined."""
    return _grouped_matmul(x, weight.stored, ends, dtype, group_type=0, transpose_weight=weight.transposed)


def multiply_experts(x: Node, y: Node, ends: Node, dtype: int) -> Node:
    """x [N, K], y [N, M] -> [E, K, M]: each expert's x^T @ y; 0 for an expert without rows."""
    return _grouped_matmul(x, y, ends, dtype, group_type=2, transpose_x=True)


def _grouped_matmul(x: Node, weight: Node, ends: Node, dtype: int, **attributes: Any) -> Node:
    """Optional inputs that are left out are empty tensors, of the dtypes that torchair gives them."""
    ge = builder()

    def absent(of: int) -> list[Node]:
        return [ge.Fill(int32([0]), ge.Cast(0.0, dst_type=of))]

    (out,) = ge.GroupedMatmul(
        [x],
        [weight],
        absent(kind("FLOAT") if dtype == kind("BF16") else dtype),  # bias
        absent(kind("UINT64")),  # scale
        absent(kind("FLOAT")),  # offset
        absent(kind("FLOAT16")),  # antiquant_scale
        absent(kind("FLOAT16")),  # antiquant_offset
        ends,
        None,
        split_item=3,
        dtype=-1,
        group_list_type=0,
        act_type=0,
        **attributes,
    )
    return out


def _before_transpose(weight: Node) -> Node | None:
    """What lies in memory, if weight is that with its last two axes swapped by a node of this graph."""
    node = weight.node
    if node.type != "Transpose":
        return None
    graph = {op.name: op for op in _graph().op}
    source, axes = (name.rpartition(":") for name in node.input[:2])
    if graph[axes[0]].attr["_readable_value"].s.decode() != "[0, 2, 1]":
        return None
    from torchair.ge._ge_graph import Tensor

    return Tensor(graph[source[0]], int(source[2]))


def safe_offsets(expert_cumsum: Node, tokens: Node) -> Node:
    """As int32. Bad values can do no harm: all lie within [0, N] and never fall."""
    ge = builder()
    if made(expert_cumsum, OFFSETS) or made(expert_cumsum, FULL_OFFSETS):
        return expert_cumsum
    dtype = expert_cumsum.dtype
    limit = ge.Cast(length(tokens), dst_type=dtype)
    inside = ge.Minimum(ge.Maximum(expert_cumsum, ge.Const(0, dtype)), limit)
    rising, _ = ge.Cummax(ge.Cast(inside, dst_type=kind("INT32")), dim=0)
    return rising


def ends_of(offsets: Node) -> Node:
    """The group list of GroupedMatmul: where each expert's rows end."""
    ge = builder()
    return ge.Cast(ge.Slice(offsets, int32([1]), int32([-1])), dst_type=kind("INT64"))


def zero_tail(matrix: Node, offsets: Node, dtype: int) -> Node:
    """0 in the rows from the last offset on, whatever memory holds there."""
    ge = builder()
    last = ge.ReduceMax(offsets, int32([0]), keep_dims=True)
    tail = ge.GreaterEqual(ge.Range(int32(0), length(matrix), int32(1)), last)
    return ge.MaskedFill(matrix, ge.Unsqueeze(tail, axes=[1]), ge.Const(0.0, dtype))


def zeros(shape: list[Any], dtype: int) -> Node:
    return builder().Fill(int32([int(size) for size in shape]), builder().Cast(0, dst_type=dtype))


def length(tensor: Node) -> Node:
    """Its first size when the graph runs, int32."""
    ge = builder()
    return ge.Gather(ge.Shape(tensor), int32(0))


def float32(tensor: Node) -> Node:
    """For tensors whose dtype torchair knows: inputs of an op."""
    return tensor if tensor.dtype == kind("FLOAT") else builder().Cast(tensor, dst_type=kind("FLOAT"))


def int32(value: int | list[int]) -> Node:
    return builder().Const(value, kind("INT32"))


def marked(name: str) -> str:
    """A name that no other node of this graph has."""
    return f"{name}_{len(_graph().op)}"


def made(tensor: Node, name: str) -> bool:
    return bool(tensor.node.name.startswith(name)) and tensor.tensor.endswith(":0")


def always(condition: Any) -> bool:
    """Whether it holds whatever the symbols in it are; asks for no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def kind(name: str) -> int:
    from torchair.ge import DataType

    value: int = getattr(DataType, f"DT_{name}")
    return value


def builder() -> Any:
    """One function for each operator."""
    from torchair._ge_concrete_graph import ge_apis

    return ge_apis


def _graph() -> Any:
    from torchair.ge._ge_graph import get_default_ge_graph

    return get_default_ge_graph()
