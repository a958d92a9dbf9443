"""A GE graph: its nodes, which tests may look at, and its execution on CPU tensors.

Strict where a device would go wrong: unknown operators, names used twice, inputs of another dtype, shape or place than
the graph declares, results of another dtype or shape than the converter declared.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import device
from ..operators.common import describe
from ..refused import Refused
from .call import OPS, Call
from .decode import attribute, constant, ge_dtype, proto_dtype, traced_shape

INPUTS = ("Data", "RefData")
STRUCTURE = (*INPUTS, "Const", "NetOutput")
HOST, DEVICE = 0, 1


class Edge(NamedTuple):
    """One input of a node: its name there, the node it comes from (None: left out), and which of its outputs."""

    name: str
    node: "Node | None"
    output: int


class Node:
    """One operator of a graph.

    inputs      name -> Node, or None for an optional one that is left out; in order
    edges       the same with output numbers
    after       nodes that only have to run before (control edges)
    attrs       name -> number, str or list; those of GE's own (with a leading underscore) left out
    n_out       number of outputs
    dtypes      declared dtype of each output; None where torchair declares none
    shapes      shape of each output as traced, or of a view of it; symbols as str; None where nothing is said
    """

    def __init__(self, message: Any) -> None:
        self.type: str = message.type
        self.name: str = message.name
        self.attrs = {name: attribute(value) for name, value in message.attr.items() if not name.startswith("_")}
        self.edges: tuple[Edge, ...] = ()
        self.after: tuple[Node, ...] = ()
        descriptions = list(message.output_desc)
        self.n_out = len(descriptions)
        self.dtypes = [self._declared(description) for description in descriptions]
        metas = [attribute(d.attr["_meta"]) if "_meta" in d.attr else None for d in descriptions]
        self.shapes = [traced_shape(meta) for meta in metas]
        self.value = constant(message.attr["value"].t) if self.type == "Const" else None
        self.size = list(descriptions[0].shape.dim) if self.type in INPUTS else None

    def _declared(self, description: Any) -> torch.dtype | None:
        # Elsewhere a description that nobody filled in says float.
        said = self.type in INPUTS or "_meta" in description.attr
        return proto_dtype(description.dtype) if said else None

    @property
    def inputs(self) -> dict[str, "Node | None"]:
        return {edge.name: edge.node for edge in self.edges}

    def __repr__(self) -> str:
        return f"{self.type}({self.name})"

    def link(self, message: Any, nodes: dict[str, "Node"]) -> None:
        """Resolve the names of the inputs."""
        edges, after = [], []
        for place, text in enumerate(message.input):
            source, _, output = text.rpartition(":")
            if text and source not in nodes:
                raise Refused(f"GE graph: {self} reads {text}: no such node")
            if output == "-1":
                after.append(nodes[source])
                continue
            described = place < len(message.input_desc)
            name = message.input_desc[place].name if described else f"x{place}"
            edges.append(Edge(name, nodes[source] if text else None, int(output or 0)))
        names = Counter(edge.name for edge in edges)
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            raise Refused(f"GE graph: {self} has two inputs called {', '.join(twice)}")
        self.edges, self.after = tuple(edges), tuple(after)


class Graph:
    """A loaded graph.

    nodes       those that the output needs, in order of execution
    output      the last of them, NetOutput
    options     what the compiler was given
    runs        how often it ran
    """

    def __init__(self, message: Any, options: dict[str, str] | None = None) -> None:
        self.name: str = message.name
        self.options = dict(options or {})
        self.runs = 0
        self.compiled = False
        self.output_dtypes = [ge_dtype(number) for number in message.attr["_output_dtypes"].list.i]
        self.placements: list[int] = list(message.attr["_input_placements"].list.i)
        self.nodes = _needed(_linked(message))
        self.output = self.nodes[-1]
        if len(self.output.edges) != len(self.output_dtypes):
            raise Refused(f"GE graph: {len(self.output.edges)} outputs, {len(self.output_dtypes)} declared dtypes")

    def types(self) -> Counter[str]:
        """How many nodes of each type the output needs."""
        return Counter(node.type for node in self.nodes)

    def find(self, type: str) -> list[Node]:
        """The nodes of a type, in order of execution."""
        return [node for node in self.nodes if node.type == type]

    def ancestors(self, node: Node) -> set[Node]:
        """Every node that this one needs."""
        found: set[Node] = set()
        waiting = [node]
        while waiting:
            for source in _sources(waiting.pop()):
                if source not in found:
                    found.add(source)
                    waiting.append(source)
        return found

    def describe(self) -> str:
        """One line a node: for the message of a failed test."""
        lines = [f"graph {self.name}, run {self.runs} times"]
        for node in self.nodes:
            inputs = ", ".join(f"{edge.name}={_place(edge)}" for edge in node.edges)
            attrs = ", ".join(f"{name}={value}" for name, value in sorted(node.attrs.items()) if value is not None)
            outputs = ", ".join(map(_declaration, node.dtypes, node.shapes))
            lines.append(f"  {node.name} = {node.type}({inputs}) [{attrs}] -> {outputs}")
        return "\n".join(lines)

    def run(self, inputs: Sequence[Tensor], assigned: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Execute on npu tensors, and host ones where the graph wants them. Assigned outputs are written in place."""
        if device.capturing():
            raise Refused("GE graph: run while another graph is being captured")
        self.runs += 1
        run = _Run(self, inputs)
        for node in self.nodes[:-1]:
            run.execute(node)
        results = []
        for place, edge in enumerate(self.output.edges):
            result, dtype = run.value(self.output, edge), self.output_dtypes[place]
            if result is None or result.dtype != dtype:
                raise Refused(f"GE graph: output {place} is {describe(result)}, declared {dtype}")
            results.append(result)
        if any(target is not None for target in assigned):
            results = [result.clone() for result in results]  # or a target's new value shows in an output that reads it
        targets = [*assigned, *[None] * (len(results) - len(assigned))]
        return [_deliver(result, target) for result, target in zip(results, targets, strict=True)]


