"""Experts of a layer in two parameters, saved and loaded under the names of a list of experts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import grouped_swiglu_ffn, permute, unpermute


class PackedExperts(nn.Module):
    """E SwiGLU experts as w13 [E, 2*I, H] (gate rows, then up) and w2 [E, H, I]: an nn.Linear's memory order.

    `state_dict()` has the keys of an nn.ModuleList of experts, {e}.gate_proj.weight, {e}.up_proj.weight,
    {e}.down_proj.weight, as views that copy nothing, and `load_state_dict()` takes them.

    Args:
        num_experts: E. hidden_size: H. intermediate_size: I.
        device, dtype: of the weights, which are not initialised.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"PackedExperts: {name} must be >= 1, got {size}")
        e, h, i = num_experts, hidden_size, intermediate_size
        self.w13 = nn.Parameter(torch.empty(e, 2 * i, h, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(e, h, i, device=device, dtype=dtype))

    @classmethod
    def of(cls, w13: Tensor, w2: Tensor) -> "PackedExperts":
        """From w13 [E, H, 2*I] and w2 [E, I, H] as `pack_experts` gives them; not copied."""
        experts, intermediate, hidden = w2.shape
        packed = cls(experts, hidden, intermediate, device="meta", dtype=w13.dtype)
        packed.w13, packed.w2 = nn.Parameter(w13.transpose(1, 2)), nn.Parameter(w2.transpose(1, 2))
        return packed

    def __len__(self) -> int:
        return self.w13.shape[0]

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """[T, H] tokens, [T, K] experts of each and their weights -> [T, H]."""
        sorted_tokens, expert_cumsum, row_of = permute(hidden_states, topk_ids, len(self))
        y = grouped_swiglu_ffn(sorted_tokens, self.w13.transpose(1, 2), self.w2.transpose(1, 2), expert_cumsum)
        return unpermute(y, row_of, topk_weights)

    def extra_repr(self) -> str:
        experts, hidden, intermediate = self.w2.shape
        return f"num_experts={experts}, hidden_size={hidden}, intermediate_size={intermediate}"

    def unpacked(self) -> Iterator[tuple[str, Tensor, Tensor | None, bool]]:
        """(key, copy of the weight, copy of its gradient, requires_grad) of each expert's weights."""
        of = {"gate": self.w13, "up": self.w13, "down": self.w2}
        grads = dict(_views(*(p.detach() if p.grad is None else p.grad for p in (self.w13, self.w2))))
        for key, view in _views(self.w13.detach(), self.w2.detach()):
            parameter = of[key.split(".")[1].removesuffix("_proj")]
            grad = None if parameter.grad is None else grads[key].clone()
            yield key, view.clone(), grad, parameter.requires_grad

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        w13, w2 = (self.w13, self.w2) if keep_vars else (self.w13.detach(), self.w2.detach())
        destination.update((prefix + key, view) for key, view in _views(w13, w2))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        views = {prefix + key: view for key, view in _views(self.w13.detach(), self.w2.detach())}
        given = {key: state_dict[key] for key in views if key in state_dict}
        missing_keys += [key for key in views if key not in given]
        unexpected_keys += [key for key in state_dict if strict and key.startswith(prefix) and key not in views]
        wrong = [key for key, value in given.items() if value.shape != views[key].shape]
        error_msgs += [
            f"size mismatch for {key}: must be {list(views[key].shape)}, got {list(given[key].shape)}" for key in wrong
        ]
        if wrong or not given:
            return
        if local_metadata.get("assign_to_params_buffers", False):
            if len(given) < len(views):
                error_msgs.append(f"{prefix}*: with assign=True all or none of the experts' weights must be given")
                return
            like = next(iter(given.values()))
            for name in ("w13", "w2"):
                old = getattr(self, name)
                new = torch.empty(old.shape, dtype=like.dtype, device=like.device)
                setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))
            views = {prefix + key: view for key, view in _views(self.w13.detach(), self.w2.detach())}
        with torch.no_grad():
            for key, value in given.items():
                views[key].copy_(value)


def _views(w13: Tensor, w2: Tensor) -> Iterator[tuple[str, Tensor]]:
    intermediate = w2.shape[2]
    for e in range(w13.shape[0]):
        yield f"{e}.gate_proj.weight", w13[e, :intermediate]
        yield f"{e}.up_proj.weight", w13[e, intermediate:]
        yield f"{e}.down_proj.weight", w2[e]
