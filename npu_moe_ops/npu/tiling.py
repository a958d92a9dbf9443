"""Tiling as data: which rows, columns and K a task of the NPU kernel takes, chosen from what the host knows.

A *unit* is up to `rows` token rows of one expert. Its FFN is three kinds of task: gate/up columns (cube), activation
(vector), down columns (cube). Each matmul is cut into parts of `width` columns, one cube task each; a part loads
weight tiles of [kb, n] into L1 and [k0, n] of them into L0. Sizes are elements, byte limits are those of one core
of an Ascend 910B (A2) or A3, from pypto's documentation of set_cube_tile_shapes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

CUBE_CORES = 24
L0A, L0B, L0C, L1, UB = (kib * 1024 for kib in (64, 64, 128, 512, 192))
L1_TOKENS = 128 * 1024  # of L1: the token tile; weights get the rest
VECTOR_TILE = UB // 3  # fp32 bytes of one tile: gate, up and a temporary fill UB
INNER_AXIS = 65535  # longest row that the matmul loads
STITCH = 128  # root functions of one device task; the simulator crashes beyond
PRESETS = ("auto", "buffered", "single", "llada2_original")

# pypto 0.2.0's cost model of a load from global memory, and of the hop from a task to the next. They only rank
# numbers of parts against each other.
LOAD, LOAD_BYTES, HOP = 1400, 95.7, 6000


@dataclass(frozen=True)
class Problem:
    """What the host knows at a call: E, H, I, N, dtype, and whether weights lie as [E, 2I, H] and [E, H, I]."""

    experts: int
    hidden: int
    intermediate: int
    rows: int
    dtype: torch.dtype = torch.bfloat16
    w13_transposed: bool = False
    w2_transposed: bool = False

    @property
    def busy(self) -> int:
        """The most experts that can own a row."""
        return max(1, min(self.experts, self.rows))


@dataclass(frozen=True)
class MatmulTile:
    width: int  # columns of one task
    n: int  # columns of one weight tile
    k0: int  # K of one step into L0; fixes the order of the sum over K
    ka: int  # K of the token tile in L1
    kb: int  # K of the weight tile in L1


@dataclass(frozen=True)
class TilePlan:
    rows: int  # token rows of a unit
    unroll: tuple[int, ...]  # units that one pass takes together, largest first
    up: MatmulTile
    down: MatmulTile
    vector_rows: int
    vector_columns: int
    one_graph: bool  # all tasks of a pass in one root function; else one for each part
    l1_reuse: int = 1
    cube_nbuffer: int = 1
    vec_nbuffer: int = 1
    stitch: int = STITCH
    split_k: bool = False  # up: sum over K on several cores
    cast_on_vector: bool = False  # down: fp32 to global memory, cast by a vector task


def choose(problem: Problem, preset: str = "auto", environ: Mapping[str, str] = os.environ) -> TilePlan:
    """The plan for a call: a preset, with the original's environment variables on top, checked against the chip.

    Raises ValueError for an unknown preset, a variable that is no positive number, or tiles that do not fit.
    """
    if preset not in PRESETS:
        raise ValueError(f"npu plan: preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    return _chosen(problem, preset, tuple(environ.get(name) for name in _VARIABLES))


@lru_cache(maxsize=4096)  # making one takes longer than launching a kernel
def _chosen(problem: Problem, preset: str, settings: tuple[str | None, ...]) -> TilePlan:
    number = {name: _positive(name, text) for name, text in zip(_VARIABLES, settings, strict=True) if text}
    plan = _overridden(_MAKERS[preset](problem), number)
    check(plan, problem)
    return plan


def check(plan: TilePlan, problem: Problem) -> None:
    """Refuse what does not fit the chip, before the compiler is asked: it lets an overflow of L1 pass."""
    size = problem.dtype.itemsize
    _at_most("vector_rows * vector_columns", plan.vector_rows * plan.vector_columns * 4, VECTOR_TILE, "a third of UB")
    for name, tile in (("up", plan.up), ("down", plan.down)):
        for field in ("n", "k0"):
            value = getattr(tile, field)
            if value < 16 or value % 16:
                raise ValueError(f"npu plan: {name}.{field} must be a multiple of 16, got {value}")
        if tile.kb % tile.k0 or tile.ka % tile.kb:
            raise ValueError(f"npu plan: {name}.ka must be a multiple of kb, and kb of k0, got {tile}")
        m = round_up(plan.rows * max(plan.unroll), 16)
        ka = token_k(tile, m, size)
        _at_most(f"{name}: rows * k0", m * tile.k0 * size, L0A, "L0A")
        _at_most(f"{name}: n * k0", tile.n * tile.k0 * size, L0B, "L0B")
        _at_most(f"{name}: rows * n", m * tile.n * 4, L0C, "L0C")
        _at_most(f"{name}: rows * ka + n * kb", (m * ka + tile.n * tile.kb) * size, L1, "L1")


def token_k(tile: MatmulTile, rows: int, itemsize: int) -> int:
    """K of the token tile for so many rows: `ka`, or less where that would leave the weights too little of L1."""
    fits = L1_TOKENS // (round_up(rows, 16) * tile.kb * itemsize)
    return tile.kb * max(1, min(tile.ka // tile.kb, fits))


def parts(columns: int, tile: MatmulTile) -> int:
    return -(-columns // tile.width)


def _auto(problem: Problem, weight_tiles: int = 1) -> TilePlan:
    """Rows by the mean load of a busy expert, parts so that the units' tasks fill the cube cores."""
    mean = problem.rows / problem.busy
    rows, unroll = (32, (1,)) if mean <= 4 else (32, (2, 1)) if mean < 96 else (64, (2, 1))
    return _best_parts(problem, rows, unroll, weight_tiles)


