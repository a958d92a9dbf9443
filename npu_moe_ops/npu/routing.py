"""Router, permute and unpermute on 'npu', outside a GE graph: CANN's fused operators, called through torch_npu.

Nothing is copied to the host and no size depends on data, so all of it can be captured. What the operators do: cann.py.
"""

import os

import torch
from torch import Tensor

from .. import checks
from ..routing import front_rows, weigh
from . import cann, router_launch, toolchain
from .launch import zero_tail

ROUTER = "NPU_MOE_ROUTER"


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
    """mm in float32, npu_moe_gating_top_k. The PyPTO kernel where that cannot, or with NPU_MOE_ROUTER=pypto."""
    groups, kept = cann.groups(len(router_weight), n_group, topk_group)
    chosen = os.environ.get(ROUTER) or "cann"
    if chosen not in ("cann", "pypto"):
        raise ValueError(f"topk_router: {ROUTER} must be cann or pypto, got {chosen!r}")
    if chosen == "pypto" or not cann.gates(len(router_weight), groups):
        router_launch.topk_router(
            result,
            hidden_states,
            router_weight,
            correction_bias,
            top_k,
            scoring,
            n_group,
            topk_group,
            renormalize,
            routed_scaling_factor,
        )
        return
    cann.refuse_float64("topk_router", "hidden_states", hidden_states.dtype)
    toolchain.require_torch_npu("topk_router")
    topk_weights, topk_ids, router_logits = result
    if not len(topk_ids):
        return
    torch.mm(hidden_states.float(), router_weight.float().t(), out=router_logits)
    weighs = cann.gating_weighs(scoring, renormalize, top_k)
    weights, ids, scores = torch.ops.npu.npu_moe_gating_top_k(
        router_logits,
        top_k,
        bias=None if correction_bias is None else correction_bias.float(),
        out_flag=not weighs,
        routed_scaling_factor=routed_scaling_factor if weighs else 1.0,
        **cann.gating(groups, kept, scoring),
    )
    topk_ids.copy_(ids.clamp(0, len(router_weight) - 1))  # whatever CANN answers for a row of NaN
    if weighs:
        topk_weights.copy_(weights)
        return
    topk_weights.copy_(weigh(scores, topk_ids, renormalize, routed_scaling_factor))


def permute(result: tuple[Tensor, Tensor, Tensor], hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    """npu_moe_init_routing_v2, with one expert more for the slots of no expert: its rows come last and are zeroed."""
    checks.routed_rows(topk_ids)
    toolchain.require_torch_npu("permute")
    cann.refuse_float64("permute", "hidden_states", hidden_states.dtype)
    cann.refuse_routing(num_experts)
    sorted_tokens, expert_cumsum, row_of = result
    expert_cumsum.zero_()
    n = len(sorted_tokens)
    if not n:
        return
    mine = (topk_ids >= 0) & (topk_ids < num_experts)
    rows, row, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        hidden_states,
        torch.where(mine, topk_ids, num_experts).int(),
        expert_num=num_experts + 1,
        active_expert_range=[0, num_experts + 1],
        **cann.INIT_ROUTING,
    )
    expert_cumsum[1:].copy_(counts[:num_experts].cumsum(0))
    zero_tail(sorted_tokens, rows, expert_cumsum)
    row = row.view(topk_ids.shape)
    row_of.copy_(torch.where(mine, row, row - n))


def unpermute(out: Tensor, expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> None:
    """npu_moe_finalize_routing over the rows of each slot, in float32, since it wants weights of the rows' dtype.

    It adds slots k by k in memory. A slot of no expert gets a row of zeros and the weight 0.
    """
    cann.refuse_float64("unpermute", "expert_out", expert_out.dtype)
    toolchain.require_torch_npu("unpermute")
    if not row_of.numel() or not out.numel():
        out.zero_()
        return
    slots = row_of.t().reshape(-1)
    rows = expert_out.index_select(0, front_rows(slots, len(expert_out))).float()
    total = torch.ops.npu.npu_moe_finalize_routing(
        rows.masked_fill_((slots < 0).unsqueeze(1), 0),
        None,
        None,
        None,
        topk_weights.float().masked_fill(row_of < 0, 0),
        torch.arange(len(slots), dtype=torch.int32, device=out.device),
        None,
        drop_pad_mode=0,
        k=row_of.shape[1],
    )
    out.copy_(total)
