"""The grouped SwiGLU FFN on a CPU, in torch: one expert after the other, the fastest torch matmul for its rows.

fp32 and fp64 multiply as they are. fp16 weights are widened to fp32, expert by expert: torch's own
fp16 product is up to 100 times slower for [H, 2I] weights. For bf16 it depends. Where the CPU has
no bf16 dot product torch emulates one at a fifth of the fp32 rate, so widening wins as soon as an
expert has a few rows; below that, and where the hardware does multiply bf16, the direct product
reads half the memory. Direct products round gate and up to bf16 before the activation.
Measured on 2 Skylake cores, 64 experts of [2048, 1024], ms: 1 row 30 direct, 57 widened; 2 rows 43,
70; 4 rows 106, 70; 64 rows 537, 156.
"""

from itertools import pairwise

import torch
from torch import Tensor

from . import checks
from .reference import accumulate_dtype, expert_weights, swiglu

FEW_ROWS = 2


def has_bf16_dot() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def grouped_swiglu_ffn(
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
    direct_rows = 0 if dtype != torch.bfloat16 else len(sorted_tokens) if has_bf16_dot() else FEW_ROWS
    for e, (start, end) in enumerate(pairwise(c)):
        if start == end:
            continue
        x, w1, w_down = sorted_tokens[start:end], w13[e], w2[e]
        if end - start > direct_rows:
            x, w1, w_down = x.to(acc), w1.to(acc), w_down.to(acc)
        gate, up = (x @ w1).to(acc).chunk(2, dim=-1)
        h = swiglu(gate, up, swiglu_limit, swiglu_alpha, swiglu_beta).to(dtype)
        out[start:end] = h.to(x.dtype) @ w_down
    out[c[-1] :] = 0
