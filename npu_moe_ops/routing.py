"""Router, permute and unpermute in torch: for every device, no host sync, no data-dependent shape.

Each fills the result that it is given. Index values are checked where looking costs nothing: on a CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks
from .reference import accumulate_dtype


def topk_router(
    result: tuple[Tensor, Tensor, Tensor],
    hidden_states: Tensor,
    router_weight: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str,
    n_group: int | None,
    topk_group: int | None,
    renormalize: bool,
    routed_scaling_factor: float,
) -> None:
    topk_weights, topk_ids, router_logits = result
    acc = router_logits.dtype
    torch.mm(hidden_states.to(acc), router_weight.to(acc).t(), out=router_logits)
    scores = score(router_logits, scoring)
    choice = scores if correction_bias is None else scores + correction_bias.to(acc)
    if n_group and n_group > 1:
        choice = keep_best_groups(choice, n_group, topk_group or 1)
    topk_ids.copy_(best_first(choice, top_k))
    topk_weights.copy_(weigh(scores, topk_ids, renormalize, routed_scaling_factor))


def weigh(scores: Tensor, topk_ids: Tensor, renormalize: bool, routed_scaling_factor: float) -> Tensor:
    """Weights of the chosen experts: their scores, divided by their sum if there are several and it is asked for."""
    weights = scores.gather(-1, topk_ids)
    if renormalize and topk_ids.shape[-1] > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor


def score(router_logits: Tensor, scoring: str) -> Tensor:
    return router_logits.softmax(dim=-1) if scoring == "softmax" else router_logits.sigmoid()


def keep_best_groups(choice: Tensor, n_group: int, topk_group: int) -> Tensor:
    """-inf for experts outside the topk_group groups whose two best scores have the largest sums."""
    grouped: Tensor = choice.unflatten(-1, (n_group, -1))
    group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = best_first(group_score, topk_group)
    dropped = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def best_first(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest, best first, the lowest index first among equals (torch.topk promises none)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def logits_gradient(grad_weights: Tensor, topk_ids: Tensor, router_logits: Tensor, options: dict[str, Any]) -> Tensor:
    """d topk_weights / d router_logits, applied to grad_weights [T, K]; the choice itself has no gradient."""
    scores = score(router_logits, options["scoring"])
    picked = scores.gather(-1, topk_ids)
    grad = grad_weights * options["routed_scaling_factor"]
    if options["renormalize"] and topk_ids.shape[-1] > 1:
        total = picked.sum(dim=-1, keepdim=True) + 1e-20
        grad = (grad - (grad * picked).sum(dim=-1, keepdim=True) / total) / total
    grad_scores = torch.zeros_like(scores).scatter(-1, topk_ids, grad)
    if options["scoring"] == "sigmoid":
        return grad_scores * scores * (1 - scores)
    return scores * (grad_scores - (grad_scores * scores).sum(dim=-1, keepdim=True))


def permute(result: tuple[Tensor, Tensor, Tensor], hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    checks.routed_rows(topk_ids)
    sorted_tokens, expert_cumsum, row_of = result
    n, top_k = len(sorted_tokens), topk_ids.shape[1]
    slots = topk_ids.reshape(-1).long()
    mine = (slots >= 0) & (slots < num_experts)
    expert = torch.where(mine, slots, num_experts)  # slots of no expert sort last
    order = expert.argsort(stable=True)
    torch.index_select(hidden_states, 0, order // max(top_k, 1), out=sorted_tokens)
    sorted_tokens.masked_fill_((expert[order] == num_experts).unsqueeze(1), 0)
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
    expert_cumsum.copy_(F.pad(counts[:-1].cumsum(0), (1, 0)))
    row = torch.empty_like(order).scatter_(0, order, torch.arange(n, device=order.device))
    row_of.copy_(torch.where(mine, row, row - n).view(topk_ids.shape))


def unpermute(out: Tensor, expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> None:
    if expert_out.device.type == "cpu":
        checks.row_indices(row_of, len(expert_out))
    acc = accumulate_dtype(out.dtype)
    total = torch.zeros_like(out, dtype=acc)
    no_expert = row_of < 0
    weights = topk_weights.to(acc).masked_fill(no_expert, 0)
    rows = front_rows(row_of, len(expert_out))
    for k in range(row_of.shape[1]):  # in this order on every device and call: the same bits
        row = expert_out.index_select(0, rows[:, k]).masked_fill_(no_expert[:, k : k + 1], 0)
        total.addcmul_(row.to(acc), weights[:, k : k + 1])
    out.copy_(total)


def rows_gradient(grad: Tensor, expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> Tensor:
    """The gradient of expert_out: each token's, weighted, on its K rows; exactly 0 on rows of no expert."""
    acc = accumulate_dtype(expert_out.dtype)
    rows = grad.to(acc).unsqueeze(1) * topk_weights.to(acc).unsqueeze(-1)
    rows = rows.masked_fill((row_of < 0).unsqueeze(-1), 0).to(expert_out.dtype)
    target = front_rows(row_of, expert_out.shape[0]).flatten()
    return torch.zeros_like(expert_out).index_add(0, target, rows.flatten(0, 1))


def weights_gradient(grad: Tensor, expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> Tensor:
    """The gradient of topk_weights: each slot's row times the token's gradient; 0 where there is no expert."""
    acc = accumulate_dtype(expert_out.dtype)
    rows = expert_out.index_select(0, front_rows(row_of, expert_out.shape[0]).flatten())
    dots = (rows.view(*row_of.shape, expert_out.shape[1]).to(acc) * grad.to(acc).unsqueeze(1)).sum(dim=-1)
    return dots.masked_fill(row_of < 0, 0).to(topk_weights.dtype)


def front_rows(row_of: Tensor, n: int) -> Tensor:
    """row_of with the rows of no expert, which it counts from the end, counted from the front."""
    return torch.where(row_of < 0, row_of + n, row_of)
