"""MoeGatingTopK: scores, groups of experts, the best k and their weights."""

import torch
from torch import Tensor

from .common import FLOATS, describe, poison, want, want_absent, want_tensor, want_value

MAX_EXPERTS = 2048
SOFTMAX, SIGMOID = 0, 1
GROUP_ALIGNMENT = 32


def check_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    name: str = "npu_moe_gating_top_k",
) -> None:
    """Every limit that npu_moe_gating_top_k in `_op_plugin_docs.py` names; the hash mode is not implemented."""
    want_absent(name, input_ids=input_ids, tid2eid=tid2eid)
    want_tensor(f"{name}: x", x, (None, None), FLOATS)
    experts = x.shape[1]
    want(experts <= MAX_EXPERTS, f"{name}: x", f"of at most {MAX_EXPERTS} experts", describe(x))
    if bias is not None:
        want_tensor(f"{name}: bias", bias, (experts,), x.dtype)
    want(group_count > 0, f"{name}: group_count", "> 0", group_count)
    want(experts % group_count == 0, f"{name}: group_count", f"a divisor of {experts} experts", group_count)
    size = experts // group_count
    want(size > 2, f"{name}: group_count", f"such that more than 2 of {experts} experts are in a group", group_count)
    aligned = -(-size // GROUP_ALIGNMENT) * GROUP_ALIGNMENT * group_count
    want(
        aligned <= MAX_EXPERTS,
        f"{name}: group_count",
        f"such that groups, each filled up to a multiple of {GROUP_ALIGNMENT}, hold at most {MAX_EXPERTS} experts",
        f"{group_count}, which makes {aligned}",
    )
    want(1 <= k_group <= group_count, f"{name}: k_group", f"within 1..{group_count}", k_group)
    want(1 <= k <= size * k_group, f"{name}: k", f"within 1..{size * k_group}", k)
    want_value(f"{name}: group_select_mode", group_select_mode, 0, 1)
    want_value(f"{name}: renorm", renorm, 0)
    want_value(f"{name}: norm_type", norm_type, SOFTMAX, SIGMOID)


def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    name: str = "npu_moe_gating_top_k",
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (T, k) in x's dtype, experts (T, k) int32, scores (T, E) fp32 (undefined without out_flag).

    The bias moves the choice, not the weights. A group's score is its best expert, or the sum of its two best
    (group_select_mode 1). Among equals the lower number wins. Sigmoid weights are divided by their sum + eps, softmax
    weights are not.
    """
    check_moe_gating_top_k(
        x,
        k,
        bias=bias,
        input_ids=input_ids,
        tid2eid=tid2eid,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        renorm=renorm,
        norm_type=norm_type,
        name=name,
    )
    logits = x.float()
    scores = torch.sigmoid(logits) if norm_type == SIGMOID else torch.softmax(logits, -1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        choice = _only_best_groups(choice, k_group, group_count, group_select_mode)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, experts.int(), scores if out_flag else poison(scores.shape, torch.float32)


def _only_best_groups(choice: Tensor, k_group: int, group_count: int, mode: int) -> Tensor:
    grouped = choice.unflatten(1, (group_count, -1))
    value = grouped.amax(-1) if mode == 0 else grouped.topk(2, -1).values.sum(-1)
    best = value.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
    other = torch.ones(value.shape, dtype=torch.bool).scatter_(1, best, False)
    chosen: Tensor = grouped.masked_fill(other.unsqueeze(-1), float("-inf"))
    return chosen.flatten(1)
