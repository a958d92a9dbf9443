"""What the bench measures, and its numbers as plain data.

The peers take turns within each round, and the limits are measured in each round too: a machine that is slow
for a moment is slow for all. Each figure is the median over the rounds.
"""

import os
import platform
import timeit
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..functional import grouped_swiglu_ffn
from . import kt
from .clock import rotated, seconds, settled
from .peers import KT, Layer, Sizes, batch, layouts, peers, weights

Layouts = dict[str, tuple[Tensor, Tensor]]
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]

READ_BYTES = 1 << 29  # far beyond any cache
SQUARE = 2048
TINY = (4, 16, 16, 2)  # rows, H, I, E of the call whose overhead is measured
ROWS_OF_EXPERTS = 8  # experts that share the rows of the table over rows
FEW_ROWS, MOST_ROWS = 64, 1024  # of each


@dataclass(frozen=True)
class Limits:
    """What this machine can do at best, at the time of measuring."""

    read: float  # bytes/s
    gemm: float  # FLOP/s
    gemm_dtype: str

    def floor(self, sizes: Sizes, active: int, rows: int) -> tuple[float, str]:
        """Seconds below which nothing can be, and what sets them: reading the active experts, or multiplying."""
        reading, multiplying = active * sizes.expert_bytes / self.read, rows * sizes.row_flops / self.gemm
        return (reading, "read") if reading >= multiplying else (multiplying, "GEMM")


@dataclass(frozen=True)
class Point:
    """One number of tokens."""

    tokens: int
    active: int  # experts with rows, median
    limits: Limits
    floor: float
    bound: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class Line:
    """Cost over something that it should be proportional to."""

    over: str
    values: list[int]
    seconds: dict[str, list[float]]


@dataclass(frozen=True)
class Result:
    machine: dict[str, Any]
    sizes: Sizes
    rounds: int
    points: list[Point]
    lines: list[Line]
    overhead: dict[str, float]  # seconds
    left_out: dict[str, str] = field(default_factory=dict)


def measure(sizes: Sizes, tokens: tuple[int, ...], rounds: int, track: Track) -> Result:
    """All of it; `track` shows how far it is: (steps, what, how many) -> the steps."""
    left_out: dict[str, str] = {}
    found_kt: dict[int, float] = {}
    for _ in track(range(1), KT, 1):
        try:
            found_kt = kt.times(sizes, tokens, rounds)
        except kt.LeftOut as error:
            left_out[KT] = str(error)
    with torch.inference_mode():
        w13, w2 = weights(sizes)
        ours = layouts(w13, w2)
        layers, missing = peers(sizes, w13, w2, ours)
        meter = Meter()
        points = []
        for count in tokens:
            steps = track(range(rounds + 1), f"{count} tokens", rounds + 1)
            points.append(_point(sizes, count, layers, meter, steps, found_kt.get(count)))
        lines = [_over_experts(sizes, ours, rounds, track), _over_rows(sizes, ours, rounds, track)]
        overhead = _overhead()
    return Result(machine(), sizes, rounds, points, lines, overhead, left_out | missing)


class Meter:
    """Measures the limits. The rate of products is that of bf16 or fp32, whichever is faster here."""

    def __init__(self) -> None:
        self.memory = torch.ones(READ_BYTES // 4)
        square = torch.randn(SQUARE, SQUARE)
        rates = {}
        for dtype in (torch.float32, torch.bfloat16):
            matrix = square.to(dtype)
            seconds(torch.mm, matrix, matrix)
            rates[seconds(torch.mm, matrix, matrix)] = matrix
        self.matrix = rates[min(rates)]

    def read(self) -> float:
        return READ_BYTES / seconds(self.memory.amax)

    def gemm(self) -> float:
        return 2 * SQUARE**3 / seconds(torch.mm, self.matrix, self.matrix)

    @property
    def gemm_dtype(self) -> str:
        return str(self.matrix.dtype).removeprefix("torch.")


def _point(
    sizes: Sizes,
    tokens: int,
    layers: dict[str, Layer],
    meter: Meter,
    steps: Iterable[int],
    kt_seconds: float | None,
) -> Point:
    found: dict[str, list[float]] = {name: [] for name in layers}
    reads, gemms, active = [], [], []
    for turn in steps:
        args = batch(sizes, tokens, turn)
        reads.append(meter.read())
        gemms.append(meter.gemm())
        active.append(args[1].unique().numel())
        for name in rotated(layers, turn):
            found[name].append(seconds(layers[name], *args))
    medians = {name: settled(times) for name, times in found.items()}
    if kt_seconds is not None:
        medians[KT] = kt_seconds
    limits = Limits(settled(reads), settled(gemms), meter.gemm_dtype)
    typical = int(settled(active))
    return Point(tokens, typical, limits, *limits.floor(sizes, typical, tokens * sizes.top_k), medians)


def _over_experts(sizes: Sizes, ours: Layouts, rounds: int, track: Track) -> Line:
    """One row each of 1, 2, 4, ... experts, spread over all."""
    numbers = [2**n for n in range(sizes.experts.bit_length()) if 2**n <= sizes.experts]
    return _line("active experts, a row each", numbers, numbers, [1] * len(numbers), sizes, ours, rounds, track)


def _over_rows(sizes: Sizes, ours: Layouts, rounds: int, track: Track) -> Line:
    """More and more rows for the same few experts."""
    experts = min(ROWS_OF_EXPERTS, sizes.experts)
    rows = [FEW_ROWS * 2**n for n in range((MOST_ROWS // FEW_ROWS).bit_length())]
    values = [experts * count for count in rows]
    return _line(f"rows of {experts} experts", values, [experts] * len(rows), rows, sizes, ours, rounds, track)


def _line(
    over: str,
    values: list[int],
    active: list[int],
    rows: list[int],
    sizes: Sizes,
    ours: Layouts,
    rounds: int,
    track: Track,
) -> Line:
    found: dict[str, list[list[float]]] = {name: [[] for _ in active] for name in ours}
    for turn in track(range(rounds + 1), f"over {over}", rounds + 1):
        for place, (experts, count) in enumerate(zip(active, rows, strict=True)):
            counts = torch.zeros(sizes.experts, dtype=torch.int32)
            counts[torch.randperm(sizes.experts)[:experts]] = count
            cumsum = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
            x = torch.randn(experts * count, sizes.hidden).bfloat16()
            for name in rotated(ours, turn):
                found[name][place].append(seconds(grouped_swiglu_ffn, x, *ours[name], cumsum))
    medians = {name: [settled(times) for times in places] for name, places in found.items()}
    return Line(over, values, medians)


def _overhead() -> dict[str, float]:
    """Seconds of a call on tiny input, least of many, beside one torch.mm: what calling costs, not computing."""
    rows, h, i, e = TINY
    x, w13, w2 = (torch.randn(*size) for size in ((rows, h), (e, h, 2 * i), (e, i, h)))
    cumsum = torch.linspace(0, rows, e + 1).int()
    a, b = torch.randn(4, 16), torch.randn(16, 16)
    op, mm = torch.ops.npu_moe.grouped_swiglu_ffn, torch.mm
    calls: dict[str, Callable[[], Tensor]] = {
        "torch.mm": lambda: mm(a, b),
        "torch.ops.npu_moe.grouped_swiglu_ffn": lambda: op(x, w13, w2, cumsum),
    }
    number = 1000
    found = {name: [timeit.timeit(call, number=number) / number for _ in range(20)] for name, call in calls.items()}
    return {name: min(times) for name, times in found.items()}


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel": native.kernel().isa or f"none: {native.kernel().reason}",
    }