def _buffered(problem: Problem) -> TilePlan:
    """As auto, with weight tiles so small that L1 holds two: one loads while the other is multiplied."""
    return _auto(problem, weight_tiles=2)


def _single(problem: Problem) -> TilePlan:
    """One variant of each task: the fewest kernels to compile."""
    return _best_parts(problem, 64, (1,), weight_tiles=1)


def _llada2_original(problem: Problem) -> TilePlan:
    """The published settings of pypto-gym's llada2_moe_grouped_gemm: an expert's rows in powers of two, split K."""
    k0 = 128 * 2 // problem.dtype.itemsize
    return TilePlan(
        rows=1,
        unroll=(64, 32, 16, 8, 4, 2, 1),
        up=MatmulTile(2 * problem.intermediate, 256, k0, 2 * k0, 2 * k0),
        down=MatmulTile(problem.hidden, 256, k0, 2 * k0, 2 * k0),
        vector_rows=max(1, min(13, VECTOR_TILE // (4 * problem.intermediate))),
        vector_columns=problem.intermediate,
        one_graph=True,
        l1_reuse=2,
        cube_nbuffer=2,
        vec_nbuffer=2,
        stitch=64,
        split_k=True,
        cast_on_vector=True,
    )


_MAKERS = {"auto": _auto, "buffered": _buffered, "single": _single, "llada2_original": _llada2_original}


def _best_parts(problem: Problem, rows: int, unroll: tuple[int, ...], weight_tiles: int) -> TilePlan:
    plans = [_with_parts(problem, rows, unroll, count, weight_tiles) for count in range(1, CUBE_CORES // 2 + 1)]
    return min(plans, key=lambda plan: _estimate(plan, problem))


def _with_parts(problem: Problem, rows: int, unroll: tuple[int, ...], count: int, weight_tiles: int) -> TilePlan:
    m = rows * max(unroll)
    up = _tile(problem.hidden, 2 * problem.intermediate, m, count, weight_tiles, problem.dtype.itemsize)
    down = _tile(problem.intermediate, problem.hidden, m, count, weight_tiles, problem.dtype.itemsize)
    columns = min(round_up(problem.intermediate, 16), 512)
    return TilePlan(
        rows=rows,
        unroll=unroll,
        up=up,
        down=down,
        vector_rows=min(rows, VECTOR_TILE // (4 * columns)),
        vector_columns=columns,
        one_graph=count == 1,
        cube_nbuffer=max(-(-tile.width // tile.n) for tile in (up, down)),  # all tiles of a part in one task
    )


def _tile(k: int, columns: int, rows: int, count: int, weight_tiles: int, itemsize: int) -> MatmulTile:
    k0 = min(128 // itemsize, round_up(k, 16))  # whatever the number of rows: the sum over K keeps its order
    width = round_up(-(-columns // count), 16)
    n = min(width, 384, L0C // (4 * round_up(rows, 16)), L0B // (k0 * itemsize)) // 16 * 16
    n = round_up(-(-width // -(-width // n)), 16)
    steps = -(-k // k0)
    fits = min(
        (L1 - L1_TOKENS) // weight_tiles // (n * k0 * itemsize), L1_TOKENS // (round_up(rows, 16) * k0 * itemsize)
    )
    loads = -(-steps // max(1, min(fits, 1024 // k0)))
    kb = k0 * -(-steps // loads)  # of equal size
    return MatmulTile(width, n, k0, kb * loads, kb)


def _estimate(plan: TilePlan, problem: Problem) -> float:
    """Cycles, roughly: waves of cube tasks over the cores, each a hop and its loads."""
    m, size = plan.rows * max(plan.unroll), problem.dtype.itemsize
    units = problem.busy * -(-problem.rows // (problem.busy * m))
    total = 0.0
    for k, columns, tile in (
        (problem.hidden, 2 * problem.intermediate, plan.up),
        (problem.intermediate, problem.hidden, plan.down),
    ):
        tiles = -(-tile.width // tile.n)
        token_loads = -(-k // token_k(tile, m, size))
        loads = tiles * -(-k // tile.kb) + (token_loads if token_loads == 1 else token_loads * tiles)
        task = HOP + LOAD * loads + k * (tile.width + plan.rows) * size / LOAD_BYTES
        total += -(-units * parts(columns, tile) // CUBE_CORES) * task
    return total


def _overridden(plan: TilePlan, number: Mapping[str, int]) -> TilePlan:
    """The original's variables: tiles to merge into a task, both matmuls' tiles (K of L0; L1 gets 2 K), vector rows."""
    if "PYPTO_CUBE_NBUFFER" in number:
        plan = replace(plan, cube_nbuffer=number["PYPTO_CUBE_NBUFFER"])
    if "PYPTO_VEC_NBUFFER" in number:
        plan = replace(plan, vec_nbuffer=number["PYPTO_VEC_NBUFFER"])
    if "PYPTO_VEC_FIRST" in number:
        plan = replace(plan, vector_rows=number["PYPTO_VEC_FIRST"])
    plan = replace(plan, up=_tile_overridden(plan.up, "PYPTO_MM1", number))
    plan = replace(plan, down=_tile_overridden(plan.down, "PYPTO_MM2", number))
    rows = [number[name] for name in ("PYPTO_MM1_M", "PYPTO_MM2_M") if name in number]
    if rows:  # of a pass: the larger unrolls go
        kept = tuple(u for u in plan.unroll if u * plan.rows <= max(rows)) or plan.unroll[-1:]
        plan = replace(plan, unroll=kept)
    return plan


_VARIABLES = (
    "PYPTO_CUBE_NBUFFER",
    "PYPTO_VEC_NBUFFER",
    "PYPTO_VEC_FIRST",
    *(f"PYPTO_{matmul}_{axis}" for matmul in ("MM1", "MM2") for axis in "MKN"),
)


def _tile_overridden(tile: MatmulTile, prefix: str, number: Mapping[str, int]) -> MatmulTile:
    if (k := number.get(f"{prefix}_K")) is not None:
        tile = replace(tile, k0=k, ka=2 * k, kb=2 * k)
    if (n := number.get(f"{prefix}_N")) is not None:
        tile = replace(tile, n=n)
    return tile


def _positive(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise ValueError(f"npu plan: environment variable {name} must be a positive integer, got {text!r}")
    return int(text)


def _at_most(what: str, need: int, limit: int, where: str) -> None:
    if need > limit:
        raise ValueError(f"npu plan: {what} must fit {where} of {limit} bytes, got {need}; use smaller tiles")


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step
