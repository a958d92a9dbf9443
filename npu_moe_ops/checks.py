"""The one validator: what each op accepts, and what it says when it refuses.

Fakes and kernels call the same function, so eager, traced and exported code refuse alike. Each
message names the argument, the wanted form in symbols and numbers, and what came. Shape checks
read metadata only; `offsets` and `row_indices` read values and so belong to devices where that
costs nothing.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
SCORINGS = ("softmax", "sigmoid")


def grouped_swiglu_ffn(
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
) -> None:
    op = "grouped_swiglu_ffn"
    _tensor(op, "sorted_tokens", sorted_tokens, FLOATS, "[N, H]")
    for name, weight, form in (
        ("w13", w13, "[E*H, 2*I] or [E, H, 2*I]"),
        ("w2", w2, "[E*I, H] or [E, I, H]"),
    ):
        _tensor(op, name, weight, (sorted_tokens.dtype,), form, ranks=(2, 3), like="sorted_tokens")
    _tensor(op, "expert_cumsum", expert_cumsum, INTEGERS, "[E+1]")
    _same_device(op, sorted_tokens=sorted_tokens, w13=w13, w2=w2, expert_cumsum=expert_cumsum)

    hidden = sorted_tokens.shape[1]
    _want(hidden >= 1, lambda: f"{op}: sorted_tokens must be [N, H] with H >= 1, got {_form(sorted_tokens)}")
    _want(
        w13.shape[-1] >= 2 and w13.shape[-1] % 2 == 0,
        lambda: (
            f"{op}: w13 must have 2*I columns (gate, then up), an even number, got {_form(w13)}"
            + _transposed_hint("w13", w13, "2*I", "H", hidden)
        ),
    )
    intermediate = w13.shape[-1] // 2
    _number_of_offsets(op, expert_cumsum, w13, hidden)
    experts = expert_cumsum.shape[0] - 1
    _weight(op, "w13", w13, "H", "2*I", experts, hidden, 2 * intermediate, hidden)
    _weight(op, "w2", w2, "I", "H", experts, intermediate, hidden, intermediate)

    _want(
        swiglu_limit is None or swiglu_limit >= 0,  # NaN fails too
        lambda: f"{op}: swiglu_limit must be None or a number >= 0, got {swiglu_limit}",
    )
    for name, value in (("swiglu_alpha", swiglu_alpha), ("swiglu_beta", swiglu_beta)):
        _finite(op, name, value)


def grouped_swiglu_ffn_backward(
    grad_out: Tensor,
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    output_mask: Sequence[bool],
    **swiglu: Any,
) -> None:
    """The inputs as in forward, and a gradient of the output's shape."""
    op = "grouped_swiglu_ffn_backward"
    _want(len(output_mask) == 3, lambda: f"{op}: output_mask must hold 3 bools, got {len(output_mask)}")
    grouped_swiglu_ffn(sorted_tokens, w13, w2, expert_cumsum, **swiglu)
    _tensor(op, "grad_out", grad_out, (sorted_tokens.dtype,), "[N, H]", like="sorted_tokens")
    _same_device(op, sorted_tokens=sorted_tokens, grad_out=grad_out)
    _same_shape(op, "grad_out", grad_out, sorted_tokens)


def ffn_out(out: Tensor, sorted_tokens: Tensor, w13: Tensor, w2: Tensor, expert_cumsum: Tensor) -> None:
    """What `out=` must be, beside the inputs that `grouped_swiglu_ffn` has checked."""
    op = "grouped_swiglu_ffn"
    _tensor(op, "out", out, (sorted_tokens.dtype,), "[N, H]", like="sorted_tokens")
    _same_device(op, sorted_tokens=sorted_tokens, out=out)
    _same_shape(op, "out", out, sorted_tokens)
    if _overlaps_itself(out):
        raise ValueError(f"{op}: out must have one place in memory an element, got strides {list(out.stride())}")
    inputs = {"sorted_tokens": sorted_tokens, "w13": w13, "w2": w2, "expert_cumsum": expert_cumsum}
    for name, tensor in inputs.items():
        if _spans_overlap(out, tensor):
            raise ValueError(f"{op}: out must not overlap the memory that {name} spans, but it does")


