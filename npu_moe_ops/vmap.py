"""vmap of the grouped SwiGLU FFN: a batch of calls becomes one call over all their rows."""

from typing import Any

import torch
from torch import Tensor

from . import checks, reference, routing


def grouped_swiglu_ffn(
    info: Any,
    in_dims: tuple[int | None, ...],
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    **swiglu: Any,
) -> tuple[Tensor, int]:
    """Rows of all batch entries are sorted by expert; where weights are batched, each entry has its own experts."""
    op, batch = torch.ops.npu_moe, info.batch_size
    x, w13, w2, c = (
        t if dim is None else t.movedim(dim, 0)
        for t, dim in zip((sorted_tokens, w13, w2, expert_cumsum), in_dims[:4], strict=True)
    )
    x, c = (t if dim is not None else t.expand(batch, *t.shape) for t, dim in ((x, in_dims[0]), (c, in_dims[3])))
    own_weights = in_dims[1] is not None or in_dims[2] is not None
    if batch == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format), 0

    def entry(b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x[b], w13 if in_dims[1] is None else w13[b], w2 if in_dims[2] is None else w2[b], c[b]

    if torch._C._functorch.is_batchedtensor(c):  # inside another vmap its values cannot be looked at: leave it to that
        return torch.stack([op.grouped_swiglu_ffn(*entry(b), **swiglu) for b in range(batch)]), 0
    checks.grouped_swiglu_ffn(*entry(0), **swiglu)
    n, experts = x.shape[1], c.shape[1] - 1
    if type(c) is Tensor and c.device.type == "cpu":
        for one in c:
            checks.offsets(one, n)
    row = torch.arange(n, device=c.device, dtype=c.dtype).expand(batch, n).contiguous()
    expert = torch.searchsorted(c[:, 1:].contiguous(), row, right=True)  # = experts for rows from c[E] on
    if own_weights:
        w13, w2 = (_stack(w, dim is not None, batch, experts) for w, dim in ((w13, in_dims[1]), (w2, in_dims[2])))
        first = torch.arange(batch, device=c.device).unsqueeze(1) * experts
        expert = torch.where(expert < experts, first + expert, batch * experts)
    rows, cumsum, row_of = op.permute(x.flatten(0, 1), expert.view(-1, 1), experts * (batch if own_weights else 1))
    bad = (c[:, 0] != 0) | (c.diff(dim=1) < 0).any(dim=1) | (c[:, -1] > n)
    cumsum = torch.where(bad.any(), -1, cumsum)  # a graph cannot look at c: let the op refuse when it runs
    y = op.grouped_swiglu_ffn(rows, w13, w2, cumsum, **swiglu)
    return y.index_select(0, routing.front_rows(row_of, len(rows)).flatten()).view(x.shape), 0


def _stack(weight: Tensor, batched: bool, batch: int, experts: int) -> Tensor:
    """[B, ...] or [...] weights -> [B*E, rows, cols]."""
    if not batched:
        return reference.expert_weights(weight, experts).repeat(batch, 1, 1)
    return (weight if weight.dim() == 4 else weight.unflatten(1, (experts, -1))).flatten(0, 1)
