"""grouped_swiglu_ffn, forward: numbers, layouts, edges and guarantees."""

import gc
import threading

import cases
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import npu_moe_ops
from npu_moe_ops import cpu, native, reference
from npu_moe_ops.testing import TOLERANCE, expert_cumsums, layer_shapes

ffn = torch.ops.npu_moe.grouped_swiglu_ffn


@pytest.fixture(scope="module", autouse=True, params=["kernel", "torch"])
def way(request):
    """Every test of this file twice: with the native kernel, and as where it cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "_kernel", native.Kernel(None, reason="a test"))
        yield request.param


def assert_right(actual, expected, dtype, times=1):
    assert actual.dtype == dtype
    tolerance = times * TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def exact(x, w13, w2, counts, **swiglu):
    return oracle.ffn(x, w13, w2, counts, round_to=x.dtype, **swiglu)


def reference_ffn(x, w13, w2, c, limit=None, alpha=1.0, beta=0.0):
    out = torch.full_like(x, torch.nan)
    reference.grouped_swiglu_ffn(out, x, w13, w2, c, limit, alpha, beta)
    return out


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES.values(), ids=cases.SHAPES)
def test_op_and_reference_match_exact_arithmetic(shape, dtype):
    x, w13, w2, c = cases.ffn_inputs(*shape, dtype)
    expected = exact(x, w13, w2, shape[-1])
    assert_right(ffn(x, w13, w2, c), expected, dtype)
    assert_right(reference_ffn(x, w13, w2, c), expected, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("memory", cases.MEMORY.values(), ids=cases.MEMORY)
@pytest.mark.parametrize("form", [cases.flat, lambda w: w], ids=["flat", "3d"])
def test_any_memory_layout(form, memory, dtype):
    n, hidden, intermediate, counts = cases.SHAPES["mixed"]
    x, w13, w2, c = cases.ffn_inputs(n, hidden, intermediate, counts, dtype)
    got = ffn(memory(x), memory(form(w13)), memory(form(w2)), memory(c.unsqueeze(0)).squeeze(0))
    assert_right(got, exact(x, w13, w2, counts), dtype)
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_flat_and_3d_weights_may_be_mixed(dtype):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"], dtype)
    assert torch.equal(ffn(x, cases.flat(w13), w2, c), ffn(x, w13, cases.flat(w2), c))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_expanded_inputs(dtype):
    """Stride 0: one token for all rows, one weight for all experts."""
    counts = (2, 0, 5)
    x, w13, w2, _ = cases.ffn_inputs(1, 12, 6, (1,), dtype)
    x, w13, w2 = x.expand(7, -1), w13.expand(3, -1, -1), w2.expand(3, -1, -1)
    assert_right(ffn(x, w13, w2, cases.offsets(counts)), exact(x, w13, w2, counts), dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("swiglu", [(0.5, 1.0, 0.0), (0.4, 1.702, 1.0), (None, 2.0, -0.5), (0.0, 1.0, 1.0)], ids=str)
def test_limit_alpha_beta(swiglu, dtype):
    limit, alpha, beta = swiglu
    n, hidden, intermediate, counts = cases.SHAPES["mixed"]
    x, w13, w2, c = cases.ffn_inputs(n, hidden, intermediate, counts, dtype)
    expected = exact(x, w13, w2, counts, limit=limit, alpha=alpha, beta=beta)
    assert_right(ffn(x, w13, w2, c, swiglu_limit=limit, swiglu_alpha=alpha, swiglu_beta=beta), expected, dtype)
    assert_right(reference_ffn(x, w13, w2, c, limit, alpha, beta), expected, dtype)


@pytest.mark.parametrize("bf16_dot", [False, True], ids=["emulated", "native"])
def test_both_bf16_ways(bf16_dot, monkeypatch):
    """Large experts, as a CPU without bf16 instructions multiplies them and as one with, whatever this CPU has."""
    monkeypatch.setattr(cpu, "has_bf16_dot", lambda: bf16_dot)
    monkeypatch.setattr(cpu, "LARGE_EXPERT", 1)
    for shape in cases.SHAPES.values():
        x, w13, w2, c = cases.ffn_inputs(*shape, torch.bfloat16)
        assert_right(ffn(x, w13, w2, c), exact(x, w13, w2, shape[-1]), torch.bfloat16, times=4)


@settings(max_examples=60)
@given(layer_shapes(), st.data(), st.sampled_from(cases.DTYPES))
def test_any_distribution(shape, data, dtype):
    n = shape.tokens * shape.top_k
    c = data.draw(expert_cumsums(shape.num_experts, n))
    counts = c.diff().tolist()
    x, w13, w2, _ = cases.ffn_inputs(n, shape.hidden_size, shape.intermediate_size, counts, dtype)
    assert_right(ffn(x, w13, w2, c), exact(x, w13, w2, counts), dtype)


@settings(max_examples=25)
@given(layer_shapes(), st.data(), st.sampled_from(cases.DTYPES))
def test_renaming_experts_changes_nothing(shape, data, dtype):
    """The same experts in another order, with their rows: the same numbers for each row."""
    counts = data.draw(expert_cumsums(shape.num_experts, shape.tokens, "uneven")).diff().tolist()
    x, w13, w2, c = cases.ffn_inputs(sum(counts), shape.hidden_size, shape.intermediate_size, counts, dtype)
    order = data.draw(st.permutations(range(len(counts))))
    rows = torch.cat([torch.arange(c[e], c[e + 1]) for e in order])
    renamed = ffn(x[rows], w13[list(order)], w2[list(order)], cases.offsets([counts[e] for e in order]))
    assert_right(renamed, ffn(x, w13, w2, c)[rows].double(), dtype)


def test_int64_offsets():
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"])
    assert torch.equal(ffn(x, w13, w2, c.long()), ffn(x, w13, w2, c))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_tail_rows_are_zero_whatever_memory_held(dtype):
    n, hidden, intermediate, counts = 40, 64, 32, (3, 0, 4)
    x, w13, w2, c = cases.ffn_inputs(n, hidden, intermediate, counts, dtype)
    x[7:] = torch.nan
    poison = [torch.full((n, hidden), torch.nan, dtype=dtype) for _ in range(8)]
    del poison
    out = torch.full((n, hidden), torch.nan, dtype=dtype)
    ffn(x, w13, w2, c, out=out)
    for y in (out, ffn(x, w13, w2, c)):
        assert torch.count_nonzero(y[7:]) == 0
        assert_right(y[:7], exact(x[:7], w13, w2, counts), dtype)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_nan_and_inf_stay_in_their_row_and_expert(dtype, bad):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"], dtype)
    clean = ffn(x, w13, w2, c)
    for row in (2, 5, 20):
        dirty = x.clone()
        dirty[row, 3] = bad
        got = ffn(dirty, w13, w2, c)
        others = torch.arange(len(x)) != row
        assert torch.equal(got[others], clean[others])
        assert not got[row].isfinite().all()
    for weight in (w13, w2):
        saved, weight[3, 1] = weight[3, 1].clone(), bad
        got = ffn(x, w13, w2, c)
        weight[3, 1] = saved
        others = (torch.arange(len(x)) < 6) | (torch.arange(len(x)) >= 15)  # expert 3 owns rows 6..14
        assert torch.equal(got[others], clean[others])
        assert not got[~others].isfinite().all()


def test_fp16_sums_do_not_overflow():
    """gate and up past fp16's 65504 are kept in fp32; only the result must fit."""
    x = torch.full((5, 64), 64.0, dtype=torch.float16)
    w13 = torch.cat((torch.full((1, 64, 8), 64.0), torch.full((1, 64, 8), 1e-6)), -1).half()
    w2 = torch.full((1, 8, 64), 1e-3, dtype=torch.float16)
    assert_right(ffn(x, w13, w2, cases.offsets((5,))), exact(x, w13, w2, (5,)), torch.float16)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_result_is_fresh_and_inputs_are_kept(dtype):
    inputs = cases.ffn_inputs(*cases.SHAPES["mixed"], dtype)
    copies = [t.clone() for t in inputs]
    y = ffn(*inputs)
    assert all(torch.equal(t, copy) for t, copy in zip(inputs, copies, strict=True))
    assert not any(y.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in inputs)
    assert torch.equal(ffn(*inputs), y)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_out(dtype):
    inputs = cases.ffn_inputs(*cases.SHAPES["tail_rows"], dtype)
    out = torch.full_like(inputs[0], torch.nan)
    strided = torch.full((*out.shape, 2), torch.nan, dtype=dtype)[..., 0]
    assert ffn(*inputs, out=out) is out
    assert npu_moe_ops.grouped_swiglu_ffn(*inputs, out=strided) is strided
    assert torch.equal(out, ffn(*inputs))
    assert torch.equal(strided, out)


