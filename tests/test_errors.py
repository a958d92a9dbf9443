"""Every argument, every way to be wrong: eager, compiled, exported and on meta tensors, in the same words."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npu_moe_ops
from npu_moe_ops import SparseMoE, fuse_gate_up, load_balancing_loss, moe, pack_experts

N, H, I, E, T, K = 7, 6, 5, 3, 4, 2  # distinct, so that no wrong axis fits by chance
op = torch.ops.npu_moe


def ffn(**changes):
    arguments = {
        "sorted_tokens": torch.randn(N, H),
        "w13": torch.randn(E, H, 2 * I),
        "w2": torch.randn(E, I, H),
        "expert_cumsum": torch.tensor([0, 2, 4, 7], dtype=torch.int32),
    }
    return op.grouped_swiglu_ffn, arguments | changes


def ffn_out(out, **changes):
    return op.grouped_swiglu_ffn.out, ffn(**changes)[1] | {"out": out}


def router(**changes):
    arguments = {
        "hidden_states": torch.randn(T, H),
        "router_weight": torch.randn(8, H),
        "correction_bias": torch.randn(8),
        "top_k": K,
    }
    return op.topk_router, arguments | changes


def permute(**changes):
    arguments = {"hidden_states": torch.randn(T, H), "topk_ids": torch.randint(0, E, (T, K)), "num_experts": E}
    return op.permute, arguments | changes


def unpermute(**changes):
    arguments = {
        "expert_out": torch.randn(T * K, H),
        "row_of": torch.arange(T * K).view(T, K),
        "topk_weights": torch.rand(T, K),
    }
    return op.unpermute, arguments | changes


def meta(*size, dtype=torch.float32):
    return torch.empty(size, device="meta", dtype=dtype)


# What is wrong -> (op and arguments, error, what the message must say). Shapes, dtypes, devices, options:
# known without reading a value, so refused at trace time as well.
METADATA = {
    "tokens_rank": (ffn(sorted_tokens=torch.randn(1, N, H)), ValueError, "sorted_tokens must be [N, H], got [1, 7, 6]"),
    "tokens_int": (
        ffn(sorted_tokens=torch.ones(N, H, dtype=torch.int64)),
        TypeError,
        "sorted_tokens must have dtype bfloat16 or float16 or float32 or float64, got int64",
    ),
    "tokens_no_columns": (
        ffn(sorted_tokens=torch.randn(N, 0)),
        ValueError,
        "sorted_tokens must be [N, H] with H >= 1, got [7, 0]",
    ),
    "tokens_sparse": (
        ffn(sorted_tokens=torch.eye(N, H).to_sparse()),
        TypeError,
        "sorted_tokens must be a dense (strided) tensor, got layout sparse_coo",
    ),
    "w13_rank": (
        ffn(w13=torch.randn(E * H * 2 * I)),
        ValueError,
        "w13 must be [E*H, 2*I] or [E, H, 2*I], got [180]",
    ),
    "w13_dtype": (
        ffn(w13=torch.randn(E, H, 2 * I).double()),
        TypeError,
        "w13 must have dtype float32 as sorted_tokens, got float64",
    ),
    "w13_odd": (
        ffn(w13=torch.randn(E, H, 2 * I + 1)),
        ValueError,
        "w13 must have 2*I columns (gate, then up), an even number, got [3, 6, 11]",
    ),
    "w13_hidden": (
        ffn(w13=torch.randn(E, H + 1, 2 * I)),
        ValueError,
        "w13 must be [E*H, 2*I] = [18, 10] or [E, H, 2*I] = [3, 6, 10], got [3, 7, 10]",
    ),
    "w13_experts": (
        ffn(w13=torch.randn(E + 2, H, 2 * I)),
        ValueError,
        "w13 must be [E*H, 2*I] = [18, 10] or [E, H, 2*I] = [3, 6, 10], got [5, 6, 10]",
    ),
    "w13_flat_rows": (ffn(w13=torch.randn(E * H + 1, 2 * I)), ValueError, "[E, H, 2*I] = [3, 6, 10], got [19, 10]"),
    "w13_not_transposed": (
        ffn(w13=torch.randn(E, 2 * I, H)),
        ValueError,
        "it looks like [E, 2*I, H]: pass w13.transpose(1, 2)",
    ),
    "w13_not_transposed_odd": (
        ffn(sorted_tokens=torch.randn(N, 7), w13=torch.randn(E, 2 * I, 7)),
        ValueError,
        "an even number, got [3, 10, 7]; it looks like [E, 2*I, H]: pass w13.transpose(1, 2)",
    ),
    "w2_not_transposed": (
        ffn(w2=torch.randn(E, H, I)),
        ValueError,
        "w2 must be [E*I, H] = [15, 6] or [E, I, H] = [3, 5, 6], got [3, 6, 5]",
    ),
    "w2_hint": (
        ffn(w2=torch.randn(E, H, I)),
        ValueError,
        "it looks like [E, H, I]: pass w2.transpose(1, 2)",
    ),
    "w2_rank": (ffn(w2=torch.randn(E, 1, I, H)), ValueError, "w2 must be [E*I, H] or [E, I, H], got [3, 1, 5, 6]"),
    "w2_dtype": (ffn(w2=torch.randn(E, I, H).bfloat16()), TypeError, "w2 must have dtype float32 as sorted_tokens"),
    "w2_columns": (ffn(w2=torch.randn(E, I, H + 1)), ValueError, "[E, I, H] = [3, 5, 6], got [3, 5, 7]"),
    "w2_rows": (ffn(w2=torch.randn(E * 2 * I, H)), ValueError, "w2 must be [E*I, H] = [15, 6]"),
    "counts": (
        ffn(expert_cumsum=torch.tensor([2, 2, 3])),
        ValueError,
        "expert_cumsum must be [E+1] = [4] offsets with a leading 0 (expert e owns rows c[e] to c[e+1]), got [3]. "
        "Per-expert counts: pass F.pad(counts.cumsum(0), (1, 0)); end offsets: pass F.pad(ends, (1, 0))",
    ),
    "counts_flat_weights": (
        ffn(w13=torch.randn(E * H, 2 * I), expert_cumsum=torch.tensor([2, 2, 3])),
        ValueError,
        "expert_cumsum must be [E+1] = [4] offsets with a leading 0",
    ),
    "offsets_float": (
        ffn(expert_cumsum=torch.tensor([0.0, 2, 4, 7])),
        TypeError,
        "expert_cumsum must have dtype int32 or int64, got float32",
    ),
    "offsets_bool": (ffn(expert_cumsum=torch.ones(4, dtype=torch.bool)), TypeError, "int32 or int64, got bool"),
    "offsets_rank": (
        ffn(expert_cumsum=torch.zeros(1, 4, dtype=torch.int32)),
        ValueError,
        "expert_cumsum must be [E+1], got [1, 4]",
    ),
    "offsets_none": (ffn(expert_cumsum=torch.zeros(0).int()), ValueError, "[E+1] offsets with E >= 1, got [0]"),
    "offsets_one": (ffn(expert_cumsum=torch.zeros(1).int()), ValueError, "[E+1] offsets with E >= 1, got [1]"),
    "w13_device": (
        ffn(w13=meta(E, H, 2 * I)),
        ValueError,
        "w13 must be on the device of sorted_tokens, cpu, got meta",
    ),
    "w2_device": (ffn(w2=meta(E, I, H)), ValueError, "w2 must be on the device of sorted_tokens, cpu, got meta"),
    "offsets_device": (
        ffn(expert_cumsum=meta(E + 1, dtype=torch.int32)),
        ValueError,
        "expert_cumsum must be on the device of sorted_tokens, cpu, got meta",
    ),
    "limit": (ffn(swiglu_limit=-1.0), ValueError, "swiglu_limit must be None or a number >= 0, got -1.0"),
    "limit_nan": (ffn(swiglu_limit=float("nan")), ValueError, "swiglu_limit must be None or a number >= 0, got nan"),
    "alpha": (ffn(swiglu_alpha=float("inf")), ValueError, "swiglu_alpha must be a finite number, got inf"),
    "beta": (ffn(swiglu_beta=float("nan")), ValueError, "swiglu_beta must be a finite number, got nan"),
    "router_tokens_rank": (router(hidden_states=torch.randn(H)), ValueError, "hidden_states must be [T, H], got [6]"),
    "router_tokens_dtype": (router(hidden_states=torch.ones(T, H).int()), TypeError, "hidden_states must have dtype"),
    "router_weight_shape": (
        router(router_weight=torch.randn(8, H + 1)),
        ValueError,
        "router_weight must be [E, H=6] with E, H >= 1, got [8, 7]",
    ),
    "router_weight_none": (router(router_weight=torch.randn(0, H)), ValueError, "router_weight must be [E, H=6]"),
    "router_weight_device": (router(router_weight=meta(8, H)), ValueError, "router_weight must be on the device of"),
    "bias_shape": (
        router(correction_bias=torch.randn(7)),
        ValueError,
        "correction_bias must be [E] = [8], got [7]",
    ),
    "bias_rank": (router(correction_bias=torch.randn(1, 8)), ValueError, "correction_bias must be [E] = [8], got [1,"),
    "bias_dtype": (router(correction_bias=torch.ones(8).int()), TypeError, "correction_bias must have dtype"),
    "bias_device": (router(correction_bias=meta(8)), ValueError, "correction_bias must be on the device of"),
    "top_k_0": (router(top_k=0), ValueError, "top_k must be in 1..E=8, got 0"),
    "top_k_many": (router(top_k=9), ValueError, "top_k must be in 1..E=8, got 9"),
    "scoring": (router(scoring="relu"), ValueError, "scoring must be one of softmax, sigmoid, got 'relu'"),
    "n_group_negative": (router(n_group=-2), ValueError, "n_group must be None, 0, 1 (ungrouped) or a divisor of E"),
    "n_group_divides": (router(n_group=3, topk_group=2), ValueError, "n_group must divide E=8, got 3"),
    "topk_group_many": (router(n_group=4, topk_group=5), ValueError, "topk_group must be in 1..n_group=4, got 5"),
    "topk_group_none": (router(n_group=4, topk_group=None), ValueError, "topk_group must be in 1..n_group=4, got None"),
    "topk_group_negative": (router(n_group=4, topk_group=-1), ValueError, "topk_group must be in 1..n_group=4, got -1"),
    "topk_group_ungrouped": (router(topk_group=2), ValueError, "topk_group must be in 1..n_group=1, got 2"),
    "top_k_of_kept_groups": (
        router(n_group=8, topk_group=1),
        ValueError,
        "top_k must be at most topk_group * (E / n_group) = 1 * 1 = 1 experts in the kept groups, got 2",
    ),
    "scaling_factor": (
        router(routed_scaling_factor=float("nan")),
        ValueError,
        "routed_scaling_factor must be a finite number, got nan",
    ),
    "permute_tokens_rank": (permute(hidden_states=torch.randn(T, H, 1)), ValueError, "hidden_states must be [T, H]"),
    "permute_tokens_dtype": (permute(hidden_states=torch.ones(T, H).bool()), TypeError, "hidden_states must have"),
    "permute_ids_rank": (
        permute(topk_ids=torch.zeros(T, dtype=torch.int64)),
        ValueError,
        "topk_ids must be [T, K], got [4]",
    ),
    "permute_ids_tokens": (
        permute(topk_ids=torch.zeros(T + 1, K, dtype=torch.int64)),
        ValueError,
        "topk_ids must be [T=4, K], one row a token, got [5, 2]",
    ),
    "permute_ids_dtype": (permute(topk_ids=torch.zeros(T, K)), TypeError, "topk_ids must have dtype int32 or int64"),
    "permute_ids_device": (permute(topk_ids=meta(T, K, dtype=torch.int64)), ValueError, "topk_ids must be on the"),
    "permute_experts": (permute(num_experts=0), ValueError, "num_experts must be in 1..2**31-1, got 0"),
    "unpermute_rows_rank": (unpermute(expert_out=torch.randn(H)), ValueError, "expert_out must be [N, H], got [6]"),
    "unpermute_rows_dtype": (unpermute(expert_out=torch.ones(T * K, H).int()), TypeError, "expert_out must have dtype"),
    "row_of_dtype": (
        unpermute(row_of=torch.zeros(T, K, dtype=torch.int32)),
        TypeError,
        "row_of must have dtype int64, got int32",
    ),
    "row_of_rank": (unpermute(row_of=torch.arange(8)), ValueError, "row_of must be [T, K], got [8]"),
    "row_of_device": (unpermute(row_of=meta(T, K, dtype=torch.int64)), ValueError, "row_of must be on the device of"),
    "weights_shape": (
        unpermute(topk_weights=torch.rand(K, T)),
        ValueError,
        "topk_weights must be [T, K] = [4, 2] like row_of, got [2, 4]",
    ),
    "weights_dtype": (unpermute(topk_weights=torch.ones(T, K).long()), TypeError, "topk_weights must have dtype"),
    "weights_device": (unpermute(topk_weights=meta(T, K)), ValueError, "topk_weights must be on the device of"),
}
# Wrong values: refused when the op runs, compiled or not.
VALUES = {
    "ends": (ffn(expert_cumsum=torch.tensor([2, 4, 7, 7])), "c[0] = 2; counts become offsets by F.pad("),
    "start": (ffn(expert_cumsum=torch.tensor([1, 2, 4, 7])), "offsets 0 = c[0] <= c[1] <= ... <= c[E] <= N = 7, got"),
    "negative": (ffn(expert_cumsum=torch.tensor([0, -1, 4, 7])), "got c[0] = 0 > c[1] = -1"),
    "falling": (ffn(expert_cumsum=torch.tensor([0, 4, 2, 7])), "got c[1] = 4 > c[2] = 2"),
    "past_the_end": (ffn(expert_cumsum=torch.tensor([0, 2, 4, 8])), "c[E] <= N = 7, got c[E] = 8"),
    "past_int32": (ffn(expert_cumsum=torch.tensor([0, 2, 4, 2**32 + 7])), "c[E] <= N = 7, got c[E] = 4294967303"),
    "row_high": (
        unpermute(row_of=torch.full((T, K), 8)),
        "unpermute: row_of must lie in -N..N-1 = -8..7, got 8..8",
    ),
    "row_low": (unpermute(row_of=torch.full((T, K), -9)), "row_of must lie in -N..N-1 = -8..7, got -9..-9"),
}


def tensors(case):
    return [a for a in case[0][1].values() if isinstance(a, torch.Tensor)]


def cases_where(keep):
    return [pytest.param(case, id=name) for name, case in METADATA.items() if keep(case)]


@pytest.mark.parametrize("case", METADATA.values(), ids=METADATA)
def test_eager(case):
    (function, arguments), error, message = case
    with pytest.raises(error, match=re.escape(message)) as caught:
        function(**arguments)
    argument = next(word for word in str(caught.value).split() if word in arguments or word in OPTION_NAMES)
    assert str(caught.value).split(": ")[1].startswith(argument)  # "op: argument must be ..."


OPTION_NAMES = {
    a.name
    for name in ("grouped_swiglu_ffn", "topk_router")
    for a in getattr(op, name).default._schema.arguments
    if a.kwarg_only
}


@pytest.mark.parametrize("case", cases_where(lambda c: not any(t.is_sparse for t in tensors(c))))  # Dynamo takes none
def test_compiled(case, fresh_compiler):
    """Refused while tracing: nothing runs. Dynamo wraps the error, its words stay."""
    (function, arguments), _, message = case
    compiled = torch.compile(lambda **kwargs: function(**kwargs), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(**arguments)


@pytest.mark.parametrize("name", ["w13_hidden", "counts", "offsets_float", "limit", "bias_shape", "scoring",
                                  "top_k_of_kept_groups", "permute_ids_rank", "weights_shape"])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_exported(name, dynamic):
    (function, arguments), _, message = METADATA[name]

    class Model(nn.Module):
        def forward(self, **kwargs):
            return function(**kwargs)

    tokens = next(iter(arguments))
    rows = {0: torch.export.Dim.DYNAMIC}
    shapes = {k: rows if dynamic and k == tokens else None for k in arguments}
    with pytest.raises(Exception, match=re.escape(message)):
        torch.export.export(Model(), (), arguments, dynamic_shapes={"kwargs": shapes})


@pytest.mark.parametrize("case", cases_where(lambda c: not any(t.is_meta or t.is_sparse for t in tensors(c))))
def test_meta(case):
    (function, arguments), error, message = case
    on_meta = {k: a.to("meta") if isinstance(a, torch.Tensor) else a for k, a in arguments.items()}
    with pytest.raises(error, match=re.escape(message)):
        function(**on_meta)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
def test_values(case, compiled, fresh_compiler):
    (function, arguments), message = case
    run = torch.compile(lambda **kwargs: function(**kwargs), backend="eager", fullgraph=True) if compiled else function
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**arguments)


def test_too_many_slots_for_int32_offsets():
    ids = torch.zeros(1, 1, dtype=torch.int64).expand(2**16, 2**15)
    with pytest.raises(ValueError, match=re.escape("topk_ids must have T*K < 2**31 slots, got [65536, 32768]")):
        op.permute(torch.empty(1, 0).expand(2**16, 0), ids, 4)


@pytest.mark.parametrize("build", [ffn, router, permute, unpermute])
def test_none_for_a_tensor(build):
    function, arguments = build()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name != "correction_bias":
            with pytest.raises(TypeError, match=f"{name} must be a tensor .*, got NoneType"):
                function(**arguments | {name: None})


def test_out():
    good = torch.empty(N, H)
    tokens = torch.randn(N, H)
    for out, error, message in (
        (torch.empty(N, H + 1), ValueError, "out must be [N, H] = [7, 6] like sorted_tokens, got [7, 7]"),
        (torch.empty(N * H), ValueError, "out must be [N, H], got [42]"),
        (good.double(), TypeError, "out must have dtype float32 as sorted_tokens, got float64"),
        (meta(N, H), ValueError, "out must be on the device of sorted_tokens, cpu, got meta"),
        (tokens, ValueError, "out must not overlap the memory that sorted_tokens"),
        (tokens[:], ValueError, "out must not overlap the memory that sorted_tokens spans"),
        (
            torch.empty(1, H).expand(N, H),
            ValueError,
            "out must have one place in memory an element, got",
        ),
        (torch.empty(20).as_strided((N, H), (1, 1)), ValueError, "out must have one place in memory an element, got"),
    ):
        function, arguments = ffn_out(out, sorted_tokens=tokens)
        with pytest.raises(error, match=re.escape("grouped_swiglu_ffn: " + message)):
            function(**arguments)
    pool = torch.randn(2 * N, H)  # disjoint views of one storage are fine
    function, arguments = ffn_out(pool[N:], sorted_tokens=pool[:N])
    out = arguments.pop("out")
    assert torch.equal(function(**arguments, out=out), op.grouped_swiglu_ffn(**arguments))
    w2 = torch.randn(E, I, H)
    function, arguments = ffn_out(w2.view(-1, H)[:N], w2=w2)
    with pytest.raises(ValueError, match="out must not overlap the memory that w2"):
        function(**arguments)
    function, arguments = ffn_out(good, w13=torch.randn(E, H, 2 * I, requires_grad=True))
    with pytest.raises(ValueError, match="grouped_swiglu_ffn: out= has no gradient, but an argument requires grad"):
        function(**arguments)


def test_the_npu_says_what_is_missing(monkeypatch):
    """Reached through the dispatch table; torch_npu is not installed here."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    function, arguments = ffn()
    with pytest.raises(RuntimeError, match=r"(pypto|CANN) .*must be .* for tensors on 'npu'"):
        function.default.redispatch(key, *arguments.values())
    grad_out = torch.randn(N, H), *arguments.values(), [True] * 3
    backward = op.grouped_swiglu_ffn_backward, dict(enumerate(grad_out))
    for function, arguments in (router(), permute(), unpermute(), backward):
        with pytest.raises(RuntimeError, match="torch_npu must be imported for tensors on 'npu', but it is not"):
            function.default.redispatch(key, *arguments.values())
    monkeypatch.setenv("NPU_MOE_ROUTER", "pypto")
    function, arguments = router()
    with pytest.raises(RuntimeError, match=r"topk_router: (pypto|CANN) .*must be .* for tensors on 'npu'"):
        function.default.redispatch(key, *arguments.values())
    monkeypatch.setenv("NPU_MOE_ROUTER", "torch")
    with pytest.raises(ValueError, match="topk_router: NPU_MOE_ROUTER must be cann or pypto, got 'torch'"):
        function.default.redispatch(key, *arguments.values())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="w13 must be"):  # what is wrong anyway comes first
        op.grouped_swiglu_ffn.default.redispatch(key, *ffn(w13=torch.randn(E, H + 1, 2 * I))[1].values())


