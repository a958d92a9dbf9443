"""The bench's result as tables, as a page and as a picture."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import Line, Point, Result
from .peers import HF_EAGER, HF_GROUPED, KT, LOOP, OURS, OURS_HF, OURS_TORCH

ORDER = (LOOP, HF_EAGER, HF_GROUPED, KT, OURS_TORCH, OURS_HF, OURS)
STYLES = {
    LOOP: ("#8c8c8c", "o"),
    HF_EAGER: ("#b7791f", "v"),
    HF_GROUPED: ("#d69e2e", "^"),
    KT: ("#7b4fa0", "D"),
    OURS_TORCH: ("#7fb3d9", "s"),
    OURS_HF: ("#3a9b6e", "s"),
    OURS: ("#2f6fb7", "s"),
}
NOTE = (
    "Medians, the peers in turns. The floor is reading the active experts' weights at the bandwidth of torch's amax "
    "over 512 MiB, or multiplying at the rate of a large product, whichever takes longer, both measured in the same "
    "rounds. What takes less than one floor reads faster than amax. Times vary with what else the machine does; ratios "
    "less so."
)


@dataclass(frozen=True)
class Grid:
    title: str
    columns: list[str]
    rows: list[list[str]]  # the first cell is text, the others are numbers


def grids(result: Result) -> list[Grid]:
    return [
        *_over_tokens(result.points),
        _limits(result.points),
        *(_line(line) for line in result.lines),
        _overhead(result.overhead),
    ]


def headline(result: Result) -> str:
    m, s = result.machine, result.sizes
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads; torch {m['torch']}; kernel: {m['kernel']}; "
        f"E={s.experts}, H={s.hidden}, I={s.intermediate}, top_k={s.top_k}, bf16; {result.rounds} rounds."
    )


def left_out(result: Result) -> list[str]:
    return [f"left out: {name}: {why}" for name, why in result.left_out.items()]


def console(result: Result) -> list[Any]:
    """What rich prints."""
    from rich.table import Table

    drawn: list[Any] = [headline(result)]
    for grid in grids(result):
        table = Table(title=grid.title, title_justify="left")
        for index, column in enumerate(grid.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in grid.rows:
            table.add_row(*row)
        drawn.append(table)
    return [*drawn, NOTE, *left_out(result)]


def page(result: Result, plot: str | None = None) -> str:
    """docs/benchmarks.md is one of these."""
    made = "Made by `python -m npu_moe_ops bench` (`make bench` shows the same for your machine), on"
    lines = ["# Benchmarks", "", made, headline(result), "", NOTE, ""]
    if plot:
        lines += [f"![Time over tokens for each peer, and the floor]({plot})", ""]
    for grid in grids(result):
        lines += [f"**{grid.title}**", "", _cells(grid.columns), "|" + "---|" + "---:|" * (len(grid.columns) - 1)]
        lines += [*(_cells(row) for row in grid.rows), ""]
    lines += [f"{line[0].upper()}{line[1:]}" for line in left_out(result)]
    return "\n".join(lines).rstrip() + "\n"


def plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    tokens = [point.tokens for point in result.points]
    floor = [1e3 * point.floor for point in result.points]
    axes.fill_between(tokens, [min(floor) / 2] * len(floor), floor, color="#eeeeee", linewidth=0)
    axes.plot(tokens, floor, "--", color="#444444", label="floor, measured")
    for name in _measured(result.points[0]):
        colour, marker = STYLES[name]
        times = [1e3 * point.seconds[name] for point in result.points]
        axes.plot(tokens, times, color=colour, marker=marker, markersize=5, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", ylim=(min(floor) / 2, None))
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:,g}")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _measured(point: Point) -> list[str]:
    return [name for name in ORDER if name in point.seconds]


def _over_tokens(points: list[Point]) -> list[Grid]:
    def grid(title: str, cell: Callable[[Point, str], str]) -> Grid:
        rows = [[name, *(cell(point, name) for point in points)] for name in _measured(points[0])]
        return Grid(title, ["", *(f"T = {point.tokens:,}" for point in points)], rows)

    return [
        grid("Time, ms", lambda point, name: f"{1e3 * point.seconds[name]:,.2f}"),
        grid("Time in floors", lambda point, name: f"{point.seconds[name] / point.floor:.2f}"),
        grid("Speed in loops", lambda point, name: f"{point.seconds[LOOP] / point.seconds[name]:.2f}"),
    ]


def _limits(points: list[Point]) -> Grid:
    columns = ["T", "active experts", "read, GB/s", f"{points[0].limits.gemm_dtype} GEMM, GFLOP/s", "floor, ms", "by"]
    rows = []
    for point in points:
        rates = f"{point.limits.read / 1e9:.1f}", f"{point.limits.gemm / 1e9:.0f}"
        rows.append([f"{point.tokens:,}", str(point.active), *rates, f"{1e3 * point.floor:,.2f}", point.bound])
    return Grid("The machine's limits, and the floor", columns, rows)


def _line(line: Line) -> Grid:
    columns = [line.over]
    for name in line.seconds:
        columns += [f"{name}, ms", "us each"]
    rows = []
    for place, value in enumerate(line.values):
        row = [f"{value:,}"]
        for found in line.seconds.values():
            row += [f"{1e3 * found[place]:,.2f}", f"{1e6 * found[place] / value:,.1f}"]
        rows.append(row)
    return Grid(f"Cost over {line.over}", columns, rows)


def _overhead(overhead: dict[str, float]) -> Grid:
    rows = [[name, f"{1e6 * found:.1f}"] for name, found in overhead.items()]
    return Grid("Least time of a call on tiny input", ["", "us"], rows)


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