def test_transposed_weights_are_not_copied():
    """Hugging Face's layout: at no time is more than one expert's worth of weights allocated."""
    experts, hidden, intermediate = 64, 256, 128
    x, w13, w2, c = cases.ffn_inputs(256, hidden, intermediate, (4,) * experts, torch.bfloat16)
    w13, w2 = (cases.MEMORY["transposed"](w) for w in (w13, w2))
    ffn(x, w13, w2, c)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        ffn(x, w13, w2, c)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    one_expert = 4 * 3 * hidden * intermediate  # widened to fp32
    rows = 256 * (4 * 2 * intermediate * 3 + 2 * hidden * 2)  # gate, up and h of all rows, the output
    assert 0 < peak < one_expert + rows
    assert peak < 0.3 * (w13.numel() + w2.numel()) * 2


def test_offsets_past_2_31_elements():
    """w13 has 2.16e9 elements; only the last expert is ever written or read."""
    experts, hidden, intermediate, n = 257, 4096, 1024, 3
    w13 = torch.empty(experts, hidden, 2 * intermediate, dtype=torch.bfloat16)
    w2 = torch.empty(experts, intermediate, hidden, dtype=torch.bfloat16)
    assert w13.numel() > 2**31
    x, last13, last2, _ = cases.ffn_inputs(n, hidden, intermediate, (n,), torch.bfloat16)
    w13[-1], w2[-1] = last13[0], last2[0]
    c = cases.offsets((0,) * (experts - 1) + (n,))
    expected = exact(x, last13, last2, (n,))
    for form in (cases.flat, lambda w: w):
        assert_right(ffn(x, form(w13), form(w2), c), expected, torch.bfloat16, times=4)
    del w13, w2
    gc.collect()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_eight_threads_give_the_bits_of_one(dtype):
    inputs = [cases.ffn_inputs(64, 96, 48, (7, 0, 30, 1, 26), dtype) for _ in range(8)]
    alone = [ffn(*args) for args in inputs]
    wrong, start = [], threading.Barrier(8)

    def work(k):
        start.wait()
        for _ in range(20):
            if not torch.equal(ffn(*inputs[k]), alone[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_dispatch_mode_sees_the_op():
    """Also without gradients, where a CPU's kernel is asked before the dispatcher goes on."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    args = cases.ffn_inputs(*cases.SHAPES["mixed"])
    with torch.no_grad(), Watch():
        torch.ops.npu_moe.grouped_swiglu_ffn(*args)
    assert torch.ops.npu_moe.grouped_swiglu_ffn.default in seen
