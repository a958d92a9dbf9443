"""MoeInitRouting: tokens copied into one row per chosen expert, rows in the experts' order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .common import FLOATS, poison, want, want_absent, want_indices, want_tensor, want_value

MAX_EXPERTS = 10240
COUNTS = 1
GATHER, SCATTER = 0, 1


def check_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
    name: str = "npu_moe_init_routing_v2",
) -> None:
    """npu_moe_init_routing_v2 in `_op_plugin_docs.py`, of which this does the form without quantisation and drops."""
    want_absent(name, scale=scale, offset=offset, x_dtype=x_dtype)
    want_tensor(f"{name}: x", x, (None, None), FLOATS)
    want_tensor(f"{name}: expert_idx", expert_idx, (x.shape[0], None), torch.int32)
    want_value(f"{name}: active_num", active_num, -1, 0)
    want(0 < expert_num <= MAX_EXPERTS, f"{name}: expert_num", f"within 1..{MAX_EXPERTS}", expert_num)
    want_value(f"{name}: drop_pad_mode", drop_pad_mode, 0)
    want_value(f"{name}: expert_tokens_num_type", expert_tokens_num_type, COUNTS)
    want_value(f"{name}: expert_tokens_num_flag", bool(expert_tokens_num_flag), True)
    want_value(f"{name}: quant_mode", quant_mode, -1)
    want_value(f"{name}: row_idx_type", row_idx_type, GATHER, SCATTER)
    if active_expert_range:
        text = f"[start, end) within 0..{expert_num}"
        pair = len(active_expert_range) == 2 and 0 <= active_expert_range[0] < active_expert_range[1] <= expert_num
        want(pair, f"{name}: active_expert_range", text, list(active_expert_range))


def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
    name: str = "npu_moe_init_routing_v2",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (T*K, H), row numbers int32 (T*K), rows per active expert int64, and an undefined scale fp32 (T*K).

    Slot t*K+k is token t's k-th choice. Rows are sorted by expert, then by slot; those of experts outside the active
    range come nowhere, and as many rows at the end stay undefined. Row numbers of type 0 give each slot's row (-1 for
    none); of type 1 each row's slot.
    """
    check_moe_init_routing_v2(
        x,
        expert_idx,
        scale=scale,
        offset=offset,
        active_num=active_num,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=expert_tokens_num_type,
        expert_tokens_num_flag=expert_tokens_num_flag,
        quant_mode=quant_mode,
        active_expert_range=active_expert_range,
        row_idx_type=row_idx_type,
        x_dtype=x_dtype,
        name=name,
    )
    want_indices(f"{name}: expert_idx", expert_idx, expert_num)
    start, end = active_expert_range or (0, expert_num)
    experts = expert_idx.flatten().long()
    order = experts.sort(stable=True).indices
    order = order[(experts[order] >= start) & (experts[order] < end)]
    slots, active = experts.numel(), order.numel()
    rows = poison((slots, x.shape[1]), x.dtype)
    if active:
        rows[:active] = x[order // expert_idx.shape[1]]
    if row_idx_type == GATHER:
        row_idx = torch.full((slots,), -1, dtype=torch.int32)
        row_idx[order] = torch.arange(active, dtype=torch.int32)
    else:
        row_idx = poison((slots,), torch.int32)
        row_idx[:active] = order.int()
    counts = torch.bincount(experts[order] - start, minlength=end - start)
    return rows, row_idx, counts, poison((slots,), torch.float32)
