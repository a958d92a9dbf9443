"""Block-wise masked diffusion: each block starts as masks, and the surest tokens are settled first."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    temperature: float = 0.0,
    block_length: int = 32,
    steps: int = 32,
    gen_length: int = 2048,
    top_p: float | None = None,
    top_k: int | None = None,
    eos_early_stop: bool = False,
    minimal_topk: int = 1,
    threshold: float = 0.95,
    eos_id: int = 156892,
    mask_id: int = 156895,
    progress: Callable[[int, int], None] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue a prompt.

    Args:
        model: (input_ids [1, S], attention_mask bool [1, 1, S, S]) -> logits [1, S, V].
        inputs: [1, P] int64, the prompt.
        temperature: 0 takes the likeliest token, without top_p and top_k.
        block_length: tokens a block. A position sees its own block and all earlier ones.
        steps: forwards a block at most; at most gen_length // minimal_topk.
        gen_length: tokens at most.
        top_p: sample among the likeliest tokens that have this probability together.
        top_k: sample among so many of the likeliest tokens.
        eos_early_stop: return as soon as nothing before an eos is masked, not at the end of its block.
        minimal_topk: see steps.
        threshold: tokens that are surer than this are settled together, if they are as many as the step wants.
        eos_id, mask_id: ids of these tokens.
        progress: called with (tokens settled, gen_length) after each forward.
        generator: for sampling, on the device of the logits.

    Returns:
        [1, n] int64, the tokens after the prompt up to and with the first eos; n <= gen_length.

    Raises:
        ValueError: an argument is out of range, or the model's logits have the wrong shape or are NaN.
        TypeError: inputs are no int64.
    """
    _check(inputs, temperature, block_length, steps, gen_length, top_p, top_k, minimal_topk, threshold, eos_id, mask_id)
    prompt = inputs.shape[1]
    steps = min(steps, gen_length // minimal_topk)
    wanted = [block_length // steps + (step < block_length % steps) for step in range(steps)]
    blocks = -(-(prompt + gen_length) // block_length)
    x = inputs.new_full((1, blocks * block_length), mask_id)
    x[:, :prompt] = inputs
    for first in range(prompt // block_length * block_length, x.shape[1], block_length):
        seen = x[:, : first + block_length]
        block = seen[0, first:]  # a view: what is settled in it is settled in x
        attention_mask = block_mask(seen.shape[1], block_length, x.device)
        for count in wanted:
            masked = block == mask_id
            left = int(masked.sum())
            if not left:
                break
            tokens, confidence = _sample(
                _block_logits(model, seen, attention_mask, block_length), temperature, top_p, top_k, generator
            )
            settle = _settle(confidence.masked_fill(~masked, -torch.inf), min(count, left), threshold)
            block[settle] = tokens[settle]
            if progress is not None:
                progress(min(gen_length, first + block_length - prompt - int((block == mask_id).sum())), gen_length)
            if eos_early_stop:
                end = _first(seen[0, prompt:], eos_id)
                if end is not None and not (seen[0, prompt : prompt + end] == mask_id).any():
                    break
        if _first(seen[0, prompt:], eos_id) is not None:
            break
    answer = x[:, prompt : prompt + gen_length]
    end = _first(answer[0], eos_id)
    return (answer if end is None else answer[:, : end + 1]).clone()


def block_mask(length: int, block_length: int, device: torch.device | str | None = None) -> Tensor:
    """bool [1, 1, length, length]: i sees j if j's block is not after i's."""
    block = torch.arange(length, device=device) // block_length
    return (block.unsqueeze(1) >= block).view(1, 1, length, length)


def _block_logits(
    model: Callable[[Tensor, Tensor], Tensor], seen: Tensor, attention_mask: Tensor, block_length: int
) -> Tensor:
    logits = model(seen, attention_mask)
    if logits.dim() != 3 or logits.shape[:2] != seen.shape:
        raise ValueError(f"generate: model must give logits [1, {seen.shape[1]}, V], got {list(logits.shape)}")
    logits = logits[0, -block_length:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logits.isnan().any():
        raise ValueError("generate: model must give logits that are numbers, got NaN")
    return logits


def _sample(
    logits: Tensor, temperature: float, top_p: float | None, top_k: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Of each row [V] a token and its probability."""
    if temperature == 0:
        probability, token = logits.softmax(dim=-1).max(dim=-1)
        return token, probability
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        ranked, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        enough = ranked.cumsum(dim=-1) - ranked >= top_p  # those before it have top_p already
        logits = logits.masked_fill(enough.scatter(1, order, enough), -torch.inf)
    probabilities = logits.softmax(dim=-1)
    token = probabilities.multinomial(1, generator=generator)
    return token[:, 0], probabilities.gather(1, token)[:, 0]


def _settle(confidence: Tensor, count: int, threshold: float) -> Tensor:
    """Which positions to settle: bool, as confidence; settled ones have confidence -inf."""
    sure = confidence > threshold
    if int(sure.sum()) >= count:
        return sure
    return torch.zeros_like(sure).index_fill(0, confidence.topk(count).indices, True)


def _first(tokens: Tensor, token: int) -> int | None:
    places = (tokens == token).nonzero()
    return int(places[0]) if len(places) else None


def _check(
    inputs: Tensor,
    temperature: float,
    block_length: int,
    steps: int,
    gen_length: int,
    top_p: float | None,
    top_k: int | None,
    minimal_topk: int,
    threshold: float,
    eos_id: int,
    mask_id: int,
) -> None:
    if inputs.dtype != torch.int64:
        raise TypeError(f"generate: inputs must be int64, got {inputs.dtype}")
    if inputs.dim() != 2 or inputs.shape[0] != 1:
        raise ValueError(f"generate: inputs must be [1, P], got {list(inputs.shape)}")
    at_least_1 = {"block_length": block_length, "steps": steps, "gen_length": gen_length, "minimal_topk": minimal_topk}
    for name, value in at_least_1.items():
        if value < 1:
            raise ValueError(f"generate: {name} must be >= 1, got {value}")
    if minimal_topk > gen_length:
        raise ValueError(f"generate: minimal_topk must be <= gen_length {gen_length}, got {minimal_topk}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature must be >= 0 and finite, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p must be in (0, 1] or None, got {top_p}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"generate: top_k must be >= 1 or None, got {top_k}")
    if threshold != threshold:
        raise ValueError(f"generate: threshold must be a number, got {threshold}")
    if eos_id == mask_id:
        raise ValueError(f"generate: eos_id and mask_id must differ, got {eos_id} for both")
    if (inputs == mask_id).any():
        raise ValueError(f"generate: inputs must not hold mask_id {mask_id}: masks are what is generated")
