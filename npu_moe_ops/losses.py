"""The load-balancing loss."""

import torch
from torch import Tensor


def load_balancing_loss(
    router_logits: Tensor, topk_ids: Tensor, num_experts: int, *, mask: Tensor | None = None
) -> Tensor:
    """Penalise experts that get more than their share: E * sum_e f_e * p_e.

    f_e is the fraction of routed slots that chose expert e, p_e the mean softmax probability of e. The
    gradient flows through p. Slots with an id outside 0..E-1 count for no expert.

    Args:
        router_logits: [..., E] floating point.
        topk_ids: [..., K] int32 or int64, the same leading dims.
        num_experts: E.
        mask: the leading dims, bool or number; tokens with 0 (padding) are left out. None keeps all.

    Returns:
        scalar fp32 (fp64 for fp64 logits): 1.0 when the load is even, E when one expert gets everything, 0.0
        without tokens.

    Raises:
        ValueError: a size is wrong. TypeError: topk_ids are no integers, or router_logits no floats.

    Source: Fedus et al. 2021, Switch Transformers, eq. 4-6, with f over all K choices of a token.
    """
    _check(router_logits, topk_ids, num_experts, mask)
    dtype = torch.float64 if router_logits.dtype == torch.float64 else torch.float32
    logits, ids = router_logits.to(dtype).flatten(0, -2), topk_ids.flatten(0, -2).long()
    keep = (torch.ones_like(ids[:, 0]) if mask is None else mask.flatten()) != 0
    mine = (ids >= 0) & (ids < num_experts) & keep.unsqueeze(1)

    counts = ids.new_zeros(num_experts + 1)
    counts = counts.index_add(0, torch.where(mine, ids, num_experts).flatten(), torch.ones_like(ids).flatten())[:-1]
    f = counts.to(dtype) / counts.sum().clamp(min=1)
    probabilities = logits.masked_fill(~keep.unsqueeze(1), 0).softmax(dim=-1)  # before: padding may hold NaN
    p = probabilities.masked_fill(~keep.unsqueeze(1), 0).sum(dim=0) / keep.sum().clamp(min=1)
    return num_experts * (f * p).sum()


def _check(router_logits: Tensor, topk_ids: Tensor, num_experts: int, mask: Tensor | None) -> None:
    op = "load_balancing_loss"
    if not router_logits.is_floating_point():
        raise TypeError(f"{op}: router_logits must be floating point, got {router_logits.dtype}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: topk_ids must be int32 or int64, got {topk_ids.dtype}")
    shape = tuple(router_logits.shape)
    if len(shape) < 2 or shape[-1] != num_experts:
        raise ValueError(f"{op}: router_logits must be [..., E={num_experts}], got {list(shape)}")
    if topk_ids.dim() != len(shape) or tuple(topk_ids.shape[:-1]) != shape[:-1]:
        raise ValueError(
            f"{op}: topk_ids must be [{', '.join([*map(str, shape[:-1]), 'K'])}], got {list(topk_ids.shape)}"
        )
    for name, tensor in (("topk_ids", topk_ids), ("mask", mask)):
        if tensor is not None and tensor.device != router_logits.device:
            raise ValueError(
                f"{op}: {name} must be on the device of router_logits, {router_logits.device}, got {tensor.device}"
            )
    if mask is not None and mask.is_complex():
        raise TypeError(f"{op}: mask must be bool, integer or floating point, got {mask.dtype}")
    if mask is not None and tuple(mask.shape) != shape[:-1]:
        raise ValueError(f"{op}: mask must be {list(shape[:-1])}, one value a token, got {list(mask.shape)}")
