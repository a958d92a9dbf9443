"""What each op returns, allocated: one function for the real op and its fake, so that the two cannot drift."""

from typing import Any

import torch
from torch import Tensor

from .reference import accumulate_dtype


def grouped_swiglu_ffn(sorted_tokens: Tensor, *_: Tensor, **__: Any) -> Tensor:
    return sorted_tokens.new_empty(sorted_tokens.shape)


def grouped_swiglu_ffn_backward(
    grad_out: Tensor, sorted_tokens: Tensor, w13: Tensor, w2: Tensor, _: Tensor, output_mask: list[bool], **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the memory order of their tensors; an empty one where nobody asks."""
    tokens, up, down = (
        torch.empty_like(t) if asked else t.new_empty(0)
        for t, asked in zip((sorted_tokens, w13, w2), output_mask, strict=True)
    )
    return tokens, up, down


def topk_router(
    hidden_states: Tensor, router_weight: Tensor, _: Tensor | None, top_k: int, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts, acc = hidden_states.shape[0], router_weight.shape[0], accumulate_dtype(hidden_states.dtype)
    return (
        hidden_states.new_empty((tokens, top_k), dtype=acc),
        hidden_states.new_empty((tokens, top_k), dtype=torch.int64),
        hidden_states.new_empty((tokens, experts), dtype=acc),
    )


def permute(hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden_states.new_empty((topk_ids.shape[0] * topk_ids.shape[1], hidden_states.shape[1])),
        topk_ids.new_empty(num_experts + 1, dtype=torch.int32),
        topk_ids.new_empty(topk_ids.shape, dtype=torch.int64),
    )


def unpermute(expert_out: Tensor, row_of: Tensor, _: Tensor) -> Tensor:
    return expert_out.new_empty((row_of.shape[0], expert_out.shape[1]))
