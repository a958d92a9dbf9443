"""Limits and forms of CANN's fused operators, for the eager calls and for the GE graph alike.

Source: the docstrings in torch_npu's wheel, torch_npu/_op_plugin_docs.py.
"""

from typing import Any

import torch

from .tiling import INNER_AXIS

MAX_GROUPS = 1024  # experts of one npu_grouped_matmul
MAX_ROUTED = 10240 - 1  # experts of npu_moe_init_routing_v2, less one that stands for "no expert"
MAX_GATED = 2048  # experts of npu_moe_gating_top_k


def refuse_float64(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32 on 'npu', got float64")


def refuse_grouped_matmul(op: str, experts: int, hidden: int, gate_up: int) -> None:
    """ValueError unless npu_grouped_matmul takes weights [experts, hidden, gate_up] and their transposes."""
    if experts > MAX_GROUPS:
        raise ValueError(f"{op}: w13 must have at most {MAX_GROUPS} experts here on 'npu', got {experts}")
    for name, size in (("H", hidden), ("2I", gate_up)):
        if size > INNER_AXIS:
            raise ValueError(f"{op}: {name} must be at most {INNER_AXIS} on 'npu', got {size}")


def refuse_routing(num_experts: int) -> None:
    if num_experts > MAX_ROUTED:
        raise ValueError(f"permute: num_experts must be at most {MAX_ROUTED} on 'npu', got {num_experts}")


def is_plain(limit: float | None, alpha: float, beta: float) -> bool:
    """Whether npu_swiglu is what the caller wants; otherwise npu_clipped_swiglu with clip()."""
    return (limit, alpha, beta) == (None, 1.0, 0.0)


def clip(limit: float | None, alpha: float, beta: float) -> dict[str, Any]:
    """Attributes of npu_clipped_swiglu; without a limit, one that no number passes."""
    bound = torch.finfo(torch.float32).max if limit is None else limit
    return {"dim": -1, "alpha": alpha, "limit": bound, "bias": beta, "interleaved": False}


INIT_ROUTING: dict[str, Any] = {  # every row is kept, counts come out, nothing is quantised, row of each slot
    "active_num": -1,
    "expert_capacity": -1,
    "drop_pad_mode": 0,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
    "quant_mode": -1,
    "row_idx_type": 0,
}


def groups(experts: int, n_group: int | None, topk_group: int | None) -> tuple[int, int]:
    """(n_group, topk_group), (1, 1) where grouping chooses as no grouping does."""
    kept = topk_group or 1
    if not n_group or kept >= n_group or n_group == experts:  # all groups are kept, or each is an expert
        return 1, 1
    return n_group, kept


def gates(experts: int, n_group: int) -> bool:
    """Whether npu_moe_gating_top_k takes this router: it wants few experts, and groups of more than two."""
    aligned = -(-(experts // n_group) // 32) * 32 * n_group if n_group > 1 else experts
    return aligned <= MAX_GATED and experts // n_group > 2


def gating(n_group: int, topk_group: int, scoring: str) -> dict[str, Any]:
    """Attributes of npu_moe_gating_top_k for our choice of experts: a group counts by its two best."""
    return {
        "k_group": topk_group,
        "group_count": n_group,
        "group_select_mode": 1,
        "renorm": 0,
        "norm_type": int(scoring == "sigmoid"),
        "eps": 1e-20,
    }


def gating_weighs(scoring: str, renormalize: bool, top_k: int) -> bool:
    """Whether the weights of npu_moe_gating_top_k are ours: it divides by their sum for sigmoid, and only for that."""
    return (scoring == "sigmoid") == (renormalize and top_k > 1)
