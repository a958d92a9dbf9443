"""Hugging Face models on these ops: `model.set_experts_implementation("npu_moe")` once this is imported.

Importing it registers "npu_moe" beside transformers' own "eager", "grouped_mm" and so on. An experts
module says by flags how its weights lie and what it computes; `experts_forward` honours all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..functional import grouped_swiglu_ffn, permute, unpermute
from . import gates

NEEDS = "npu_moe_ops.integrations.transformers needs transformers >= 5.24; pip install 'npu-moe-ops[hf]'"
try:
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version("5.24"):
        raise ImportError(f"found {transformers.__version__}")
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
except ImportError as error:
    raise ImportError(f"{NEEDS} ({error})") from error

NAME = "npu_moe"
FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
INSTEAD = 'use model.set_experts_implementation("eager")'


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What a module decorated with transformers' use_experts_implementation computes, on these ops.

    Bias-free SwiGLU experts run in `grouped_swiglu_ffn`, with the module's own parameters as views; see
    `why_not_fused`. Others run expert by expert around the module's own `_apply_gate` or `act_fn`.
    Sums over a token's experts are fp32 (fp64 for fp64) in both.

    Args:
        self: the experts module.
        hidden_states: [T, H]. top_k_weights: [T, K].
        top_k_index: [T, K]; an id outside 0..num_experts-1 (expert parallelism: not mine) adds exactly 0.

    Returns:
        [T, H], dtype of hidden_states.

    Raises:
        ValueError, TypeError: parameters do not fit the flags, or the ops' own. The message says which.
        NotImplementedError: interleaved weights without an `_apply_gate` that says how to split them.
    """
    _check(self, hidden_states)
    module: Any = self
    rows, expert_cumsum, row_of = permute(hidden_states, top_k_index, module.num_experts)
    options = _swiglu_options(module)
    if isinstance(options, str):
        y = _one_by_one(module, rows, expert_cumsum)
    else:
        w13, w2 = (_input_first(module, weight) for weight in (module.gate_up_proj, module.down_proj))
        y = grouped_swiglu_ffn(rows, w13, w2, expert_cumsum, **options)
    return unpermute(y, row_of, top_k_weights).to(hidden_states.dtype)


def why_not_fused(experts: nn.Module) -> str | None:
    """What keeps this experts module from `grouped_swiglu_ffn`, or None if it runs there.

    It runs there if its weights are gated, concatenated and bias-free, no norm follows an expert, and its
    `_apply_gate` is proven to be SwiGLU, with or without limit, alpha and beta; see `gates`.
    """
    _check(experts)
    options = _swiglu_options(experts)
    return options if isinstance(options, str) else None


def _swiglu_options(module: Any) -> dict[str, Any] | str:
    """The op's options for the module's gate, or why the op does not compute what the module does."""
    if not module.has_gate:
        return "no gate"
    if not module.is_concatenated:
        return "gate and up are interleaved"
    if module.has_bias:
        return "has biases"
    if module.has_post_expert_norm:
        return "a norm follows each expert"
    swiglu = None if "_apply_gate" in module.__dict__ else _swiglu_of(type(module)._apply_gate)
    if swiglu is None:
        return "its _apply_gate is not SwiGLU"
    if swiglu.uses_act and not _is_silu(module.act_fn):
        return "its act_fn is not SiLU"
    options: dict[str, Any] = {}
    for name, value in (("limit", swiglu.limit), ("alpha", swiglu.alpha), ("beta", swiglu.beta)):
        if value is not None:
            number = getattr(module, value) if isinstance(value, str) else value
            if not isinstance(number, float | int) or isinstance(number, bool) or (name == "limit" and number < 0):
                return f"its {value} is not a number that the op takes"
            options[f"swiglu_{name}"] = float(number)
    return options


_read: dict[Any, gates.SwiGLU | None] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _swiglu_of(apply_gate: Any) -> gates.SwiGLU | None:
    if apply_gate not in _read:
        _read[apply_gate] = gates.swiglu_of(apply_gate)
    return _read[apply_gate]


def _is_silu(act_fn: Any) -> bool:
    return act_fn is functional.silu or type(act_fn) in (nn.SiLU, SiLUActivation)


def _input_first(module: Any, weight: Tensor) -> Tensor:
    """[E, in, out], as a view."""
    return weight if module.is_transposed else weight.transpose(1, 2)


def _one_by_one(module: Any, rows: Tensor, expert_cumsum: Tensor) -> Tensor:
    """The experts as the module defines them, on rows sorted by expert."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    h = _grouped_linear(module, up, rows, expert_cumsum)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _grouped_linear(module, "down_proj", h, expert_cumsum)
    return module.post_expert_norm(y) if module.has_post_expert_norm else y


def _grouped_linear(module: Any, name: str, x: Tensor, expert_cumsum: Tensor) -> Tensor:
    weight, ends = _input_first(module, getattr(module, name)), expert_cumsum[1:]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    # transformers' own: torch's grouped_mm wants bf16 when compiled, and rows of whole 16 bytes.
    y: Tensor = torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
    if module.has_bias:
        expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
        # In fp32, or the gradient of a bias would be a long sum in bf16.
        bias = getattr(module, f"{name}_bias").float()[expert.clamp(max=module.num_experts - 1)]
        y = (y + bias).to(y.dtype)
    return y


def _check(module: Any, hidden_states: Tensor | None = None) -> None:
    who = f"{NAME}: {type(module).__name__}"
    missing = [flag for flag in (*FLAGS, "num_experts", "_apply_gate") if not hasattr(module, flag)]
    if missing:
        raise TypeError(f"{who} must be an experts module of transformers >= 5.24, but has no {', '.join(missing)}")
    if module.has_gate and not module.is_concatenated and type(module)._apply_gate is _default_apply_gate:
        raise NotImplementedError(f"{who} interleaves gate and up, but has no _apply_gate that splits them; {INSTEAD}")
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = [up, "down_proj"] + ([f"{up}_bias", "down_proj_bias"] if module.has_bias else [])
    sizes = {}
    for name in names:
        weight, dims = getattr(module, name, None), 2 if name.endswith("_bias") else 3
        if not isinstance(weight, Tensor) or weight.dim() != dims or weight.shape[0] != module.num_experts:
            got = list(weight.shape) if isinstance(weight, Tensor) else weight
            raise ValueError(f"{who}.{name} must have {dims} dims, {module.num_experts} experts first, got {got}")
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise TypeError(f"{who}.{name} must be bf16, fp16, fp32 or fp64, got {weight.dtype}; {INSTEAD}")
        sizes[name] = weight.shape[1:] if dims == 2 or module.is_transposed else weight.shape[1:][::-1]
    hidden, width = sizes[up]
    inner = width // 2 if module.has_gate else width
    wanted = {up: [hidden, inner * (1 + module.has_gate)], "down_proj": [inner, hidden]}
    wanted |= {f"{up}_bias": [width], "down_proj_bias": [hidden]}
    for name, size in sizes.items():
        if list(size) != wanted[name]:
            raise ValueError(f"{who}.{name} must map {wanted[name]} beside its other weights, got {list(size)}")
    if hidden_states is not None and (hidden_states.dim() != 2 or hidden_states.shape[1] != hidden):
        raise ValueError(f"{who}: hidden_states must be [T, {hidden}], got {list(hidden_states.shape)}")


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
