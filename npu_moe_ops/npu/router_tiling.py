"""Tiling of the router's kernel as data, as tiling.py has it for the feed-forward."""

from dataclasses import dataclass

import torch

from .tiling import CUBE_CORES, L1, round_up

VECTOR_TILE = 16 * 1024  # bytes of scores that a vector task works on; operations of up to so many bytes take as long
WIDEN_TILE = 64 * 1024  # bytes of widened tokens of a task, beside half as many of narrow ones

# Rows and columns of a cube task, smallest first: more tasks are faster until they wait for each other.
SQUARES = ((32, 32), (32, 64), (64, 64), (128, 128))


@dataclass(frozen=True)
class RouterProblem:
    """What a kernel is built for, beside its tile. T may differ from call to call."""

    tokens: torch.dtype
    weight: torch.dtype  # that of the tokens; or float32, then the kernel widens the tokens
    has_bias: bool
    hidden: int
    experts: int
    top_k: int
    scoring: str = "softmax"
    n_group: int = 1  # 1: ungrouped
    topk_group: int = 1
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    want_logits: bool = True


@dataclass(frozen=True)
class RouterTile:
    """Which part of the logits [T, E] is a task. Sizes are elements."""

    rows: int  # of a cube task
    columns: int
    k0: int  # K of one step into L0; fixes the order of the sum over K
    k1: int  # K of one load into L1
    vector_rows: int
    widen_columns: int


def choose_tile(problem: RouterProblem, tokens: int) -> RouterTile:
    """The smallest of SQUARES whose tasks can run all at once, else the largest. k0 does not depend on T."""
    hidden, experts, size = problem.hidden, problem.experts, problem.weight.itemsize
    for rows, columns in SQUARES:
        if -(-tokens // rows) * -(-experts // columns) <= CUBE_CORES:
            break
    columns = min(columns, round_up(experts, 16))
    k0 = min(256 // size, round_up(hidden, 16))
    fits = L1 // 2 // ((rows + columns) * size)  # half of L1: the other half loads meanwhile
    loads = -(-hidden // (fits // k0 * k0))
    vector_rows, row = rows, 4 * max(experts, problem.top_k**2 // 2)  # ids keep top_k tiles of top_k columns alive
    while vector_rows > 1 and vector_rows * row > VECTOR_TILE:
        vector_rows //= 2
    return RouterTile(
        rows=rows,
        columns=columns,
        k0=k0,
        k1=round_up(-(-hidden // loads), k0),  # loads of equal size
        vector_rows=vector_rows,
        widen_columns=min(WIDEN_TILE // (4 * rows), round_up(hidden, 16)),
    )
