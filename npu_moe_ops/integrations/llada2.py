"""All experts of a layer in one call, for the published LLaDA2.0 model, which keeps a list of them.

    patch(model)      # the same numbers up to rounding
    unpatch(model)    # the same bits as before

Only the given model changes, no class does, and nothing happens unless patch is called.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..weights import pack_experts
from . import llada2_blocks
from .packed import PackedExperts

Output = tuple[Tensor, tuple[Tensor, Tensor]]


def patch(model: nn.Module) -> int:
    """Make every MoE block of a LLaDA2.0 model run its experts in one call.

    A block is what the published code calls LLaDA2MoeSparseMoeBlock. Its router stays its own `gate`, so that the
    choice of experts and their weights are the same to the bit. The experts' weights move into two
    parameters, expert by expert and through the CPU: the peak is the result and one expert on the CPU, the
    result on another device. `state_dict()` and `load_state_dict()` keep the keys of the checkpoint; moving, deep
    copies and training go on. The parameters are new ones: make an optimizer afterwards.

    Each block runs a few random tokens before and after. If the outputs differ by more than rounding, the
    model is restored and the error says where. On the meta device there is nothing to compare.

    Args:
        model: a module that holds such blocks.

    Returns:
        How many blocks.

    Raises:
        ValueError: there is no such block, or one holds what the call would not do: a bias, an adapter, a
            hook, another activation, shared weights, weights of several shapes or on several devices, gradients.
        TypeError: model is no nn.Module, or the experts' dtypes differ.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be an nn.Module, got {type(model).__name__}")
    blocks = llada2_blocks.find(model)
    done: list[Any] = []
    try:
        for name, block in blocks.items():
            _patch_block(name, block, done)
    except BaseException:
        for block in done:
            _unpatch_block(block)
        raise
    return len(blocks)


def unpatch(model: nn.Module) -> int:
    """Give every patched block its list of experts back, with the weights and gradients that it has now.

    Returns:
        How many blocks.

    Raises:
        ValueError: no block of the model is patched. TypeError: model is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model must be an nn.Module, got {type(model).__name__}")
    blocks = [module for module in model.modules() if "_experts_before" in module.__dict__]
    if not blocks:
        raise ValueError(f"unpatch: model must have been patched, but no block of {type(model).__name__} is")
    for block in blocks:
        _unpatch_block(block)
    return len(blocks)


def _forward(block: Any, hidden_states: Tensor) -> Output:
    """What the block's class does: [B, S, H] -> y [B, S, H], (router_logits [B, S, E], topk_idx [B, S, K])."""
    batch, length, hidden = hidden_states.shape
    topk_idx, topk_weight, router_logits = block.gate(hidden_states)
    y = block.experts(hidden_states.reshape(-1, hidden), topk_idx, topk_weight).view(hidden_states.shape)
    if getattr(block, "shared_experts", None) is not None:
        y = y + block.shared_experts(hidden_states)
    return y, (router_logits.view(batch, length, -1), topk_idx.view(batch, length, -1))


def _patch_block(name: str, block: Any, done: list[Any]) -> None:
    experts, weight = block.experts, block.experts[0].gate_proj.weight
    device, requires_grad = weight.device, weight.requires_grad
    tokens = torch.randn(1, 5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    before = None if weight.is_meta else _run(name, block, tokens)
    if device.type not in ("cpu", "meta"):
        experts.to("cpu")  # a device would hold the result beside all experts
    packed = PackedExperts.of(*pack_experts(experts, release=True))
    block.__dict__["_experts_before"] = experts  # no submodule: not to be saved
    block.experts = packed.requires_grad_(requires_grad).train(experts.training)
    block.forward = partial(_forward, block)
    done.append(block)
    packed.to(device)
    if before is not None:
        _compare(name, before, _run(name, block, tokens))


def _unpatch_block(block: Any) -> None:
    packed, experts = block.experts, block.__dict__.pop("_experts_before")
    experts.to(device=packed.w13.device, dtype=packed.w13.dtype).train(packed.training)
    for key, weight, grad, requires_grad in packed.unpacked():
        parameter = experts.get_parameter(key)
        parameter.data, parameter.grad = weight, grad
        parameter.requires_grad_(requires_grad)
    del block.forward
    block.experts = experts


@torch.no_grad()
def _run(name: str, block: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output = block.forward(tokens)  # without the hooks on the block, which are for the user's own calls
    match output:
        case (Tensor() as y, (Tensor() as router_logits, Tensor() as topk_idx)):
            return y, router_logits, topk_idx
    raise ValueError(f"patch: {name} must return (y, (router_logits, topk_idx)), got {type(output).__name__}")


def _compare(name: str, before: tuple[Tensor, Tensor, Tensor], after: tuple[Tensor, Tensor, Tensor]) -> None:
    for what, old, new in zip(("router_logits", "topk_idx"), before[1:], after[1:], strict=True):
        if old.shape != new.shape or not torch.allclose(old, new, rtol=0, atol=0, equal_nan=True):
            raise ValueError(f"patch: {name} must give the same {what} in one call as expert by expert, but does not")
    old, new = before[0], after[0]
    finite = old.isfinite()
    error = (old - new).double()[finite].square().mean().sqrt().item() if finite.any() else 0.0
    scale = old.double()[finite].square().mean().sqrt().item() if finite.any() else 0.0
    most = max(8 * torch.finfo(old.dtype).eps, 1e-5)
    if old.dtype != new.dtype or not torch.equal(finite, new.isfinite()) or error > most * scale:
        raise ValueError(
            f"patch: {name} must give the same output in one call as expert by expert, but differs by "
            f"{error:.1e} of {scale:.1e} (root mean square); does it only route, run and sum experts?"
        )
