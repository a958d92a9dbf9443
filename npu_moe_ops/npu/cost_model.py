"""pypto's cost model in this process: cycles and tasks of one launch of a kernel."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from . import virtual


class Task(NamedTuple):
    kind: str  # "gate/up", "down", "vector", "other"
    core: str  # "cube 0" .. "cube 23", "vector 24" .. "vector 71"
    start: int  # cycles
    end: int


def count(kernel: Any, tensors: tuple[Tensor, ...], trace: str | None = None) -> dict[str, Any]:
    """Launch a kernel that was built with virtual.cost_options(), once in a process, and read what the model wrote."""
    compile_ = kernel.compile
    spent: list[float] = []

    def timed(*args: Any) -> None:
        before = os.times()
        compile_(*args)
        spent.extend(after - start for after, start in zip(os.times(), before, strict=True))

    kernel.compile = timed
    kernel(*tensors)
    passes, system, children, children_system, _ = spent
    (report,) = virtual.start().glob("output_*/CostModelSimulationOutput/*stat.report.txt")
    if trace:
        shutil.copyfile(next(report.parent.glob("*.pefetto.trace.json")), trace)
    return {
        "cycles": _number(report, "Total Cycles"),
        "leaf_kernels": _number(report, "Total Function Count"),
        "passes_s": round(passes + system, 2),
        "control_flow_s": round(children + children_system, 2),
        "tasks": _tasks(report.parent),
    }


def _number(report: Path, label: str) -> int:
    line = next(line for line in report.read_text().splitlines() if line.startswith(label))
    return int(line.rpartition(":")[2])


def _tasks(folder: Path) -> list[Task]:
    """Every task with its kind: a cube task that waits for nothing is gate/up, one that waits for others is down."""
    topology = [line.split(",") for line in (folder.parent / "dyn_topo.txt").read_text().splitlines()[1:]]
    hubs = {row[1] for row in topology if row[7] == "4"}  # nodes that only join others
    waits = {name for row in topology if row[1] not in hubs for name in row[9:]}
    kinds = {("AIC", False): "gate/up", ("AIC", True): "down", ("AIV", True): "vector"}
    tasks = []
    for core in json.loads((folder / "_simulate.swim.json").read_text()):
        label = f"{'cube' if core['coreType'] == 'AIC' else 'vector'} {core['blockIdx']}"
        for task in core["tasks"]:
            name = str(task["taskId"])
            if name not in hubs:
                kind = kinds.get((core["coreType"], name in waits), "other")
                tasks.append(Task(kind, label, task["execStart"], task["execEnd"]))
    return sorted(tasks, key=lambda task: task.start)
