"""The ops, whole: schema, checks, result, implementation per device, gradient, autocast, vmap.

The only file that says torch.library. Every kernel is the same three steps, `check` -> `allocate` ->
`compute`; a fake is the kernel without the last. Implementations fill the result they are given.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from . import checks, cpu, native, npu, outputs, reference, routing, vmap

_FFN = "Tensor sorted_tokens, Tensor w13, Tensor w2, Tensor expert_cumsum"
_SWIGLU = "float? swiglu_limit=None, float swiglu_alpha=1.0, float swiglu_beta=0.0"
_ROUTER = (
    'str scoring="softmax", int? n_group=1, int? topk_group=1, bool renormalize=True, float routed_scaling_factor=1.0'
)
SCHEMAS = (
    f"grouped_swiglu_ffn({_FFN}, *, {_SWIGLU}) -> Tensor",
    f"grouped_swiglu_ffn.out({_FFN}, *, {_SWIGLU}, Tensor(a!) out) -> Tensor(a!)",
    f"grouped_swiglu_ffn_backward(Tensor grad_out, {_FFN}, bool[3] output_mask, *, {_SWIGLU})"
    " -> (Tensor, Tensor, Tensor)",
    f"topk_router(Tensor hidden_states, Tensor router_weight, Tensor? correction_bias, int top_k, *, {_ROUTER})"
    " -> (Tensor topk_weights, Tensor topk_ids, Tensor router_logits)",
    "permute(Tensor hidden_states, Tensor topk_ids, int num_experts)"
    " -> (Tensor sorted_tokens, Tensor expert_cumsum, Tensor row_of)",
    "unpermute(Tensor expert_out, Tensor row_of, Tensor topk_weights) -> Tensor",
)
IMPLEMENTATIONS: dict[str, dict[str, Callable[..., None]]] = {
    "CompositeExplicitAutograd": {  # right on every device
        "grouped_swiglu_ffn": reference.grouped_swiglu_ffn,
        "grouped_swiglu_ffn_backward": reference.grouped_swiglu_ffn_backward,
        "topk_router": routing.topk_router,
        "permute": routing.permute,
        "unpermute": routing.unpermute,
    },
    "CPU": {
        "grouped_swiglu_ffn": cpu.grouped_swiglu_ffn,
        "topk_router": cpu.topk_router,
        "permute": cpu.permute,
        "unpermute": cpu.unpermute,
    },
    "PrivateUse1": {
        "grouped_swiglu_ffn": npu.grouped_swiglu_ffn,
        "grouped_swiglu_ffn_backward": npu.grouped_swiglu_ffn_backward,
        "topk_router": npu.topk_router,
        "permute": npu.permute,
        "unpermute": npu.unpermute,
    },
}
AT_ONCE: dict[str, dict[str, Callable[..., Any]]] = {  # check, allocate and compute themselves, or answer None
    "CPU": {"grouped_swiglu_ffn": native.grouped_swiglu_ffn},
}
LOWERINGS: dict[str, Callable[..., Any]] = {  # to a GE graph
    "grouped_swiglu_ffn": npu.lowering.grouped_swiglu_ffn,
    "grouped_swiglu_ffn_backward": npu.lowering.grouped_swiglu_ffn_backward,
    "topk_router": npu.lowering.topk_router,
    "permute": npu.lowering.permute,
    "unpermute": npu.lowering.unpermute,
}
AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "privateuse1": "AutocastPrivateUse1"}

library = torch.library.Library("npu_moe", "DEF")
for _schema in SCHEMAS:
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
op = torch.ops.npu_moe


def _kernel(
    name: str, compute: Callable[..., None] | None, at_once: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    check, allocate = getattr(checks, name), getattr(outputs, name)
    defaults = _defaults(name)

    def kernel(*args: Any, **options: Any) -> Any:
        options = defaults | options if options else defaults  # the dispatcher leaves out what equals its default
        if at_once is not None and (result := at_once(*args, **options)) is not None:
            return result
        check(*args, **options)
        result = allocate(*args, **options)
        if compute is not None:
            compute(result, *args, **options)
        return result

    return kernel


def _ffn_out_kernel(compute: Callable[..., None] | None) -> Callable[..., Tensor]:
    defaults = _defaults("grouped_swiglu_ffn")

    def kernel(*args: Any, out: Tensor, **options: Any) -> Tensor:
        options = defaults | options
        checks.grouped_swiglu_ffn(*args, **options)
        checks.ffn_out(out, *args)
        if compute is not None:
            compute(out, *args, **options)
        return out

    return kernel


def _defaults(name: str) -> dict[str, Any]:
    return {a.name: a.default_value for a in getattr(op, name).default._schema.arguments if a.kwarg_only}


for _name, _compute in IMPLEMENTATIONS["CompositeExplicitAutograd"].items():
    torch.library.register_fake(f"npu_moe::{_name}", _kernel(_name, None), lib=library)
torch.library.register_fake("npu_moe::grouped_swiglu_ffn.out", _ffn_out_kernel(None), lib=library)
for _key, _table in IMPLEMENTATIONS.items():
    for _name, _compute in _table.items():
        library.impl(_name, _kernel(_name, _compute, AT_ONCE.get(_key, {}).get(_name)), _key)
    if "grouped_swiglu_ffn" in _table:
        library.impl("grouped_swiglu_ffn.out", _ffn_out_kernel(_table["grouped_swiglu_ffn"]), _key)


def _converter(name: str, lower: Callable[..., Any]) -> Callable[..., Any]:
    """What torchair.register_fx_node_ge_converter leaves at an op; put there without importing torchair."""
    defaults = _defaults(name)

    def converter(*args: Any, **options: Any) -> Any:
        return lower(*args, **(defaults | options))

    converter.require_meta = False  # type: ignore[attr-defined]
    return converter


for _name, _lower in LOWERINGS.items():
    getattr(op, _name).default._ge_converter = _converter(_name, _lower)


# Gradients. The FFN's is an op of its own, so that a compiled backward has one node for it too; the
# others are a few torch ops each, which the compiler may fuse.


def _ffn_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.swiglu = keyword_only_inputs


def _ffn_gradient(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    asked = list(ctx.needs_input_grad[:3])
    grads = op.grouped_swiglu_ffn_backward(grad_out, *ctx.saved_tensors, asked, **ctx.swiglu)
    return (*(grad if ask else None for grad, ask in zip(grads, asked, strict=True)), None)


def _no_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    pass


def _no_second_gradient(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("grouped_swiglu_ffn: second derivatives are not supported; drop create_graph=True")


def _router_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    hidden_states, router_weight, _, _ = inputs
    _, topk_ids, router_logits = output
    ctx.save_for_backward(hidden_states, router_weight, topk_ids, router_logits)
    ctx.options = keyword_only_inputs
    ctx.mark_non_differentiable(topk_ids)


def _router_gradient(ctx: Any, grad_weights: Tensor, _: None, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
    hidden_states, router_weight, topk_ids, router_logits = ctx.saved_tensors
    asked = ctx.needs_input_grad
    with torch._C._DisableAutocast():
        grad = routing.logits_gradient(grad_weights, topk_ids, router_logits, ctx.options) + grad_logits
        grad_hidden = (grad @ router_weight.to(grad.dtype)).to(hidden_states.dtype) if asked[0] else None
        grad_router = (grad.t() @ hidden_states.to(grad.dtype)).to(router_weight.dtype) if asked[1] else None
    return grad_hidden, grad_router, None, None  # the bias chooses, it does not weigh


def _permute_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, expert_cumsum, row_of = output
    ctx.save_for_backward(row_of)
    ctx.mark_non_differentiable(expert_cumsum, row_of)


def _permute_gradient(ctx: Any, grad_sorted: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    (row_of,) = ctx.saved_tensors
    ones = torch.ones_like(row_of, dtype=reference.accumulate_dtype(grad_sorted.dtype))
    return op.unpermute(grad_sorted, row_of, ones), None, None


def _unpermute_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    asked_rows, _, asked_weights = ctx.needs_input_grad
    saved = ctx.saved_tensors  # once: checkpointing recomputes or refuses at a second look
    grad_rows = routing.rows_gradient(grad, *saved) if asked_rows else None
    grad_weights = routing.weights_gradient(grad, *saved) if asked_weights else None
    return grad_rows, None, grad_weights


_CPU = torch._C.DispatchKey.CPU
# Keys below autograd that a kernel, or a mode of torch, is behind.
_IMPLEMENTED = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)


def _autograd(overload: Any, gradient: Callable[..., Any], context: Callable[..., None]) -> Callable[..., Any]:
    """What torch.library.register_autograd registers, but it says so where a tangent would get lost.

    On a CPU, without a gradient, a kernel that does all at once is asked here: the way back through the dispatcher
    costs more than a small FFN.
    """
    implementation = make_autograd_impl(overload, Info(gradient, context))
    at_once = AT_ONCE["CPU"].get(overload._opname)
    defaults = _defaults(overload._opname)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if forward_ad._current_level >= 0:
            for arg in args:
                if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
                    raise NotImplementedError(f"{overload._opname}: forward-mode AD (jvp) is not supported")
        if (
            at_once is not None
            and (keyset & _IMPLEMENTED).highestPriorityTypeId() == _CPU
            and not (torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args))
            and (result := at_once(*args, **(defaults | options))) is not None
        ):
            return result
        return implementation(keyset, *args, **options)

    return kernel


for _name, _gradient, _context in (
    ("grouped_swiglu_ffn", _ffn_gradient, _ffn_context),
    ("grouped_swiglu_ffn_backward", _no_second_gradient, _no_context),
    ("topk_router", _router_gradient, _router_context),
    ("permute", _permute_gradient, _permute_context),
    ("unpermute", _unpermute_gradient, _unpermute_context),
):
    library.impl(_name, _autograd(getattr(op, _name).default, _gradient, _context), "Autograd", with_keyset=True)


def _ffn_out_autograd(keyset: torch._C.DispatchKeySet, *args: Tensor, **options: Any) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*args, options["out"])):
        raise ValueError("grouped_swiglu_ffn: out= has no gradient, but an argument requires grad; use torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return op.grouped_swiglu_ffn.out.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)


def _ffn_copied_into(out: Tensor, *args: Any, **options: Any) -> None:
    out.copy_(op.grouped_swiglu_ffn(*args, **options))


library.impl("grouped_swiglu_ffn.out", _ffn_out_autograd, "Autograd", with_keyset=True)
# In a compiled graph. torch.Tag.out would do it without the copy, but makes Inductor of torch 2.13 lower
# the functional op to this overload with its keyword-only arguments passed twice.
library.impl("grouped_swiglu_ffn.out", _ffn_out_kernel(_ffn_copied_into), "Functionalize")


# Autocast: the FFN runs in the autocast dtype, as a matmul would; the others keep their dtypes (the
# router is fp32 by contract). Inside, autocast is off, or it would reach the torch ops of a kernel.


def _autocast(overload: Any, device_type: str, key: str) -> Callable[..., Any]:
    inside = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    casts = overload.name() == "npu_moe::grouped_swiglu_ffn"

    def kernel(*args: Any, **options: Any) -> Any:
        if casts:
            dtype = torch.get_autocast_dtype(_device_name(device_type))
            args = tuple(_cast(arg, dtype) for arg in args)
        with torch._C._ExcludeDispatchKeyGuard(inside):
            return overload(*args, **options)

    return kernel


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _device_name(device_type: str) -> str:
    return torch._C._get_privateuse1_backend_name() if device_type == "privateuse1" else device_type


for _device, _key in AUTOCAST.items():
    for _name in IMPLEMENTATIONS["CompositeExplicitAutograd"]:
        library.impl(_name, _autocast(getattr(op, _name).default, _device, _key), _key)
    library.impl("grouped_swiglu_ffn.out", _autocast(op.grouped_swiglu_ffn.out, _device, _key), _key)

torch.library.register_vmap("npu_moe::grouped_swiglu_ffn", vmap.grouped_swiglu_ffn, lib=library)
