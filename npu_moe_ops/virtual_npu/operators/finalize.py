"""MoeFinalizeRouting: each token's rows, weighted and summed."""

from torch import Tensor, float32, int32, zeros

from .common import FLOATS, describe, want, want_indices, want_tensor, want_value


def check_moe_finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    row_idx: Tensor,
    expert_idx: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
    *,
    name: str = "npu_moe_finalize_routing",
) -> None:
    """npu_moe_finalize_routing in `_op_plugin_docs.py`.

    Its text has the optional skips the wrong way round: the wheel's own cases, and the graph operator, give skip1
    without skip2.
    """
    want_value(f"{name}: drop_pad_mode", drop_pad_mode, 0)
    want_tensor(f"{name}: expanded_permuted_rows", rows, (None, None), FLOATS)
    want_tensor(f"{name}: expanded_src_to_dst_row", row_idx, (rows.shape[0],), int32)
    tokens, choices = _sizes(scales, row_idx, k, name)
    if scales is not None:
        want_tensor(f"{name}: scales", scales, (None, None), rows.dtype)
    want(
        tokens * choices == rows.shape[0],
        f"{name}: expanded_permuted_rows",
        f"of {tokens} * {choices} rows",
        describe(rows),
    )
    want(skip2 is None or skip1 is not None, f"{name}: skip1", "given with skip2", None)
    for argument, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None:
            want_tensor(f"{name}: {argument}", skip, (tokens, rows.shape[1]), rows.dtype)
    if expert_idx is not None:
        want_tensor(f"{name}: export_for_source_row", expert_idx, (tokens, choices), int32)
    if bias is not None:
        want(expert_idx is not None, f"{name}: export_for_source_row", "given with bias", None)
        want_tensor(f"{name}: bias", bias, (None, rows.shape[1]), rows.dtype)


def moe_finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    row_idx: Tensor,
    expert_idx: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
    *,
    name: str = "npu_moe_finalize_routing",
) -> Tensor:
    """skip1 + skip2 + sum over k of scales[i, k] * (rows[row_idx[i + k*T]] + bias[expert_idx[i, k]]).

    The row numbers lie choice by choice, not token by token: slot (i, k) is at i + k*T.
    """
    check_moe_finalize_routing(rows, skip1, skip2, bias, scales, row_idx, expert_idx, drop_pad_mode, k, name=name)
    want_indices(f"{name}: expanded_src_to_dst_row", row_idx, rows.shape[0])
    tokens, choices = _sizes(scales, row_idx, k, name)
    if bias is not None and expert_idx is not None:
        want_indices(f"{name}: export_for_source_row", expert_idx, bias.shape[0])
    y = zeros(tokens, rows.shape[1], dtype=float32)
    for skip in (skip1, skip2):
        if skip is not None:
            y += skip.float()
    for choice in range(choices):
        row = rows[row_idx[choice * tokens : (choice + 1) * tokens].long()].float()
        if bias is not None and expert_idx is not None:
            row = row + bias[expert_idx[:, choice].long()].float()
        if scales is not None:
            row = row * scales[:, choice : choice + 1].float()
        y += row
    return y.to(rows.dtype)


def _sizes(scales: Tensor | None, row_idx: Tensor, k: int | None, name: str) -> tuple[int, int]:
    if scales is not None:
        want(scales.dim() == 2, f"{name}: scales", "of 2 axes", describe(scales))
        return scales.shape[0], scales.shape[1]
    want(k is not None and k > 0, f"{name}: k", "> 0 without scales", k)
    assert k is not None
    return row_idx.shape[0] // k, k
