"""From the weights that models keep to w13 and w2."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# The names by which models call an expert's gate, up and down projections.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def fuse_gate_up(w1: Tensor, w3: Tensor) -> Tensor:
    """Gate w1 and up w3 (Mixtral's names), side by side as w13: [..., H, I] twice -> [..., H, 2*I].

    Flat weights [E*H, I] give flat [E*H, 2*I]. A Linear keeps its weight as [I, H]: pass
    `w1.transpose(-1, -2)`. Such views are joined in their own memory order, row by row.

    Raises:
        ValueError: shapes or devices differ, or there are fewer than 2 dims. TypeError: dtypes differ.
    """
    if w1.dim() < 2 or w1.shape != w3.shape:
        raise ValueError(f"fuse_gate_up: w1 and w3 must both be [..., H, I], got {list(w1.shape)} and {list(w3.shape)}")
    if w1.dtype != w3.dtype:
        raise TypeError(f"fuse_gate_up: w3 must have the dtype of w1, {w1.dtype}, got {w3.dtype}")
    if w1.device != w3.device:
        raise ValueError(f"fuse_gate_up: w3 must be on the device of w1, {w1.device}, got {w3.device}")
    if w1.stride(-2) == 1 and w1.stride(-1) != 1:
        return torch.cat((w1.transpose(-1, -2), w3.transpose(-1, -2)), dim=-2).transpose(-1, -2)
    return torch.cat((w1, w3), dim=-1)


def pack_experts(module_list: Iterable[nn.Module], *, release: bool = False) -> tuple[Tensor, Tensor]:
    """An nn.ModuleList of experts -> w13 [E, H, 2*I] and w2 [E, I, H].

    Experts have bias-free Linears gate_proj, up_proj, down_proj, or w1, w3, w2 (gate, up, down). The
    result is allocated once and filled expert by expert. It keeps the Linears' memory order, so w13 and
    w2 are transposed views, which every op here takes as they are. They carry no gradient history:
    wrap them in nn.Parameter to train them.

    With release=True each expert's weights are emptied as soon as they are copied, so that the peak is
    the result and one expert, not the result and all experts. The modules cannot be used afterwards.

    Raises:
        ValueError: no experts, unknown projection names, a bias, or shapes, devices that differ.
        TypeError: dtypes differ.
    """
    experts = list(module_list)
    if not experts:
        raise ValueError("pack_experts: module_list must hold at least one expert, got none")
    gate, _, _ = _projections(experts[0], 0)
    (intermediate, hidden), count = gate.shape, len(experts)
    w13 = gate.new_empty((count, 2 * intermediate, hidden))
    w2 = gate.new_empty((count, hidden, intermediate))
    moves = [
        (f"pack_experts: {name} projection of expert {e}", weight, place)
        for e, expert in enumerate(experts)
        for name, weight, place in zip(
            ("gate", "up", "down"),
            _projections(expert, e),
            (w13[e, :intermediate], w13[e, intermediate:], w2[e]),
            strict=True,
        )
    ]
    for what, weight, place in moves:  # all of them first: nothing is released before an error
        _check(what, weight, place, release)
    uses = Counter(id(weight) for _, weight, _ in moves)
    with torch.no_grad():
        for _, weight, place in moves:
            place.copy_(weight)
            uses[id(weight)] -= 1
            if release and not uses[id(weight)]:  # a shared weight goes with its last use
                weight.data = weight.new_empty(0)
    return w13.transpose(1, 2), w2.transpose(1, 2)


def _projections(expert: nn.Module, e: int) -> tuple[Tensor, Tensor, Tensor]:
    for names in PROJECTIONS:
        linears = [getattr(expert, name, None) for name in names]
        if all(isinstance(linear, nn.Linear) for linear in linears):
            biased = [n for n, linear in zip(names, linears, strict=True) if getattr(linear, "bias", None) is not None]
            if biased:
                raise ValueError(f"pack_experts: expert {e} must have no bias, but {', '.join(biased)} has one")
            gate, up, down = (linear.weight for linear in linears if linear is not None)
            return gate, up, down
    wanted = " or ".join(", ".join(names) for names in PROJECTIONS)
    raise ValueError(f"pack_experts: expert {e} must have Linears {wanted}, got {type(expert).__name__}")


def _check(what: str, weight: Tensor, place: Tensor, release: bool) -> None:
    if release and not isinstance(weight, nn.Parameter):
        raise ValueError(f"{what} must be a plain parameter to be released, but is computed (parametrized?)")
    if weight.shape != place.shape:
        raise ValueError(f"{what} must be {list(place.shape)} like that of expert 0, got {list(weight.shape)}")
    if weight.dtype != place.dtype:
        raise TypeError(f"{what} must have dtype {place.dtype} like that of expert 0, got {weight.dtype}")
    if weight.device != place.device:
        raise ValueError(f"{what} must be on {place.device} like that of expert 0, got {weight.device}")
