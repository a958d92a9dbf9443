"""GE operators of neural networks: matmuls, softmax, norms, gated activations. fp32 inside, one rounding at the end."""

import torch
from torch import Tensor

from .. import operators
from ..operators.common import FLOATS, describe
from .call import Call, op


@op("MatMul", "MatMulV2")
def _matmul(call: Call) -> Tensor:
    call.check(
        call["x1"].dim() == call["x2"].dim() == 2, f"{describe(call['x1'])} @ {describe(call['x2'])}, wanted 2 axes"
    )
    return _product(call, "transpose_x1", "transpose_x2")


@op("BatchMatMul", "BatchMatMulV2")
def _batch_matmul(call: Call) -> Tensor:
    call.check(min(call["x1"].dim(), call["x2"].dim()) >= 2, f"{describe(call['x1'])} @ {describe(call['x2'])}")
    return _product(call, "adj_x1", "adj_x2")


def _product(call: Call, turn1: str, turn2: str) -> Tensor:
    call.without("offset_x")
    x, y, bias = call["x1"], call["x2"], call.get("bias")
    call.same_dtype(x, y)
    left = x.transpose(-1, -2) if call.attr(turn1) else x
    right = y.transpose(-1, -2) if call.attr(turn2) else y
    fits = left.shape[-1] == right.shape[-2]
    call.check(fits, f"{describe(left)} @ {describe(right)}")
    if not x.is_floating_point():
        call.check(bias is None, "bias of a matmul of whole numbers is not implemented")
        return left @ right
    result = left.float() @ right.float()
    if bias is not None:
        call.check(bias.dtype in (x.dtype, torch.float32), f"bias is {describe(bias)}, x1 {describe(x)}")
        call.check(
            bias.dim() == 1 and bias.shape[0] == result.shape[-1], f"bias {describe(bias)} for {describe(result)}"
        )
        result = result + bias.float()
    return result.to(x.dtype)


@op("SoftmaxV2")
def _softmax(call: Call) -> Tensor:
    axes = call.attr("axes", [-1])
    call.check(len(axes) == 1, f"axes {axes}, wanted one")
    result = torch.softmax(call[0].float(), axes[0])
    return result if call.attr("half_to_float") else result.to(call[0].dtype)


@op("LogSoftmaxV2")
def _log_softmax(call: Call) -> Tensor:
    axes = call.attr("axes", [-1])
    call.check(len(axes) == 1, f"axes {axes}, wanted one")
    return torch.log_softmax(call[0].float(), axes[0]).to(call[0].dtype)


@op("Swish")
def _swish(call: Call) -> Tensor:
    wide = call[0].float()
    return (wide * torch.sigmoid(wide * call.attr("scale", 1.0))).to(call[0].dtype)


@op("RmsNorm")
def _rms_norm(call: Call) -> tuple[Tensor, Tensor]:
    x, gamma = call["x"], call["gamma"]
    call.same_dtype(x, gamma)
    axes = tuple(range(x.dim() - gamma.dim(), x.dim()))
    call.check(x.shape[x.dim() - gamma.dim() :] == gamma.shape, f"gamma {describe(gamma)} for {describe(x)}")
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(axes, keepdim=True) + call.attr("epsilon", 1e-6))
    return (wide * scale * gamma.float()).to(x.dtype), scale


@op("LayerNormV4")
def _layer_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x, shape, gamma, beta = call["x"], call.ints("normalized_shape"), call.get("gamma"), call.get("beta")
    call.check(list(x.shape[x.dim() - len(shape) :]) == shape, f"normalized_shape {shape} of {describe(x)}")
    axes = tuple(range(x.dim() - len(shape), x.dim()))
    wide = x.float()
    mean = wide.mean(axes, keepdim=True)
    scale = torch.rsqrt(wide.var(axes, unbiased=False, keepdim=True) + call.attr("epsilon", 1e-5))
    result = (wide - mean) * scale
    if gamma is not None:
        result = result * gamma.float()
    if beta is not None:
        result = result + beta.float()
    return result.to(x.dtype), mean, scale


@op("SwiGlu")
def _swiglu(call: Call) -> Tensor:
    return operators.swiglu(call[0], call.attr("dim", -1), name="SwiGlu")


@op("SwiGluGrad")
def _swiglu_grad(call: Call) -> Tensor:
    return operators.swiglu_backward(call["y_grad"], call["x"], call.attr("dim", -1), name="SwiGluGrad")


@op("ClippedSwiglu")
def _clipped_swiglu(call: Call) -> Tensor:
    return operators.clipped_swiglu(
        call["x"],
        call.get("group_index"),
        dim=call.attr("dim", -1),
        alpha=call.attr("alpha", 1.702),
        limit=call.attr("limit", 7.0),
        bias=call.attr("bias", 1.0),
        interleaved=bool(call.attr("interleaved", True)),
        name="ClippedSwiglu",
    )


@op("Gelu")
def _gelu(call: Call) -> Tensor:
    call.check(call[0].dtype in FLOATS, f"input {describe(call[0])}")
    return torch.nn.functional.gelu(call[0].float(), approximate="tanh").to(call[0].dtype)
