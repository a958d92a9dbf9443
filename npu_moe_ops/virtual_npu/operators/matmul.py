"""GroupedMatmul: one matmul per group of rows (group_type 0) or per group of the inner axis (group_type 2)."""

import torch
from torch import Tensor

from .common import FLOATS, describe, want, want_tensor, want_value

MAX_GROUPS = 1024
INNER_LIMIT = 65536
SPLIT_M, SPLIT_K = 0, 2


def check_grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor | None,
    *,
    group_type: int = SPLIT_M,
    group_list_type: int = 0,
    transpose_weight: bool = False,
    name: str = "npu_grouped_matmul",
) -> None:
    """Limits of npu_grouped_matmul in `_op_plugin_docs.py` for one x, one weight and a result in one piece.

    group_type 0: x (M, K), weight (E, K, N), or (E, N, K) with transpose_weight. group_type 2, after
    `npu_grouped_matmul_meta`, whose result is (E, x.size(0), weight.size(1)): x (M, K), weight (K, N).
    """
    want_value(f"{name}: group_type", group_type, SPLIT_M, SPLIT_K)
    want_value(f"{name}: group_list_type", group_list_type, 0, 1)
    want_tensor(f"{name}: x", x, (None, None), FLOATS)
    want(group_list is not None, f"{name}: group_list", "a tensor", None)
    assert group_list is not None
    want_tensor(f"{name}: group_list", group_list, (None,), torch.int64)
    groups = group_list.shape[0]
    want(1 <= groups <= MAX_GROUPS, f"{name}: group_list", f"of 1 to {MAX_GROUPS} groups", groups)
    want(
        group_list_type == 0 or groups > 1, f"{name}: group_list", "of more than one group when it holds counts", groups
    )
    inner = x.shape[1]
    if group_type == SPLIT_M:
        shape = (groups, None, inner) if transpose_weight else (groups, inner, None)
        want_tensor(f"{name}: weight", weight, shape, x.dtype)
    else:
        want(not transpose_weight, f"{name}: weight", "as it lies (not transposed) for group_type 2", describe(weight))
        want_tensor(f"{name}: weight", weight, (inner, None), x.dtype)
    x_axis = x.shape[0] if group_type == SPLIT_K else inner
    for argument, axis in ((f"{name}: x", x_axis), (f"{name}: weight", weight.shape[-1])):
        want(axis < INNER_LIMIT, argument, f"shorter than {INNER_LIMIT} in its innermost axis", axis)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    group_type: int = SPLIT_M,
    group_list_type: int = 0,
    transpose_weight: bool = False,
    name: str = "npu_grouped_matmul",
) -> Tensor:
    """y[rows of e] = x[rows of e] @ weight[e]; or, for group_type 2, y[e] = x[:, part e] @ weight[part e].

    Rows after the last group are undefined; an empty part of the inner axis gives zeros.
    """
    check_grouped_matmul(
        x,
        weight,
        group_list,
        group_type=group_type,
        group_list_type=group_list_type,
        transpose_weight=transpose_weight,
        name=name,
    )
    split_k = group_type == SPLIT_K
    ends = _ends(group_list, group_list_type, x.shape[1] if split_k else x.shape[0], name)
    starts = [0, *ends[:-1]]
    if split_k:
        y = torch.zeros(len(ends), x.shape[0], weight.shape[1], dtype=x.dtype)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
            y[group] = x[:, start:end].float() @ weight[start:end].float()
        return y
    weight = weight.transpose(1, 2) if transpose_weight else weight
    y = torch.full((x.shape[0], weight.shape[2]), float("nan"), dtype=x.dtype)
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > start:
            y[start:end] = x[start:end].float() @ weight[group].float()
    return y


def _ends(group_list: Tensor, group_list_type: int, rows: int, name: str) -> list[int]:
    """Where each group ends."""
    values = group_list.tolist()
    if group_list_type == 1:
        want(min(values) >= 0, f"{name}: group_list", "counts >= 0", values)
        want(sum(values) <= rows, f"{name}: group_list", f"counts of at most {rows} rows together", sum(values))
        return [sum(values[: i + 1]) for i in range(len(values))]
    rising = all(low <= high for low, high in zip([0, *values], values, strict=False))
    want(rising and values[-1] <= rows, f"{name}: group_list", f"ends that never fall, within 0..{rows}", values)
    return list(map(int, values))
