"""Costs as a table, as JSON rows, and as a picture of the cores over time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from .simulate import DDR_BYTES, Cost, Job, ratio

ORIGINAL = "llada2_original"
CLOCK_MHZ = 1850  # of an A2 cube core: DDR_BYTES a cycle are 1.42 TB/s
COLOURS = {"gate/up": "#2f6fb7", "vector": "#e0912f", "down": "#3a9b6e", "other": "#b7b7b7"}


@dataclass(frozen=True)
class Simulated:
    costs: Mapping[str, Mapping[str, Cost]]  # workload -> plan -> cost
    op: str = "grouped_swiglu_ffn"

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "workload": workload,
                "counts": list(cost.job.counts),
                "plan": plan,
                "cycles": cost.cycles,
                "ddr_floor": cost.ddr_floor,
                "load_floor": cost.load_floor,
                "cube_utilisation": round(cost.cube_utilisation, 4),
                "leaf_kernels": cost.leaf_kernels,
                "passes_s": cost.passes_s,
                "control_flow_s": cost.control_flow_s,
            }
            for workload, by_plan in self.costs.items()
            for plan, cost in by_plan.items()
        ]

    def table(self) -> Any:
        def cells(workload: str, plan: str, cost: Cost) -> dict[str, str]:
            return {
                "cycles": f"{cost.cycles:,}",
                "DDR floor": f"{cost.ddr_floor:,}",
                "x floor": f"{cost.cycles / max(cost.ddr_floor, 1):.2f}",
                "cube busy": f"{cost.cube_utilisation:.0%}",
                "leaf kernels": str(cost.leaf_kernels),
                "passes s": f"{cost.passes_s:.2f}",
            }

        def ratios(workload: str, plan: str) -> list[float]:
            by_plan = self.costs[workload]
            return [ratio(by_plan[plan], by_plan[ORIGINAL], floored) for floored in (False, True)]

        return _table(f"{self.op}: simulated cycles (pypto's cost model of A2/A3)", self.costs, cells, ratios)

    def summary(self) -> list[str]:
        """Geometric means against the published settings, for each other plan."""
        lines = []
        for plan in _compared(self.costs):
            plain, floored = (
                [ratio(by_plan[plan], by_plan[ORIGINAL], floor) for by_plan in self.costs.values()]
                for floor in (False, True)
            )
            lines.append(
                f"{plan}: {geometric_mean(plain):.2f} times fewer simulated cycles than {ORIGINAL} (geometric mean); "
                f"{geometric_mean(floored):.2f} where none is counted below its DDR floor, at least {min(floored):.2f}"
            )
        return lines


@dataclass(frozen=True)
class Measured:
    microseconds: Mapping[str, Mapping[str, float]]  # workload -> plan -> median
    jobs: Mapping[str, Mapping[str, Job]]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "workload": workload,
                "counts": list(self.jobs[workload][plan].counts),
                "plan": plan,
                "microseconds": spent,
                "ddr_floor_microseconds": self._floor(workload, plan),
            }
            for workload, by_plan in self.microseconds.items()
            for plan, spent in by_plan.items()
        ]

    def table(self) -> Any:
        def cells(workload: str, plan: str, spent: float) -> dict[str, str]:
            floor = self._floor(workload, plan)
            return {"us": f"{spent:,.1f}", "DDR floor us": f"{floor:,.1f}", "x floor": f"{spent / floor:.2f}"}

        def ratios(workload: str, plan: str) -> list[float]:
            spent, original = (self.microseconds[workload][name] for name in (plan, ORIGINAL))
            return [original / spent, original / max(spent, self._floor(workload, plan))]

        return _table("grouped_swiglu_ffn: measured on this NPU", self.microseconds, cells, ratios)

    def summary(self) -> list[str]:
        lines = []
        for plan in _compared(self.microseconds):
            mean = geometric_mean(by_plan[ORIGINAL] / by_plan[plan] for by_plan in self.microseconds.values())
            lines.append(f"{plan}: {mean:.2f} times faster than {ORIGINAL} (geometric mean), measured")
        return lines

    def _floor(self, workload: str, plan: str) -> float:
        return self.jobs[workload][plan].weight_bytes / DDR_BYTES / CLOCK_MHZ


def _compared(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Plans that ran wherever the published settings did."""
    plans = next(iter(results.values()))
    return [
        plan
        for plan in plans
        if plan != ORIGINAL and all({plan, ORIGINAL} <= set(by_plan) for by_plan in results.values())
    ]


def _table(
    title: str,
    results: Mapping[str, Mapping[str, Any]],
    cells: Callable[[str, str, Any], dict[str, str]],
    ratios: Callable[[str, str], list[float]],
) -> Any:
    """A rich table, a line for each workload and plan; with ratios where the published settings ran everywhere."""
    from rich.table import Table

    lines = {
        workload: {plan: cells(workload, plan, result) for plan, result in by_plan.items()}
        for workload, by_plan in results.items()
    }
    if all(ORIGINAL in by_plan for by_plan in results.values()):
        for workload, by_plan in lines.items():
            for plan, line in by_plan.items():
                shown = ["", ""] if plan == ORIGINAL else [f"{value:.2f}" for value in ratios(workload, plan)]
                line |= zip(("times fewer", "floored"), shown, strict=True)
    table = Table("workload", "plan", title=title)
    for name in next(iter(next(iter(lines.values())).values())):
        table.add_column(name, justify="right")
    for workload, by_plan in lines.items():
        for plan, line in by_plan.items():
            table.add_row(workload, plan, *line.values())
        table.add_section()
    return table


def plot(costs: Sequence[Cost], path: Path) -> None:
    """The cores over time, one panel a cost, on one time axis; the DDR floor as a line."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 0.8 + 2.6 * len(costs)), layout="constrained")
    end = max(max(cost.cycles, cost.ddr_floor) for cost in costs)
    for axes, cost in zip(figure.subplots(len(costs), squeeze=False)[:, 0], costs, strict=True):
        for task in cost.tasks:
            lane = int(task.core.split()[1])
            axes.broken_barh([(task.start, task.end - task.start)], (lane, 0.86), color=COLOURS[task.kind], linewidth=0)
        axes.axvline(cost.ddr_floor, color="#b03030", linewidth=1.2, linestyle="--")
        axes.axhline(24, color="#808080", linewidth=0.6)
        axes.set_xlim(0, end * 1.01)
        axes.set_ylim(72, 0)
        axes.set_yticks([12, 48], ["24 cube\ncores", "48 vector\ncores"])
        axes.set_title(_title(cost), loc="left", fontsize=10)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.tick_params(labelsize=9)
    axes.set_xlabel("simulated cycles", fontsize=9)
    kinds = [kind for kind in COLOURS if any(task.kind == kind for cost in costs for task in cost.tasks)]
    handles: list[Any] = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    handles.append(Line2D([], [], color="#b03030", linestyle="--", label="DDR floor"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _title(cost: Cost) -> str:
    counts = ",".join(map(str, cost.job.counts))
    shown = counts if len(counts) < 60 else f"{counts[:57]}..."
    return f"{cost.job.plan}: {cost.cycles:,} simulated cycles; rows of the experts: {shown}"
