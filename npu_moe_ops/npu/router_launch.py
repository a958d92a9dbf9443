"""What the dispatcher calls for topk_router on 'npu': bring the arguments into the kernel's form, launch it.

No value is copied to the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import cann, tiling, toolchain
from .router_tiling import RouterProblem, RouterTile, choose_tile

MAX_EXPERTS = 8192  # 32 KiB for a row: a few of them, at different stages, fit UB


@dataclass(frozen=True)
class RouterCall:
    """One launch: what the kernel is built for, and the tensors it gets."""

    problem: RouterProblem
    tile: RouterTile
    tensors: tuple[Tensor, Tensor, Tensor]  # tokens, router_weight, bias


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
    """Fill (topk_weights, topk_ids, router_logits) on the NPU. Raises toolchain.Missing without pypto or CANN."""
    call = prepare(
        hidden_states,
        router_weight,
        correction_bias,
        top_k,
        n_group,
        topk_group,
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
    )
    launch(_kernel(call.problem, call.tile), call, result)


def prepare(
    hidden_states: Tensor,
    router_weight: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    n_group: int | None = 1,
    topk_group: int | None = 1,
    **options: Any,
) -> RouterCall:
    """Contiguous tensors, a weight of the tokens' dtype or else of float32, a bias of float32.

    options are fields of RouterProblem.
    """
    (tokens, hidden), experts = hidden_states.shape, router_weight.shape[0]
    cann.refuse_float64("topk_router", "hidden_states", hidden_states.dtype)
    if hidden > tiling.INNER_AXIS:
        raise ValueError(
            f"topk_router: hidden_states must have rows of at most {tiling.INNER_AXIS} elements on 'npu', got {hidden}"
        )
    if experts > MAX_EXPERTS:
        raise ValueError(f"topk_router: router_weight must have at most {MAX_EXPERTS} rows on 'npu', got {experts}")
    weight = router_weight if router_weight.dtype == hidden_states.dtype else router_weight.float()
    if correction_bias is None:
        bias = torch.empty(1, 1, device=hidden_states.device)  # not read
    else:
        bias = correction_bias.float().reshape(1, experts)
    n_group, kept = cann.groups(experts, n_group, topk_group)
    problem = RouterProblem(
        tokens=hidden_states.dtype,
        weight=weight.dtype,
        has_bias=correction_bias is not None,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        n_group=n_group,
        topk_group=kept,
        **options,
    )
    tensors = (hidden_states.contiguous(), weight.contiguous(), bias.contiguous())
    return RouterCall(problem, choose_tile(problem, tokens), tensors)


def launch(kernel: Callable[..., None], call: RouterCall, result: tuple[Tensor, Tensor, Tensor]) -> None:
    """The result is contiguous and new, as outputs.topk_router makes it. The kernel has no int64."""
    topk_weights, topk_ids, router_logits = result
    if not len(topk_ids):
        return
    ids = torch.empty_like(topk_ids, dtype=torch.int32)
    kernel(*call.tensors, router_logits, topk_weights, ids)
    topk_ids.copy_(ids)


@cache
def _kernel(problem: RouterProblem, tile: RouterTile) -> Callable[..., None]:
    toolchain.require_npu("topk_router")
    from . import router

    return router.build(problem, tile, runtime_options=toolchain.runtime_options(tiling.STITCH, simulated=False))
