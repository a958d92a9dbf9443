"""Hypothesis strategies for MoE code: token distributions, routings and shapes. Needs `hypothesis`.

They shrink to few tokens and experts, and draw what breaks grouped kernels: experts without tokens at
the front, in the middle and at the end, one expert with everything, rows of no expert, repeated ids.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

# rtol and atol of the ops against exact arithmetic, for outputs of about 1 (two roundings of bf16 and fp16).
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-12}


@functools.cache
def trained_routings() -> Tensor:
    """Expert ids int64 [3 layers, T=512, K=4] over 16 experts that trained routers chose, for English text.

    Those of examples/llada2/train_tiny.py: sigmoid scores, two groups of four kept, trained with the load-balancing
    loss. How tokens share experts is not independent of one another, as it is in drawn routings.
    """
    layers = Path(__file__).with_name("trained_routings.txt").read_text().split()
    return torch.tensor([[int(digit, 16) for digit in ids] for ids in layers]).view(len(layers), -1, 4)


class LayerShape(NamedTuple):
    """Sizes of an MoE layer and of its input: T, H, I, E, K."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


def _balanced(draw: DrawFn, experts: int, rows: int) -> list[int]:
    return [rows // experts + (e < rows % experts) for e in range(experts)]


def _uneven(draw: DrawFn, experts: int, rows: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=experts - 1, max_size=experts - 1)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]


def _zipf(draw: DrawFn, experts: int, rows: int) -> list[int]:
    """Load falls as 1/rank, as that of trained routers does; which expert has which rank is drawn."""
    ranks = draw(st.permutations(range(1, experts + 1)))
    total = sum(1 / rank for rank in ranks)
    counts = [int(rows / rank / total) for rank in ranks]
    counts[ranks.index(1)] += rows - sum(counts)
    return counts


def _trained(draw: DrawFn, experts: int, rows: int) -> list[int]:
    """The loads of a layer of trained_routings, from the busiest expert down, stretched over the number of experts."""
    loads = torch.bincount(draw(st.sampled_from(list(trained_routings()))).flatten(), minlength=16).sort().values
    at = torch.linspace(0, 1, experts) * (len(loads) - 1)
    shares = torch.lerp(loads[at.floor().long()].float(), loads[at.ceil().long()].float(), at.frac())
    ends = (shares.cumsum(0) / shares.sum() * rows).round().int().tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [counts[e] for e in draw(st.permutations(range(experts)))]


def _all_to_one(draw: DrawFn, experts: int, rows: int) -> list[int]:
    counts = [0] * experts
    counts[draw(st.integers(0, experts - 1))] = rows
    return counts


def _empty(place: Callable[[int], range]) -> Callable[[DrawFn, int, int], list[int]]:
    def counts(draw: DrawFn, experts: int, rows: int) -> list[int]:
        empty = place(experts)
        busy = [e for e in range(experts) if e not in empty]
        spread = _uneven(draw, len(busy), rows) if busy else []
        return [spread[busy.index(e)] if e in busy else 0 for e in range(experts)]

    return counts


def _tail_rows(draw: DrawFn, experts: int, rows: int) -> list[int]:
    return _uneven(draw, experts, draw(st.integers(0, max(rows - 1, 0))))


_COUNTS: dict[str, Callable[[DrawFn, int, int], list[int]]] = {
    "balanced": _balanced,
    "uneven": _uneven,
    "zipf": _zipf,
    "trained": _trained,
    "all_to_one": _all_to_one,
    "empty_first": _empty(lambda experts: range((experts + 1) // 2)),
    "empty_middle": _empty(lambda experts: range(experts // 3, max(experts - max(experts // 3, 1), 1))),
    "empty_last": _empty(lambda experts: range(experts // 2, experts)),
    "all_empty": _empty(lambda experts: range(experts)),
    "tail_rows": _tail_rows,
}
DISTRIBUTIONS = tuple(_COUNTS)


@st.composite
def token_counts(draw: DrawFn, num_experts: int, rows: int, distribution: str | None = None) -> list[int]:
    """Rows per expert: E counts whose sum is at most rows; what is missing are tail rows, of no expert.

    distribution is one of DISTRIBUTIONS; None draws one. With one expert the empty ones are all empty.
    """
    if num_experts < 1 or rows < 0:
        raise ValueError(f"token_counts: num_experts must be >= 1 and rows >= 0, got {num_experts} and {rows}")
    if distribution is not None and distribution not in _COUNTS:
        raise ValueError(f"token_counts: distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    return _COUNTS[distribution or draw(st.sampled_from(DISTRIBUTIONS))](draw, num_experts, rows)


def expert_cumsums(num_experts: int, rows: int, distribution: str | None = None) -> SearchStrategy[Tensor]:
    """The same as offsets: int32 [E+1], what grouped_swiglu_ffn takes."""
    return token_counts(num_experts, rows, distribution).map(
        lambda counts: torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    )


@st.composite
def routings(draw: DrawFn, tokens: int, num_experts: int, top_k: int, *, sentinels: bool = True) -> Tensor:
    """Expert ids int64 [T, K] in one of DISTRIBUTIONS, shuffled over the slots.

    With sentinels, tail rows become ids of no expert, -1 or E; without, ids lie in 0..E-1. A token may
    draw the same expert twice.
    """
    slots = tokens * top_k
    kinds = DISTRIBUTIONS if sentinels else ("balanced", "uneven", "zipf", "trained", "all_to_one")
    counts = draw(token_counts(num_experts, slots, draw(st.sampled_from(kinds))))
    ids = [e for e, count in enumerate(counts) for _ in range(count)]
    sentinel = st.sampled_from((-1, num_experts))
    ids += [draw(sentinel) for _ in range(slots - len(ids))]
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1))))
    return torch.tensor(ids, dtype=torch.int64)[order].view(tokens, top_k)


@st.composite
def layer_shapes(
    draw: DrawFn,
    max_tokens: int = 24,
    max_hidden_size: int = 48,
    max_intermediate_size: int = 40,
    max_num_experts: int = 9,
) -> LayerShape:
    """Sizes from 0 tokens and 1 of everything else up to the given ones; top_k up to num_experts."""
    num_experts = draw(st.integers(1, max_num_experts))
    return LayerShape(
        tokens=draw(st.integers(0, max_tokens)),
        hidden_size=draw(st.integers(1, max_hidden_size)),
        intermediate_size=draw(st.integers(1, max_intermediate_size)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
    )
