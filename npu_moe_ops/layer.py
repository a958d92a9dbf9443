"""The MoE layer: the four ops in one call, and as a module with its weights."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .functional import grouped_swiglu_ffn, permute, topk_router, unpermute


def moe(
    hidden_states: Tensor,
    router_weight: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    *,
    correction_bias: Tensor | None = None,
    scoring: str = "softmax",
    n_group: int | None = 1,
    topk_group: int | None = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
) -> Tensor:
    """A whole MoE layer: route each token to top_k experts, run them all, sum their outputs.

    Args:
        hidden_states: [..., H], any leading dims.
        router_weight: [E, H].
        w13: [E*H, 2*I] or [E, H, 2*I]. w2: [E*I, H] or [E, I, H]. See grouped_swiglu_ffn.
        top_k: experts a token. Other options: see topk_router and grouped_swiglu_ffn.

    Returns:
        [..., H], shape and dtype of hidden_states (under autocast its dtype, as a matmul's).

    Raises:
        ValueError, TypeError: as the four ops do.
    """
    out, _, _ = _route_and_run(
        hidden_states,
        router_weight,
        w13,
        w2,
        top_k,
        correction_bias,
        {
            "scoring": scoring,
            "n_group": n_group,
            "topk_group": topk_group,
            "renormalize": renormalize,
            "routed_scaling_factor": routed_scaling_factor,
        },
        {"swiglu_limit": swiglu_limit, "swiglu_alpha": swiglu_alpha, "swiglu_beta": swiglu_beta},
    )
    return out


def _route_and_run(
    hidden_states: Tensor,
    router_weight: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    correction_bias: Tensor | None,
    router_options: dict[str, Any],
    swiglu_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [..., H], router_logits [T, E], topk_ids [T, K])"""
    checks.moe(hidden_states, router_weight, w13)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    topk_weights, topk_ids, router_logits = topk_router(x, router_weight, correction_bias, top_k, **router_options)
    sorted_tokens, expert_cumsum, row_of = permute(x, topk_ids, router_weight.shape[0])
    y = grouped_swiglu_ffn(sorted_tokens, w13, w2, expert_cumsum, **swiglu_options)
    return unpermute(y, row_of, topk_weights).view(hidden_states.shape), router_logits, topk_ids


class SparseMoE(nn.Module):
    """An MoE layer with its weights: router, E routed experts and, if wanted, shared experts.

    out = sum over the top_k experts of weight * FFN_e(x)  +  FFN_shared(x)

    Parameters: router_weight [E, H], w13 [E, H, 2*I], w2 [E, I, H]; with shared_intermediate_size S > 0
    shared_w13 [1, H, 2*S] and shared_w2 [1, S, H], an expert that every token visits, unscaled; with
    correction_bias=True a buffer correction_bias [E], for the owner to update (it has no gradient).

    Args:
        hidden_size: H. intermediate_size: I of a routed expert. num_experts: E. top_k: experts a token.
        shared_intermediate_size: S, 0 for none.
        correction_bias: keep a bias for the choice of experts.
        scoring, n_group, topk_group, renormalize, routed_scaling_factor: see topk_router.
        swiglu_limit, swiglu_alpha, swiglu_beta: see grouped_swiglu_ffn; for routed experts only.
        device, dtype: of the weights.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int = 0,
        correction_bias: bool = False,
        scoring: str = "softmax",
        n_group: int | None = 1,
        topk_group: int | None = 1,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        swiglu_limit: float | None = None,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size, least in (
            ("hidden_size", hidden_size, 1),
            ("intermediate_size", intermediate_size, 1),
            ("num_experts", num_experts, 1),
            ("shared_intermediate_size", shared_intermediate_size, 0),
        ):
            if size < least:
                raise ValueError(f"SparseMoE: {name} must be >= {least}, got {size}")
        self.num_experts, self.top_k = num_experts, top_k
        self.router_options: dict[str, Any] = {
            "scoring": scoring,
            "n_group": n_group,
            "topk_group": topk_group,
            "renormalize": renormalize,
            "routed_scaling_factor": routed_scaling_factor,
        }
        self.swiglu_options: dict[str, Any] = {
            "swiglu_limit": swiglu_limit,
            "swiglu_alpha": swiglu_alpha,
            "swiglu_beta": swiglu_beta,
        }

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        h, i, s = hidden_size, intermediate_size, shared_intermediate_size
        self.router_weight = weight(num_experts, h)
        self.w13, self.w2 = weight(num_experts, h, 2 * i), weight(num_experts, i, h)
        self.shared_w13 = weight(1, h, 2 * s) if s else None
        self.shared_w2 = weight(1, s, h) if s else None
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if correction_bias else None
        self.register_buffer("correction_bias", bias)
        with torch.device("meta"):  # the ops' own checks of the options, before a first token
            x = torch.empty(0, hidden_size)
            checks.topk_router(x, torch.empty(num_experts, h), None, top_k, **self.router_options)
            offsets = torch.empty(num_experts + 1, dtype=torch.int32)
            w13, w2 = torch.empty(self.w13.shape), torch.empty(self.w2.shape)
            checks.grouped_swiglu_ffn(x, w13, w2, offsets, **self.swiglu_options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each weight uniform in +-1/sqrt(fan_in), as nn.Linear starts; the correction bias 0."""
        if self.correction_bias is not None:
            nn.init.zeros_(self.correction_bias)
        fan_in_last, fan_in_first = (self.router_weight,), (self.w13, self.w2, self.shared_w13, self.shared_w2)
        for weights, dim in ((fan_in_last, -1), (fan_in_first, -2)):
            for weight in weights:
                if weight is not None:
                    bound = 1 / math.sqrt(weight.shape[dim])
                    nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.forward_with_routing(hidden_states)[0]

    def forward_with_routing(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(out [..., H], router_logits [T, E], topk_ids [T, top_k]), the latter for load_balancing_loss."""
        out, router_logits, topk_ids = _route_and_run(
            hidden_states,
            self.router_weight,
            self.w13,
            self.w2,
            self.top_k,
            self.correction_bias,
            self.router_options,
            self.swiglu_options,
        )
        if self.shared_w13 is not None and self.shared_w2 is not None:
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            everyone = torch.arange(2, device=x.device) * x.shape[0]  # [0, T], made on the device
            out = out + grouped_swiglu_ffn(x, self.shared_w13, self.shared_w2, everyone).view(out.shape)
        return out, router_logits, topk_ids

    def extra_repr(self) -> str:
        _, hidden, double = self.w13.shape
        shared = f", shared_intermediate_size={self.shared_w2.shape[1]}" if self.shared_w2 is not None else ""
        options = ", ".join(f"{k}={v}" for k, v in {**self.router_options, **self.swiglu_options}.items())
        return (
            f"hidden_size={hidden}, intermediate_size={double // 2}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}{shared}, {options}"
        )