def topk_router(
    hidden_states: Tensor,
    router_weight: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str = "softmax",
    n_group: int | None = 1,
    topk_group: int | None = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> None:
    op = "topk_router"
    _tensor(op, "hidden_states", hidden_states, FLOATS, "[T, H]")
    _tensor(op, "router_weight", router_weight, FLOATS, "[E, H]")
    _same_device(op, hidden_states=hidden_states, router_weight=router_weight)
    experts, hidden = router_weight.shape[0], hidden_states.shape[1]
    _want(
        experts >= 1 and hidden >= 1 and router_weight.shape[1] == hidden,
        lambda: f"{op}: router_weight must be [E, H={hidden}] with E, H >= 1, got {_form(router_weight)}",
    )
    if correction_bias is not None:
        _tensor(op, "correction_bias", correction_bias, FLOATS, f"[E] = [{experts}]")
        _same_device(op, hidden_states=hidden_states, correction_bias=correction_bias)
        _want(
            correction_bias.shape[0] == experts,
            lambda: f"{op}: correction_bias must be [E] = [{experts}], got {_form(correction_bias)}",
        )
    _want(1 <= top_k <= experts, lambda: f"{op}: top_k must be in 1..E={experts}, got {top_k}")
    _want(scoring in SCORINGS, lambda: f"{op}: scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    _finite(op, "routed_scaling_factor", routed_scaling_factor)
    _groups(op, experts, top_k, n_group, topk_group)


def permute(hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    op = "permute"
    _tensor(op, "hidden_states", hidden_states, FLOATS, "[T, H]")
    _tensor(op, "topk_ids", topk_ids, INTEGERS, "[T, K]")
    _same_device(op, hidden_states=hidden_states, topk_ids=topk_ids)
    tokens = hidden_states.shape[0]
    _want(
        topk_ids.shape[0] == tokens,
        lambda: f"{op}: topk_ids must be [T={tokens}, K], one row a token, got {_form(topk_ids)}",
    )
    _want(1 <= num_experts < 2**31, lambda: f"{op}: num_experts must be in 1..2**31-1, got {num_experts}")


def unpermute(expert_out: Tensor, row_of: Tensor, topk_weights: Tensor) -> None:
    op = "unpermute"
    _tensor(op, "expert_out", expert_out, FLOATS, "[N, H]")
    _tensor(op, "row_of", row_of, (torch.int64,), "[T, K]")
    _tensor(op, "topk_weights", topk_weights, FLOATS, "[T, K]")
    _same_device(op, expert_out=expert_out, row_of=row_of, topk_weights=topk_weights)
    tokens, top_k = row_of.shape
    _want(
        topk_weights.shape[0] == tokens and topk_weights.shape[1] == top_k,
        lambda: f"{op}: topk_weights must be [T, K] = [{tokens}, {top_k}] like row_of, got {_form(topk_weights)}",
    )


def moe(hidden_states: Tensor, router_weight: Tensor, w13: Tensor) -> None:
    """What the layer needs beyond its ops: tokens with any leading dims, and one number of experts."""
    _tensor("moe", "router_weight", router_weight, FLOATS, "[E, H]")
    if hidden_states.dim() < 1 or hidden_states.shape[-1] < 1:
        raise ValueError(f"moe: hidden_states must be [..., H] with H >= 1, got {_form(hidden_states)}")
    experts, hidden = router_weight.shape[0], hidden_states.shape[-1]
    if w13.shape[0] != (experts * hidden if w13.dim() == 2 else experts):  # Dynamo traces this: no torch._check
        raise ValueError(
            f"moe: w13 must be [E*H, 2*I] or [E, H, 2*I] with E = {experts} from router_weight and "
            f"H = {hidden} from hidden_states, got {_form(w13)}"
        )


def offsets(expert_cumsum: Tensor, rows: int) -> list[int]:
    """The values of expert_cumsum as ints, or the error that says which of them is wrong."""
    op, c = "grouped_swiglu_ffn", expert_cumsum.tolist()
    form = f"expert_cumsum must hold E+1 = {len(c)} offsets 0 = c[0] <= c[1] <= ... <= c[E] <= N = {rows}"
    hint = "counts become offsets by F.pad(counts.cumsum(0), (1, 0)); end offsets need a 0 in front"
    _want(c[0] == 0, lambda: f"{op}: {form}, got c[0] = {c[0]}; {hint}")
    if c != sorted(c):
        e, (start, end) = next((e, pair) for e, pair in enumerate(pairwise(c)) if pair[0] > pair[1])
        raise ValueError(f"{op}: {form}, got c[{e}] = {start} > c[{e + 1}] = {end}; {hint}")
    _want(c[-1] <= rows, lambda: f"{op}: {form}, got c[E] = {c[-1]}")
    return c


def routed_rows(topk_ids: Tensor) -> None:
    """expert_cumsum is int32: T*K must fit (not for fakes, where it would bound a dynamic T)."""
    _want(
        topk_ids.numel() < 2**31,
        lambda: f"permute: topk_ids must have T*K < 2**31 slots, got {_form(topk_ids)}; split the tokens",
    )


def row_indices(row_of: Tensor, rows: int) -> None:
    """Every value of row_of must name one of the rows, from the front or (no expert) from the end."""
    if row_of.numel():
        low, high = (int(v) for v in row_of.aminmax())
        _want(
            -rows <= low and high < rows,
            lambda: f"unpermute: row_of must lie in -N..N-1 = {-rows}..{rows - 1}, got {low}..{high}",
        )


def _number_of_offsets(op: str, expert_cumsum: Tensor, w13: Tensor, hidden: int) -> None:
    """Refuse counts and end offsets (E values) by the name that the user has for them."""
    length = expert_cumsum.shape[0]
    _want(
        length >= 2,
        lambda: f"{op}: expert_cumsum must be [E+1] offsets with E >= 1, got {_form(expert_cumsum)}",
    )
    experts = w13.shape[0] if w13.dim() == 3 else w13.shape[0] // hidden
    _want(
        not (length == experts and (w13.dim() == 3 or w13.shape[0] % hidden == 0)),
        lambda: (
            f"{op}: expert_cumsum must be [E+1] = [{experts + 1}] offsets with a leading 0 (expert e owns rows "
            f"c[e] to c[e+1]), got {_form(expert_cumsum)}. Per-expert counts: pass F.pad(counts.cumsum(0), (1, 0)); "
            f"end offsets: pass F.pad(ends, (1, 0))"
        ),
    )


def _weight(
    op: str, name: str, weight: Tensor, rows: str, cols: str, experts: int, n_rows: int, n_cols: int, known: int
) -> None:
    """known: the size that does not come from this weight itself; it is the rows in the right layout."""
    if weight.dim() == 2:
        fits = weight.shape[0] == experts * n_rows and weight.shape[1] == n_cols
    else:
        fits = weight.shape[0] == experts and weight.shape[1] == n_rows and weight.shape[2] == n_cols

    _want(
        fits,
        lambda: (
            f"{op}: {name} must be [E*{rows}, {cols}] = [{experts * n_rows}, {n_cols}] or "
            f"[E, {rows}, {cols}] = [{experts}, {n_rows}, {n_cols}], got {_form(weight)} "
            "(E from expert_cumsum, H from sorted_tokens, I from w13)"
            + _transposed_hint(name, weight, cols, rows, known)
        ),
    )


def _transposed_hint(name: str, weight: Tensor, cols: str, rows: str, known: int) -> str:
    """Hugging Face keeps [E, 2*I, H] and [E, H, I]: the likely mistake with a 3-D weight."""
    if weight.dim() == 3 and weight.shape[2] == known and weight.shape[1] != known:
        return f"; it looks like [E, {cols}, {rows}]: pass {name}.transpose(1, 2)"
    return ""


def _groups(op: str, experts: int, top_k: int, n_group: int | None, topk_group: int | None) -> None:
    groups, kept = n_group or 1, topk_group or 1
    _want(groups >= 1, lambda: f"{op}: n_group must be None, 0, 1 (ungrouped) or a divisor of E, got {n_group}")
    _want(
        groups == 1 or bool(topk_group),
        lambda: f"{op}: topk_group must be in 1..n_group={n_group}, got {topk_group}",
    )
    _want(experts % groups == 0, lambda: f"{op}: n_group must divide E={experts}, got {n_group}")
    _want(1 <= kept <= groups, lambda: f"{op}: topk_group must be in 1..n_group={groups}, got {topk_group}")
    available = kept * (experts // groups)
    _want(
        top_k <= available,
        lambda: (
            f"{op}: top_k must be at most topk_group * (E / n_group) = {kept} * {experts // groups} = {available} "
            f"experts in the kept groups, got {top_k}"
        ),
    )


def _tensor(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    form: str,
    *,
    ranks: Sequence[int] = (),
    like: str = "",
) -> None:
    ranks = ranks or (form.count(",") + 1,)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {form}, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(_name(d) for d in dtypes) + (f" as {like}" if like else "")
        raise TypeError(f"{op}: {name} must have dtype {wanted}, got {_name(tensor.dtype)}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {_name(tensor.layout)}")
    if tensor.dim() not in ranks:
        raise ValueError(f"{op}: {name} must be {form}, got {_form(tensor)}")


def _same_device(op: str, **tensors: Tensor) -> None:
    (first, reference), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != reference.device:
            raise ValueError(f"{op}: {name} must be on the device of {first}, {reference.device}, got {tensor.device}")


def _same_shape(op: str, name: str, tensor: Tensor, sorted_tokens: Tensor) -> None:
    n, hidden = sorted_tokens.shape
    _want(
        tensor.shape[0] == n and tensor.shape[1] == hidden,
        lambda: f"{op}: {name} must be [N, H] = [{n}, {hidden}] like sorted_tokens, got {_form(tensor)}",
    )


def _overlaps_itself(matrix: Tensor) -> bool:
    (inner, step), (outer, stride) = sorted(zip(matrix.shape, matrix.stride(), strict=True), key=lambda dim: dim[1])
    return (outer > 1 and stride <= (inner - 1) * step) or (inner > 1 and step == 0)


def _spans_overlap(a: Tensor, b: Tensor) -> bool:
    """From storages and offsets, which fakes have as well."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not a.numel() or not b.numel():
        return False
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a_start < b_end and b_start < a_end


def _span(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    end = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), end * tensor.element_size()


def _finite(op: str, name: str, value: float) -> None:
    _want(math.isfinite(value), lambda: f"{op}: {name} must be a finite number, got {value}")


def _want(ok: bool, message: Callable[[], str]) -> None:
    if ok is not True:  # a plain bool needs no more; a SymBool becomes a guard or a runtime assertion
        torch._check_value(ok, message)


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}"


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
