"""The router as one PyPTO kernel. Imports pypto: import this module only where a kernel is wanted.

For each block of `RouterTile.rows` tokens:

    logits  = tokens @ router_weight^T              cube, fp32, a task for each part of the columns
    scores  = softmax(logits) or sigmoid(logits)    vector, fp32, with all that follows a task for `vector_rows` rows
    choice  = scores + bias, or DROPPED where a group is not kept
    ids     = top_k times: the maximum of choice, the lowest id that has it, which is DROPPED from then on
    weights = scores[ids], normalised, scaled

Maximum and lowest id are exact; pypto.topk promises no order among equals. pypto.sigmoid and pypto.concat fail on a
partly valid tile. The sigmoid of a logit below -88 is 0 here.

Columns and rows are loops, so that each task is a root function of its own: a root function with three tasks or more
that wait for nothing costs two more scheduling steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pypto

from .dsl import DTYPES, FP32, ND, least
from .router_tiling import RouterProblem, RouterTile
from .tiling import round_up

INFINITY = 1e38  # biased scores are clipped to it: the sum of two is finite still
DROPPED = -3e38  # below the sum of two of the lowest
NO_ID = 65536.0  # above every id; ids are fp32 until the end


@dataclass(frozen=True)
class Memory:
    """Rows of a matrix in global memory, from `start` on, of which `valid` exist."""

    matrix: Any
    start: Any
    valid: Any

    def tile(self, rows: int, columns: int, column: Any, width: int) -> Any:
        """All rows, and those of the columns from `column` on that a matrix of this width has."""
        valid = [self.valid, least(width - column, columns)]
        return pypto.view(self.matrix, [rows, columns], [self.start, column], valid_shape=valid)

    def write(self, tile: Any, column: Any = 0) -> None:
        pypto.assemble(tile, [self.start, column], self.matrix)


@dataclass(frozen=True)
class Rows:
    """Rows that a vector task works on: tiles of `count`, of which `valid` exist."""

    count: int
    valid: Any

    def full(self, columns: int, value: float) -> Any:
        return pypto.full([self.count, columns], value, FP32, valid_shape=[self.valid, columns])

    def columns(self, tile: Any, first: int, count: int) -> Any:
        return pypto.view(tile, [self.count, count], [0, first], valid_shape=[self.valid, count])

    def set_tile(self, columns: int) -> None:
        """For the operations that follow. A row of a tile is a multiple of 32 bytes."""
        pypto.set_vec_tile_shapes(self.count, round_up(columns, 8))


def build(
    problem: RouterProblem, tile: RouterTile, part: Literal["all", "logits", "choose"] = "all", **options: Any
) -> Callable[..., None]:
    """The kernel, compiled on its first call. Arguments (all contiguous):

    tokens [T, H], router_weight [E, H], bias fp32 [1, E] (without a bias: anything),
    logits fp32 [T, E] (not written unless wanted), topk_weights fp32 [T, K], topk_ids int32 [T, K].
    T may differ from call to call. "logits" is the first half alone, "choose" the second: it reads logits.
    """
    in_logits = problem.want_logits or part != "all"
    widen = problem.tokens != problem.weight

    @pypto.frontend.jit(
        pass_options={
            "cube_l1_reuse_setting": {-1: 1},
            "cube_nbuffer_setting": {-1: 1},
            "vec_nbuffer_setting": {-1: 1},
        },
        **options,
    )
    def topk_router(
        tokens: pypto.Tensor([pypto.DYNAMIC, ...], DTYPES[problem.tokens], format=ND),
        router_weight: pypto.Tensor([], DTYPES[problem.weight], format=ND),
        bias: pypto.Tensor([], FP32, format=ND),
        logits: pypto.Tensor([pypto.DYNAMIC, ...], FP32, format=ND),
        topk_weights: pypto.Tensor([pypto.DYNAMIC, ...], FP32, format=ND),
        topk_ids: pypto.Tensor([pypto.DYNAMIC, ...], pypto.DT_INT32, format=ND),
    ):
        for b in pypto.loop((tokens.shape[0] + (tile.rows - 1)) // tile.rows, name="BLOCK", idx_name="b"):
            first = b * tile.rows
            valid = (tokens.shape[0] - first).min(tile.rows)
            products = Memory(logits, first, valid)
            if not in_logits:
                products = Memory(pypto.tensor([tile.rows, problem.experts], FP32, "products"), 0, valid)
            if part != "choose":
                factors = Memory(tokens, first, valid)
                if widen:
                    factors = _widened(factors, problem, tile)
                _multiply(factors, router_weight, products, problem, tile)
            if part != "logits":
                for r in pypto.loop((valid + (tile.vector_rows - 1)) // tile.vector_rows, name="ROWS", idx_name="r"):
                    skip = r * tile.vector_rows
                    rows = Rows(tile.vector_rows, (valid - skip).min(tile.vector_rows))
                    mine = Memory(products.matrix, products.start + skip, rows.valid)
                    pypto.set_pass_options(sg_set_scope=1)  # one task, however many operations
                    weights, ids = _route(mine, bias, rows, problem)
                    pypto.assemble(weights, [first + skip, 0], topk_weights)
                    pypto.assemble(ids, [first + skip, 0], topk_ids)
                    pypto.set_pass_options(sg_set_scope=-1)

    return topk_router


def _widened(tokens: Memory, problem: RouterProblem, tile: RouterTile) -> Memory:
    """The tokens in fp32: written once, read for each part of the columns."""
    wide = Memory(pypto.tensor([tile.rows, problem.hidden], FP32, "wide"), 0, tokens.valid)
    for j in pypto.loop(-(-problem.hidden // tile.widen_columns), name="WIDEN", idx_name="j_widen"):
        column = j * tile.widen_columns
        narrow = tokens.tile(tile.rows, tile.widen_columns, column, problem.hidden)
        pypto.set_vec_tile_shapes(tile.rows, tile.widen_columns)
        wide.write(pypto.cast(narrow, FP32), column)
    return wide


def _multiply(tokens: Memory, router_weight: Any, products: Memory, problem: RouterProblem, tile: RouterTile) -> None:
    """tokens @ router_weight^T, whose rows are experts: columns of the products."""
    hidden, experts = problem.hidden, problem.experts
    for j in pypto.loop(-(-experts // tile.columns), name="COLUMNS", idx_name="j"):
        first = j * tile.columns
        x = tokens.tile(tile.rows, hidden, 0, hidden)
        weight = Memory(router_weight, first, least(experts - first, tile.columns))
        pypto.set_cube_tile_shapes([tile.rows, tile.rows], [tile.k0, tile.k1, tile.k1], [tile.columns, tile.columns])
        products.write(pypto.matmul(x, weight.tile(tile.columns, hidden, 0, hidden), FP32, b_trans=True), first)


def _route(logits: Memory, bias: Any, rows: Rows, problem: RouterProblem) -> tuple[Any, Any]:
    """Weights fp32 [rows, K] and ids int32 [rows, K] of logits [rows, E]."""
    experts, top_k = problem.experts, problem.top_k
    ids, places = _count_to(experts), _count_to(top_k)
    rows.set_tile(experts)
    scores, choice = _scores(logits.tile(rows.count, experts, 0, experts), bias, rows, problem)
    if problem.n_group > 1:
        choice = _of_kept_groups(choice, ids, rows, problem)
    topk_ids = rows.full(top_k, 0.0)
    for k in range(top_k):
        rows.set_tile(experts)
        best, choice = _take_best(choice, ids)
        rows.set_tile(top_k)
        topk_ids = pypto.where(pypto.eq(places, float(k)), best, topk_ids)
    topk_ids = pypto.cast(pypto.minimum(topk_ids, float(experts - 1)), pypto.DT_INT32)  # gather must stay inside
    return _weights(pypto.gather(scores, 1, topk_ids), problem), topk_ids


def _scores(logits: Any, bias: Any, rows: Rows, problem: RouterProblem) -> tuple[Any, Any]:
    """Scores, and what they are chosen by: NaN as the highest, as torch.sort has it, and nothing infinite."""
    if problem.scoring == "sigmoid":
        denominator = pypto.add(pypto.exp(pypto.mul(logits, -1.0)), 1.0)
        scores = pypto.div(rows.full(problem.experts, 1.0), denominator)
    else:
        exp = pypto.exp(pypto.sub(logits, pypto.amax(logits, -1, True)))
        scores = pypto.div(exp, pypto.sum(exp, -1, True))
    choice = pypto.add(scores, bias) if problem.has_bias else scores
    choice = pypto.where(pypto.eq(choice, choice), choice, INFINITY)
    return scores, _clip(choice) if problem.has_bias else choice


def _of_kept_groups(choice: Any, ids: Any, rows: Rows, problem: RouterProblem) -> Any:
    """choice, DROPPED outside the topk_group groups whose two best have the largest sums."""
    experts, groups = problem.experts, problem.n_group
    size = experts // groups
    group_of = pypto.floor(pypto.mul(pypto.add(ids, 0.5), 1.0 / size))
    group_ids = _count_to(groups)
    group_scores = _group_scores(choice, ids, group_ids, group_of, rows, size)
    rows.set_tile(experts)
    kept = rows.full(experts, DROPPED)
    for _ in range(problem.topk_group):
        rows.set_tile(groups)
        best, group_scores = _take_best(group_scores, group_ids)
        rows.set_tile(experts)
        kept = pypto.where(pypto.eq(group_of, best), choice, kept)
    return kept


def _group_scores(choice: Any, ids: Any, group_ids: Any, group_of: Any, rows: Rows, size: int) -> Any:
    """[rows, groups]. A group is its columns alone, where they are aligned, or all columns with the others DROPPED."""
    experts, groups, aligned = ids.shape[1], group_ids.shape[1], size % 8 == 0
    ids = _count_to(size) if aligned else ids
    rows.set_tile(groups)
    scores = rows.full(groups, 0.0)
    for g in range(groups):
        rows.set_tile(size if aligned else experts)
        if aligned:
            mine = rows.columns(choice, g * size, size)
        else:
            mine = pypto.where(pypto.eq(group_of, float(g)), choice, DROPPED)
        total = _sum_of_two_best(mine, ids)
        rows.set_tile(groups)
        scores = pypto.where(pypto.eq(group_ids, float(g)), total, scores)
    return _clip(scores)


def _sum_of_two_best(values: Any, ids: Any) -> Any:
    _, others = _take_best(values, ids)
    return pypto.add(pypto.amax(values, -1, True), pypto.amax(others, -1, True))


def _take_best(values: Any, ids: Any) -> tuple[Any, Any]:
    """The lowest of the ids [1, n] whose values [rows, n] are the maximum: [rows, 1]; and the values without it."""
    highest = pypto.amax(values, -1, True)
    best = pypto.amin(pypto.where(pypto.eq(values, highest), ids, NO_ID), -1, True)
    return best, pypto.where(pypto.eq(ids, best), DROPPED, values)


def _count_to(size: int) -> Any:
    """0, 1, ... as fp32 [1, size]. Views of a longer one do not pass the checks after the compiler's last pass."""
    pypto.set_vec_tile_shapes(round_up(size, 8))
    return pypto.reshape(pypto.arange(0.0, float(size), 1.0), [1, size])


def _weights(scores: Any, problem: RouterProblem) -> Any:
    if problem.renormalize and problem.top_k > 1:
        scores = pypto.div(scores, pypto.add(pypto.sum(scores, -1, True), 1e-20))
    return scores if problem.routed_scaling_factor == 1 else pypto.mul(scores, problem.routed_scaling_factor)


def _clip(values: Any) -> Any:
    return pypto.maximum(pypto.minimum(values, INFINITY), -INFINITY)
