"""Which modules are LLaDA2.0's MoE blocks, and what keeps one from running its experts in one call."""

from collections import Counter

import torch.nn.functional as F
from torch import Tensor, nn

from .packed import PackedExperts

CLASS = "LLaDA2MoeSparseMoeBlock"
ATTRIBUTES = ("gate", "experts", "num_experts_per_tok")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by name, by their class's name or by what they have; ready to be patched.

    Raises:
        ValueError: there is none, or one holds what a call for all experts would not do. TypeError: dtypes differ.
    """
    blocks = {name or type(model).__name__: module for name, module in model.named_modules() if _is_block(module)}
    if not blocks:
        raise ValueError(
            f"patch: model must hold a block of class {CLASS}, or with {', '.join(ATTRIBUTES)}, where experts is an "
            f"nn.ModuleList of modules with {', '.join(PROJECTIONS)}; {type(model).__name__} holds none"
        )
    uses = Counter(
        id(parameter)
        for _, module in model.named_modules(remove_duplicate=False)
        for parameter in module._parameters.values()
    )
    for name, block in blocks.items():
        _check_block(f"patch: {name}", block)
        _check_experts(f"patch: {name}.experts", block.experts, uses)
    return blocks


def _is_block(module: nn.Module) -> bool:
    if type(module).__name__ == CLASS:
        return True
    if not all(hasattr(module, attribute) for attribute in ATTRIBUTES):
        return False
    experts = module.experts
    if isinstance(experts, nn.ModuleList):
        return all(hasattr(expert, projection) for expert in experts for projection in PROJECTIONS)
    return isinstance(experts, PackedExperts)


def _check_block(what: str, block: nn.Module) -> None:
    lacks = [attribute for attribute in ATTRIBUTES if not hasattr(block, attribute)]
    if lacks:
        raise ValueError(f"{what} must have {', '.join(ATTRIBUTES)}, but lacks {', '.join(lacks)}")
    if isinstance(block.experts, PackedExperts):
        raise ValueError(f"{what} must have a list of experts, but they are packed already")
    if not isinstance(block.experts, nn.ModuleList) or not len(block.experts):
        raise ValueError(f"{what}.experts must be an nn.ModuleList with an expert, got {type(block.experts).__name__}")
    _check_own_forward(what, block)


def _check_experts(what: str, experts: nn.ModuleList, uses: Counter[int]) -> None:
    for e, expert in enumerate(experts):
        _check_expert(f"{what}.{e}", expert)
    _check_not_observed(what, experts)
    first: Tensor = experts[0].get_parameter("gate_proj.weight")
    for e, expert in enumerate(experts):
        for projection in PROJECTIONS:
            weight = getattr(expert, projection).weight
            shape = first.shape[::-1] if projection == "down_proj" else first.shape
            of, like = f"{what}.{e}.{projection}.weight", "like the first expert's"
            if weight.shape != shape:
                raise ValueError(f"{of} must be {list(shape)} {like}, got {list(weight.shape)}")
            if weight.dtype != first.dtype:
                raise TypeError(f"{of} must have dtype {first.dtype} {like}, got {weight.dtype}")
            if weight.device != first.device:
                raise ValueError(f"{of} must be on {first.device} {like}, got {weight.device}")
            if weight.requires_grad != first.requires_grad:
                raise ValueError(f"{of} must have requires_grad={first.requires_grad} {like}")
            if weight.grad is not None:
                raise ValueError(f"{of} must have no gradient, but has one; zero_grad() first")
            if uses[id(weight)] > 1:
                raise ValueError(f"{of} must be used once, but is used {uses[id(weight)]} times")


def _check_expert(what: str, expert: nn.Module) -> None:
    for projection in PROJECTIONS:
        linear = getattr(expert, projection, None)
        if type(linear) is not nn.Linear:
            raise ValueError(f"{what}.{projection} must be a plain nn.Linear, got {type(linear).__name__}")
        if linear.bias is not None:
            raise ValueError(f"{what}.{projection} must have no bias, but has one")
        _check_not_observed(f"{what}.{projection}", linear)
    _check_not_observed(what, expert)
    activation = getattr(expert, "act_fn", None)
    if activation is not F.silu and type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        got = getattr(activation, "__name__", type(activation).__name__)
        raise ValueError(f"{what}.act_fn must be SiLU, got {got}")
    weights = {f"{projection}.weight" for projection in PROJECTIONS}
    extra = [key for key in expert.state_dict() if key not in weights]
    if extra:
        raise ValueError(f"{what} must have the weights of {', '.join(PROJECTIONS)} alone, but has {', '.join(extra)}")


def _check_not_observed(what: str, module: nn.Module) -> None:
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise ValueError(f"{what} must have no hooks, for it would not be called again; remove them first")
    _check_own_forward(what, module)


def _check_own_forward(what: str, module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise ValueError(f"{what} must have its class's forward, but an own one is set on it")
