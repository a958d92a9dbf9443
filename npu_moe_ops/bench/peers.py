"""Ways to compute an MoE layer's experts on a CPU: (tokens [T, H], ids [T, K], scores [T, K]) -> [T, H].

All take the same weights, in Hugging Face's layout, w13 [E, 2*I, H] and w2 [E, H, I]; `ours, flat` in the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cpu, native
from ..functional import grouped_swiglu_ffn, permute, unpermute

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
LOOP, OURS, OURS_HF, OURS_TORCH = "loop over experts", "ours, flat", "ours, HF layout", "ours in torch, HF layout"
HF_EAGER, HF_GROUPED, KT = "HF eager", "HF grouped_mm", "kt-kernel"


@dataclass(frozen=True)
class Sizes:
    """Of the layer; the defaults are those of LLaDA2.0-mini."""

    experts: int = 256
    hidden: int = 2048
    intermediate: int = 512
    top_k: int = 8

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * torch.bfloat16.itemsize

    @property
    def row_flops(self) -> int:
        return 2 * 3 * self.hidden * self.intermediate


def weights(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """w13 [E, 2*I, H] and w2 [E, H, I] in bf16, the same on each call."""
    e, h, i = sizes.experts, sizes.hidden, sizes.intermediate
    generator = torch.Generator().manual_seed(0)
    w13 = torch.empty(e, 2 * i, h, dtype=torch.bfloat16).normal_(0, h**-0.5, generator=generator)
    return w13, torch.empty(e, h, i, dtype=torch.bfloat16).normal_(0, i**-0.5, generator=generator)


def batch(sizes: Sizes, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, each with top_k different experts, all equally likely, and their scores."""
    generator = torch.Generator().manual_seed(seed)
    scores, ids = torch.rand(tokens, sizes.experts, generator=generator).topk(sizes.top_k)
    return torch.randn(tokens, sizes.hidden, generator=generator).bfloat16(), ids, scores / scores.sum(-1, keepdim=True)


def layouts(w13: Tensor, w2: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights as ours take them: the flat layout, which is a copy, and the same memory as Hugging Face's."""
    hugging_face = w13.transpose(1, 2), w2.transpose(1, 2)
    flat_w13, flat_w2 = (w.contiguous().flatten(0, 1) for w in hugging_face)
    return {OURS: (flat_w13, flat_w2), OURS_HF: hugging_face}


def peers(
    sizes: Sizes, w13: Tensor, w2: Tensor, ours: dict[str, tuple[Tensor, Tensor]]
) -> tuple[dict[str, Layer], dict[str, str]]:
    """Name -> layer, and name -> why it is left out. kt-kernel is neither: see kt.py."""
    layers: dict[str, Layer] = {LOOP: _loop(w13, w2)}
    left_out: dict[str, str] = {}
    try:
        layers |= _hugging_face(sizes, w13, w2)
    except ImportError as error:
        left_out |= dict.fromkeys((HF_EAGER, HF_GROUPED), str(error))
    layers |= {name: _ours(sizes, *layout, grouped_swiglu_ffn) for name, layout in ours.items()}
    if native.kernel().isa:
        layers[OURS_TORCH] = _ours(sizes, *ours[OURS_HF], _in_torch)
    else:
        left_out[OURS_TORCH] = "it is what the other two take here"
    return layers, left_out


def _ours(sizes: Sizes, w13: Tensor, w2: Tensor, ffn: Callable[..., Tensor]) -> Layer:
    def layer(tokens: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        sorted_tokens, expert_cumsum, row_of = permute(tokens, ids, sizes.experts)
        return unpermute(ffn(sorted_tokens, w13, w2, expert_cumsum), row_of, scores)

    return layer


def _in_torch(sorted_tokens: Tensor, w13: Tensor, w2: Tensor, expert_cumsum: Tensor) -> Tensor:
    out = torch.empty_like(sorted_tokens)
    cpu.in_torch(out, sorted_tokens, w13, w2, expert_cumsum, None, 1.0, 0.0)
    return out


def _loop(w13: Tensor, w2: Tensor) -> Layer:
    def layer(tokens: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=len(w13)).cumsum(0).tolist()
        rows, out = tokens[order // ids.shape[1]], torch.zeros_like(tokens, dtype=torch.float32)
        results = torch.empty_like(rows)
        for e, (start, end) in enumerate(pairwise([0, *ends])):
            if start < end:
                gate, up = (rows[start:end] @ w13[e].t()).chunk(2, dim=-1)
                torch.mm(F.silu(gate) * up, w2[e].t(), out=results[start:end])
        out.index_add_(0, order // ids.shape[1], results * scores.flatten()[order, None])
        return out.to(tokens.dtype)

    return layer


def _hugging_face(sizes: Sizes, w13: Tensor, w2: Tensor) -> dict[str, Layer]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    new: Any = Qwen3MoeExperts
    with torch.device("meta"):
        experts = new(config)
    experts.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(w2, requires_grad=False)

    def way(name: str) -> Layer:
        def layer(tokens: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
            experts.config._experts_implementation = name
            result: Tensor = experts(tokens, ids, scores.to(tokens.dtype))
            return result

        return layer

    return {HF_EAGER: way("eager"), HF_GROUPED: way("grouped_mm")}
