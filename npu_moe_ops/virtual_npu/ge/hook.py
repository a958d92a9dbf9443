"""torchair's way into the graph engine, led here: what CANN would be handed is decoded and executed by `graph.Graph`.

Everything before is torchair's own: lowering, converters, its passes, the bytes of the finished graph.
"""

import os
from importlib import import_module
from typing import Any

import torch._dynamo
from torch import Tensor

from ..refused import Refused
from . import activation, elementwise, indexing, moe, reduction, shapes  # noqa: F401  # fill the table
from .decode import messages
from .graph import Graph

GRAPHS: list[Graph] = []


def install() -> None:
    """Replace what torchair calls in CANN. Call it after torch_npu is imported, before the first compilation."""
    torch._dynamo.trace_rules.add("npu_moe_ops.virtual_npu")  # after a graph break, kernels run inside traced frames
    import_module("torchair")  # a lazy name of torch_npu's until it is imported
    backend: Any = import_module("torchair.core._backend")
    library = backend._torchair
    library.InitializeGraphEngine = lambda options: None
    library.FinalizeGraphEngine = lambda: None
    library.export = _export
    compiled = backend.TorchNpuGraph
    compiled.load, compiled.compile, compiled.run, compiled.auto_tune = _load, _compile, _run, _auto_tune


def decode(serialized: bytes, options: dict[str, str] | None = None) -> Graph:
    """The graph in the bytes of a GE model."""
    model = messages().ModelDef()
    model.ParseFromString(serialized)
    if len(model.graph) != 1:
        raise Refused(f"GE model of {len(model.graph)} graphs")
    return Graph(model.graph[0], options)


def _load(self: Any, ge_graph: Any, options: dict[str, str] | None = None) -> None:
    self._virtual = decode(ge_graph.SerializeToString(), options)
    GRAPHS.append(self._virtual)


def _compile(self: Any) -> None:
    self._virtual.compiled = True


def _run(
    self: Any, inputs: list[Tensor], assigned_outputs: list[Tensor | None] | None = None, stream: Any = None
) -> list[Tensor]:
    graph: Graph = self._virtual
    if not graph.compiled:
        raise Refused(f"GE graph: {graph.name} is run before it is compiled")
    return graph.run(inputs, assigned_outputs or ())


def _auto_tune(self: Any, example_inputs: list[Tensor] | None = None, stream: Any = None) -> None:
    raise Refused("GE graph: there is no device to tune for")


def _export(serialized: bytes, options: dict[str, str]) -> None:
    """An exported .air file holds the same message."""
    with open(os.path.join(options["export_path_dir"], options["export_name"]), "wb") as file:
        file.write(serialized)