class _Run:
    """One execution: what each node has computed."""

    def __init__(self, graph: Graph, inputs: Sequence[Tensor]) -> None:
        self.graph = graph
        self.inputs = inputs
        self.values: dict[Node, tuple[Tensor | None, ...]] = {}

    def value(self, node: Node, edge: Edge) -> Tensor | None:
        if edge.node is None:
            return None
        values = self.values[edge.node]
        if not 0 <= edge.output < len(values):
            raise Refused(f"{node}: {edge.name} is output {edge.output} of {edge.node}, which has {len(values)}")
        return values[edge.output]

    def execute(self, node: Node) -> None:
        if node.type in INPUTS:
            results: tuple[Tensor | None, ...] = (self._input(node),)
        elif node.value is not None:
            results = (node.value,)
        else:
            results = self._compute(node)
        for place in range(min(node.n_out, len(results))):
            self._check(node, place, results[place])
        self.values[node] = results

    def _compute(self, node: Node) -> tuple[Tensor | None, ...]:
        call = Call(node, {edge.name: self.value(node, edge) for edge in node.edges})
        try:
            result = OPS[node.type](call)
        except Refused as refusal:
            raise Refused(f"{refusal}\n  at {call.describe()}") from refusal
        except Exception as error:
            raise Refused(f"{node}: {type(error).__name__}: {error}\n  at {call.describe()}") from error
        return result if isinstance(result, tuple) else (result,)

    def _check(self, node: Node, place: int, result: Tensor | None) -> None:
        if result is None:
            return
        dtype, shape = node.dtypes[place], node.shapes[place]
        if dtype is not None and result.dtype != dtype:
            raise Refused(f"{node}: output {place} is {describe(result)}, declared {dtype}")
        # The size alone: a view that torchair folds away leaves its shape at the node that it is a view of.
        sizes = [size for size in shape or () if isinstance(size, int)]
        if shape is not None and len(sizes) == len(shape) and result.numel() != math.prod(sizes):
            raise Refused(f"{node}: output {place} is {describe(result)}, traced as {shape}")

    def _input(self, node: Node) -> Tensor:
        place = node.attrs["index"]
        if not 0 <= place < min(len(self.inputs), len(self.graph.placements)):
            raise Refused(f"{node}: input {place} of {len(self.inputs)}")
        given = self.inputs[place]
        wanted = "cpu" if self.graph.placements[place] == HOST else "npu"
        if given.device.type != wanted:
            raise Refused(f"{node}: input {place} lies on {given.device}, the graph wants {wanted}")
        given = given.detach()
        value = given if wanted == "cpu" else device.view(given)
        dtype, size = node.dtypes[0], node.size or []
        if dtype is not None and value.dtype != dtype:
            raise Refused(f"{node}: input {place} is {describe(given)}, the graph wants {dtype}")
        if size == [] and value.numel() == 1:
            value = value.reshape([])  # a symbolic size comes as one element, declared without axes
        known = -2 not in size  # -2: any rank
        if known and (
            len(size) != value.dim() or any(a not in (-1, b) for a, b in zip(size, value.shape, strict=True))
        ):
            raise Refused(f"{node}: input {place} is {describe(given)}, the graph wants {size}")
        return value.contiguous()


def _linked(message: Any) -> list[Node]:
    unknown = sorted({op.type for op in message.op} - set(OPS) - set(STRUCTURE))
    if unknown:
        raise Refused(f"GE graph: not implemented: {', '.join(unknown)}")
    names = Counter(op.name for op in message.op)
    twice = sorted(name for name, times in names.items() if times > 1)
    if twice:
        raise Refused(f"GE graph: more than one node called {', '.join(twice)}")
    nodes = {op.name: Node(op) for op in message.op}
    for op in message.op:
        nodes[op.name].link(op, nodes)
    return list(nodes.values())


def _needed(nodes: list[Node]) -> list[Node]:
    """The output and what it needs, each node after its sources."""
    outputs = [node for node in nodes if node.type == "NetOutput"]
    if len(outputs) != 1:
        raise Refused(f"GE graph: {len(outputs)} nodes of type NetOutput")
    order: list[Node] = []
    entered: set[Node] = set()
    finished: set[Node] = set()
    stack = [(outputs[0], False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            finished.add(node)
            order.append(node)
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in reversed(_sources(node)))
        elif node not in finished:
            raise Refused(f"GE graph: {node} needs itself")
    return order


def _sources(node: Node) -> list[Node]:
    return [edge.node for edge in node.edges if edge.node is not None] + list(node.after)


def _deliver(result: Tensor, assigned: Tensor | None) -> Tensor:
    target = torch.empty(result.shape, dtype=result.dtype, device="npu") if assigned is None else assigned
    if target.shape != result.shape or target.dtype != result.dtype:
        raise Refused(f"GE graph: an output {describe(result)} is assigned to {describe(target)}")
    device.launch(lambda memory: memory.copy_(result), target)
    return target


def _place(edge: Edge) -> str:
    return "None" if edge.node is None else f"{edge.node.name}:{edge.output}"


def _declaration(dtype: torch.dtype | None, shape: Sequence[int | str] | None) -> str:
    return f"{'?' if dtype is None else str(dtype).removeprefix('torch.')} {'?' if shape is None else list(shape)}"
