"""The grouped SwiGLU FFN as one PyPTO kernel. Imports pypto: import this module only where a kernel is wanted.

For each expert e, for each unit of its rows (`TilePlan.rows` times an unroll factor):

    gate_up = x @ w13[e]     cube, fp32, a task for each part of the columns
    h       = swiglu(gate_up)    vector, fp32, rounded to the dtype
    out     = h @ w2[e]      cube, accumulates in fp32, a task for each part of the columns

valid_shape keeps loads and stores inside the rows of the expert and inside H and I; what a tile has beyond is never
stored. With `one_graph` the three are one root function, else each part is one: a root function with three tasks or
more that wait for nothing costs two more scheduling steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pypto

from .dsl import DTYPES, FP32, ND, least
from .tiling import MatmulTile, Problem, TilePlan, parts, token_k


@dataclass(frozen=True)
class SwiGLU:
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True)
class Unit:
    """Rows of one expert that one pass takes: a tile of `rows`, of which `valid` exist, from row `start` on."""

    expert: Any
    start: Any
    rows: int
    valid: Any


def build(
    problem: Problem, plan: TilePlan, swiglu: SwiGLU, order_bounds: bool = False, **options: Any
) -> Callable[..., None]:
    """The kernel, compiled on its first call. Arguments (all contiguous; weights 2-D, as problem says they lie):

    x [N, H], w13 [E*H, 2I] or [E*2I, H], w2 [E*I, H] or [E*H, I], offsets int32 [E+1], out [N, H].
    N may differ from call to call.
    """
    dtype, most = DTYPES[problem.dtype], plan.rows * max(plan.unroll)

    @pypto.frontend.jit(
        pass_options={
            "cube_l1_reuse_setting": {-1: plan.l1_reuse},
            "cube_nbuffer_setting": {-1: plan.cube_nbuffer},
            "vec_nbuffer_setting": {-1: plan.vec_nbuffer},
        },
        **options,
    )
    def grouped_swiglu_ffn(
        x: pypto.Tensor([pypto.DYNAMIC, ...], dtype, format=ND),
        w13: pypto.Tensor([], dtype, format=ND),
        w2: pypto.Tensor([], dtype, format=ND),
        offsets: pypto.Tensor([], pypto.DT_INT32, format=ND),
        out: pypto.Tensor([pypto.DYNAMIC, ...], dtype, format=ND),
    ):
        pypto.experimental.set_operation_options(combine_axis=True)
        if order_bounds:
            for _ in pypto.loop(1, name="ORDER", idx_name="j_order"):
                _write_nothing(offsets, out, min(16, problem.hidden), dtype)
        for e in pypto.loop(0, problem.experts, 1, name="EXPERT", idx_name="e"):
            first = offsets[e]
            count = offsets[e + 1] - first
            units = (count + (plan.rows - 1)) // plan.rows
            for b, factor in pypto.loop_unroll(0, units, 1, name="UNIT", idx_name="b", unroll_list=list(plan.unroll)):
                row = b * plan.rows
                rows = factor * plan.rows
                unit = Unit(e, first + row, rows, _valid(count - row, rows, plan))
                if plan.one_graph:
                    gate_up = _up(x, w13, unit, 0, problem, plan)
                    _down(_activate(gate_up, unit, problem, plan, swiglu), w2, unit, 0, out, problem, plan)
                else:
                    gate_up = pypto.tensor([most, _padded(2 * problem.intermediate, plan.up)], FP32, "gate_up")
                    for j in pypto.loop(parts(2 * problem.intermediate, plan.up), name="UP", idx_name="j_up"):
                        pypto.assemble(_up(x, w13, unit, j, problem, plan), [0, j * plan.up.width], gate_up)
                    h = pypto.tensor([most, problem.intermediate], dtype, "h")
                    for _ in pypto.loop(1, name="ACTIVATE", idx_name="j_activate"):
                        pypto.assemble(_activate(gate_up, unit, problem, plan, swiglu), [0, 0], h)
                    for j in pypto.loop(parts(problem.hidden, plan.down), name="DOWN", idx_name="j_down"):
                        mine = pypto.view(
                            h, [rows, problem.intermediate], [0, 0], valid_shape=[unit.valid, problem.intermediate]
                        )
                        _down(mine, w2, unit, j, out, problem, plan)

    return grouped_swiglu_ffn


def _write_nothing(offsets: Any, out: Any, columns: int, dtype: Any) -> None:
    """A task whose extent is offsets[0], so that generated code waits for the stream before the first loop bound.

    Bounds are read by a scheduler that graph capture starts without waiting for the op that computes the offsets;
    pypto before 9.1 waits only where a task's own extents are read.
    """
    pypto.set_vec_tile_shapes(16, 16)
    nothing = pypto.full([1, columns], 0.0, dtype, valid_shape=[offsets[0].min(0), columns])
    pypto.assemble(nothing, [0, 0], out)


def _up(x: Any, w13: Any, unit: Unit, part: Any, problem: Problem, plan: TilePlan) -> Any:
    """One part of the gate and up columns: fp32 [rows, width]."""
    hidden, columns = problem.hidden, 2 * problem.intermediate
    tokens = pypto.view(x, [unit.rows, hidden], [unit.start, 0], valid_shape=[unit.valid, hidden])
    _set_cube_tile(plan.up, unit.rows, problem, split_k=plan.split_k)
    weight = _weight(w13, unit.expert, hidden, columns, part, plan.up, problem.w13_transposed)
    return pypto.matmul(tokens, weight, FP32, b_trans=problem.w13_transposed)


def _down(h: Any, w2: Any, unit: Unit, part: Any, out: Any, problem: Problem, plan: TilePlan) -> None:
    """One part of the output columns, into out."""
    dtype = DTYPES[problem.dtype]
    _set_cube_tile(plan.down, unit.rows, problem)
    weight = _weight(w2, unit.expert, problem.intermediate, problem.hidden, part, plan.down, problem.w2_transposed)
    result = pypto.matmul(h, weight, FP32 if plan.cast_on_vector else dtype, b_trans=problem.w2_transposed)
    if plan.cast_on_vector and dtype != FP32:
        pypto.set_vec_tile_shapes(min(unit.rows, plan.vector_rows), problem.hidden)
        result = pypto.cast(result, dtype)
    pypto.assemble(result, [unit.start, part * plan.down.width], out)


def _activate(gate_up: Any, unit: Unit, problem: Problem, plan: TilePlan, swiglu: SwiGLU) -> Any:
    """gate * sigmoid(alpha gate) * (up + beta) in fp32, rounded. pypto.sigmoid fails on a partly valid tile."""
    size = problem.intermediate
    pypto.set_vec_tile_shapes(min(unit.rows, plan.vector_rows), plan.vector_columns)
    gate = pypto.view(gate_up, [unit.rows, size], [0, 0], valid_shape=[unit.valid, size])
    up = pypto.view(gate_up, [unit.rows, size], [0, size], valid_shape=[unit.valid, size])
    if swiglu.limit is not None:
        gate = pypto.minimum(gate, swiglu.limit)
        up = pypto.maximum(pypto.minimum(up, swiglu.limit), -swiglu.limit)
    if swiglu.beta:
        up = pypto.add(up, swiglu.beta)
    denominator = pypto.add(pypto.exp(pypto.mul(gate, -swiglu.alpha)), 1.0)
    h = pypto.mul(pypto.div(gate, denominator), up)
    dtype = DTYPES[problem.dtype]
    return h if dtype == FP32 else pypto.cast(h, dtype)


def _weight(weight: Any, expert: Any, k: int, columns: int, part: Any, tile: MatmulTile, transposed: bool) -> Any:
    """Columns part * width and on of one expert's [k, columns], as they lie."""
    first, width = part * tile.width, min(tile.width, columns)
    valid = width if columns % tile.width == 0 or width == columns else least(columns - first, width)
    if transposed:
        return pypto.view(weight, [width, k], [expert * columns + first, 0], valid_shape=[valid, k])
    return pypto.view(weight, [k, width], [expert * k, first], valid_shape=[k, valid])


def _set_cube_tile(tile: MatmulTile, rows: int, problem: Problem, split_k: bool = False) -> None:
    ka = token_k(tile, rows, problem.dtype.itemsize)
    pypto.set_cube_tile_shapes([rows, rows], [tile.k0, ka, tile.kb], [tile.n, tile.n], split_k)


def _padded(columns: int, tile: MatmulTile) -> int:
    return parts(columns, tile) * min(tile.width, columns)


def _valid(left: Any, rows: int, plan: TilePlan) -> Any:
    """Rows of a tile that exist. With units of one row every tile is full, and the compiler is told so."""
    return rows if plan.rows == 1 else least(left, rows)