class Expert(nn.Module):
    def __init__(self, hidden=H, intermediate=I, names=("gate_proj", "up_proj", "down_proj"), bias=False, dtype=None):
        super().__init__()
        for name, (i, o) in zip(names, ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden)),
                                strict=True):  # fmt: skip
            setattr(self, name, nn.Linear(i, o, bias=bias, dtype=dtype))


def normed():
    expert = Expert()
    nn.utils.parametrizations.weight_norm(expert.gate_proj)
    return expert


AROUND = {
    "moe_0d": (lambda: moe(torch.tensor(1.0), torch.randn(E, H), torch.randn(E, H, 2 * I), torch.randn(E, I, H), 1),
               ValueError, "moe: hidden_states must be [..., H] with H >= 1, got []"),
    "moe_experts": (lambda: moe(torch.randn(T, H), torch.randn(E + 1, H), torch.randn(E, H, 2 * I),
                                torch.randn(E, I, H), 1), ValueError,
                    "moe: w13 must be [E*H, 2*I] or [E, H, 2*I] with E = 4 from router_weight and H = 6 from"),
    "layer_sizes": (lambda: SparseMoE(H, 0, E, 1), ValueError, "SparseMoE: intermediate_size must be >= 1, got 0"),
    "layer_shared": (lambda: SparseMoE(H, I, E, 1, shared_intermediate_size=-1), ValueError,
                     "SparseMoE: shared_intermediate_size must be >= 0, got -1"),
    "layer_router": (lambda: SparseMoE(H, I, E, 1, scoring="relu"), ValueError, "scoring must be one of"),
    "layer_limit": (lambda: SparseMoE(H, I, E, 1, swiglu_limit=-1.0), ValueError, "swiglu_limit must be None or"),
    "loss_device": (lambda: load_balancing_loss(torch.randn(4, 3), meta(4, 1, dtype=torch.int64), 3), ValueError,
                    "topk_ids must be on the device of router_logits, cpu, got meta"),
    "pack_computed": (lambda: pack_experts([normed()], release=True), ValueError,
                      "gate projection of expert 0 must be a plain parameter to be released"),
    "moe_top_k": (lambda: moe(torch.randn(T, H), torch.randn(E, H), torch.randn(E, H, 2 * I), torch.randn(E, I, H), 4),
                  ValueError, "top_k must be in 1..E=3, got 4"),
    "fuse_shape": (lambda: fuse_gate_up(torch.randn(2, 3), torch.randn(2, 4)), ValueError,
                   "fuse_gate_up: w1 and w3 must both be [..., H, I], got [2, 3] and [2, 4]"),
    "fuse_rank": (lambda: fuse_gate_up(torch.randn(3), torch.randn(3)), ValueError, "must both be [..., H, I]"),
    "fuse_dtype": (lambda: fuse_gate_up(torch.randn(2, 3), torch.randn(2, 3).double()), TypeError,
                   "w3 must have the dtype of w1, torch.float32, got torch.float64"),
    "fuse_device": (lambda: fuse_gate_up(torch.randn(2, 3), meta(2, 3)), ValueError, "w3 must be on the device of w1"),
    "pack_none": (lambda: pack_experts([]), ValueError, "module_list must hold at least one expert, got none"),
    "pack_names": (lambda: pack_experts([nn.Linear(2, 2)]), ValueError,
                   "expert 0 must have Linears gate_proj, up_proj, down_proj or w1, w3, w2, got Linear"),
    "pack_bias": (lambda: pack_experts([Expert(bias=True)]), ValueError,
                  "expert 0 must have no bias, but gate_proj, up_proj, down_proj has one"),
    "pack_shape": (lambda: pack_experts([Expert(), Expert(intermediate=I + 1)]), ValueError,
                   "gate projection of expert 1 must be [5, 6] like that of expert 0, got [6, 6]"),
    "pack_dtype": (lambda: pack_experts([Expert(), Expert(dtype=torch.float64)]), TypeError,
                   "gate projection of expert 1 must have dtype torch.float32"),
    "loss_experts": (lambda: load_balancing_loss(torch.randn(4, 3), torch.zeros(4, 1).long(), 4), ValueError,
                     "router_logits must be [..., E=4], got [4, 3]"),
    "loss_ids": (lambda: load_balancing_loss(torch.randn(4, 3), torch.zeros(5, 1).long(), 3), ValueError,
                 "topk_ids must be [4, K], got [5, 1]"),
    "loss_ids_dtype": (lambda: load_balancing_loss(torch.randn(4, 3), torch.zeros(4, 1), 3), TypeError,
                       "topk_ids must be int32 or int64"),
    "loss_logits_dtype": (lambda: load_balancing_loss(torch.ones(4, 3).long(), torch.zeros(4, 1).long(), 3), TypeError,
                          "router_logits must be floating point"),
    "loss_mask": (lambda: load_balancing_loss(torch.randn(4, 3), torch.zeros(4, 1).long(), 3, mask=torch.ones(3)),
                  ValueError, "mask must be [4], one value a token, got [3]"),
}  # fmt: skip


@pytest.mark.parametrize("case", AROUND.values(), ids=AROUND)
def test_around_the_ops(case):
    run, error, message = case
    with pytest.raises(error, match=re.escape(message)):
        run()


def test_counts_become_offsets_as_the_message_says():
    counts = torch.tensor([2, 2, 3])
    function, arguments = ffn(expert_cumsum=F.pad(counts.cumsum(0), (1, 0)))
    by_counts = function(**arguments)
    function, more = ffn(expert_cumsum=F.pad(torch.tensor([2, 4, 7]), (1, 0)))
    assert torch.equal(by_counts, function(**arguments | {"expert_cumsum": more["expert_cumsum"]}))


def test_python_functions_refuse_alike():
    _, arguments = ffn(w2=torch.randn(E, H, I))
    with pytest.raises(ValueError, match="w2 must be"):
        npu_moe_ops.grouped_swiglu_ffn(**arguments)
