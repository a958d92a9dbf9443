"""The ops on a CPU: the native kernels, and torch for what they leave: fp64; all, where they cannot be built.

The FFN in torch: per expert two products, the activation for many experts at once.

fp32 and fp64 multiply as they are. bf16 and fp16 weights are widened to fp32, expert by expert, which
keeps gate and up in fp32 and is fast: torch's own fp16 product is up to 100 times slower for [H, 2*I]
weights, and its bf16 product, where the CPU has no bf16 instructions, five times. Large bf16 experts
are the exception: for a few rows, or where the hardware multiplies bf16, the direct product reads a
third of the memory. It rounds gate and up to bf16 before the activation.
Measured on 2 Skylake cores, 64 experts of [2048, 1024], ms direct / widened: 1 row 30 / 57, 2 rows
43 / 70, 4 rows 106 / 70, 64 rows 537 / 156.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import checks, native, routing
from .reference import accumulate_dtype, expert_weights, swiglu

LARGE_EXPERT = 2**20  # elements of w13[e] from which reading them is what takes the time
FEW_ROWS = 3  # up to here an emulated bf16 product is no slower than widening
BLOCK_ROWS = 1024  # rows whose gate and up are kept at once


def has_bf16_dot() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def grouped_swiglu_ffn(out: Tensor, *args: Any, **options: Any) -> None:
    if not native.grouped_swiglu_ffn_out(out, *args, **options):
        in_torch(out, *args, **options)


def in_torch(
    out: Tensor,
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
) -> None:
    c = checks.offsets(expert_cumsum, sorted_tokens.shape[0])
    w13, w2 = (expert_weights(w, len(c) - 1) for w in (w13, w2))
    dtype, acc = out.dtype, accumulate_dtype(out.dtype)
    busy = [(e, start, end) for e, (start, end) in enumerate(pairwise(c)) if start < end]
    direct_rows = 0
    if dtype == torch.bfloat16 and w13[0].numel() >= LARGE_EXPERT:
        direct_rows = len(out) if has_bf16_dot() else FEW_ROWS
    # One expert's widened weights; a fresh block for each would cost more in page faults than the product.
    widens = dtype != acc and any(end - start > direct_rows for _, start, end in busy)
    scratch = out.new_empty(max(w13[0].numel(), w2[0].numel()) if widens else 0, dtype=acc)
    for experts in _blocks(busy):
        first, last = experts[0][1], experts[-1][2]
        gate_up = out.new_empty((last - first, w13.shape[-1]), dtype=acc)
        for e, start, end in experts:
            x, weight = sorted_tokens[start:end], w13[e]
            if end - start > direct_rows:
                x, weight = x.to(acc), _widen(weight, scratch)
            _multiply(x, weight, gate_up[start - first : end - first])
        gate, up = gate_up.chunk(2, dim=-1)
        h = swiglu(gate, up, swiglu_limit, swiglu_alpha, swiglu_beta).to(dtype)
        for e, start, end in experts:
            x, weight = h[start - first : end - first], w2[e]
            if end - start > direct_rows:
                x, weight = x.to(acc), _widen(weight, scratch)
            _multiply(x, weight, out[start:end])
    out[c[-1] :] = 0


def topk_router(
    result: tuple[Tensor, Tensor, Tensor],
    hidden_states: Tensor,
    router_weight: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    **options: Any,
) -> None:
    bias = None if correction_bias is None else correction_bias.float().contiguous()
    groups = options["n_group"] or 1, options["topk_group"] or 1
    rest = options["scoring"] == "softmax", options["renormalize"], options["routed_scaling_factor"]
    if not native.run("topk_router", hidden_states, router_weight, bias, *groups, *rest, *result):
        routing.topk_router(result, hidden_states, router_weight, correction_bias, top_k, **options)


def permute(result: tuple[Tensor, Tensor, Tensor], hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    if not native.run("permute", hidden_states, topk_ids.contiguous(), num_experts, *result):
        routing.permute(result, hidden_states, topk_ids, num_experts)


def unpermute(out: Tensor, expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> None:
    if not native.run("unpermute", expert_out, row_of.contiguous(), topk_weights.float().contiguous(), out):
        routing.unpermute(out, expert_out, row_of, topk_weights)


def _multiply(x: Tensor, weight: Tensor, place: Tensor) -> None:
    if x.dtype == place.dtype:
        torch.mm(x, weight, out=place)
    else:
        place.copy_(x @ weight)


def _widen(weight: Tensor, scratch: Tensor) -> Tensor:
    """weight in the dtype of scratch, in its own memory order; as it is where it has that dtype."""
    if weight.dtype == scratch.dtype:
        return weight
    rows, cols = weight.shape
    place = scratch[: weight.numel()]
    return (place.view(cols, rows).t() if weight.stride(0) == 1 else place.view(rows, cols)).copy_(weight)


def _blocks(busy: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Consecutive experts, as (expert, start, end), in blocks of about BLOCK_ROWS rows."""
    block: list[tuple[int, int, int]] = []
    for expert in busy:
        if block and expert[2] - block[0][1] > BLOCK_ROWS:
            yield block
            block = []
        block.append(expert)
    if block:
        yield block
