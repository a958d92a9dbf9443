"""The NPU kernel's numbers, in pypto's interpreter, against exact arithmetic; and that a broken kernel is caught."""

from dataclasses import replace
from importlib.util import find_spec

import cases
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_moe_ops.npu import launch, simulate, tiling, toolchain, virtual
from npu_moe_ops.testing import TOLERANCE, expert_cumsums, layer_shapes

if find_spec("pypto") is None:  # not importorskip: virtual.start() has to come before the import
    pytest.skip("needs pypto", allow_module_level=True)

GUARD = 5  # rows of NaN around every tensor
NPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def kernel():
    virtual.start()
    from npu_moe_ops.npu import kernel

    return kernel


def guarded(tensor):
    """The same values between rows of NaN, and those rows."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    store = rows.new_full((len(rows) + 2 * GUARD, rows.shape[1]), torch.nan)
    store[GUARD : GUARD + len(rows)] = rows
    inner = store[GUARD : GUARD + len(rows)].view(tensor.shape)
    return inner, (store[:GUARD], store[GUARD + len(rows) :])


def laid_out(weight, transposed):
    return guarded(weight.transpose(1, 2).contiguous())[0].transpose(1, 2) if transposed else guarded(weight)[0]


def launched(
    kernel, x, w13, w2, c, *, transposed=False, preset="auto", passes=virtual.LAST_PASS, swiglu=(), whole=True
):
    """What the kernel writes, with NaN in memory on all sides of every tensor, which must stay where it is."""
    call = launch.prepare(guarded(x)[0], laid_out(w13, transposed), laid_out(w2, transposed), c)
    plan = tiling.choose(call.problem, preset, environ={})
    order = toolchain.must_order_bounds()
    built = kernel.build(call.problem, plan, kernel.SwiGLU(*swiglu), order, **virtual.options(passes, plan.stitch))
    out, guards = guarded(torch.full_like(x, torch.nan))
    found = []
    launch.launch(lambda *tensors: found.append(virtual.interpret(built, tensors)), call, out)
    for guard in guards:
        assert guard.isnan().all(), "wrote outside its rows"
    for result in found:
        assert not result.failed
        counts = call.tensors[3].diff().tolist()
        assert not whole or set(result.passed.values()) == {results(call.problem, plan, counts) + order}
    return out.clone()


def results(problem, plan, counts):
    """How many results the interpreter has to check after a pass. It skips, in silence, what it fails to compute."""
    each = 1
    if not plan.one_graph:
        each += tiling.parts(2 * problem.intermediate, plan.up) + tiling.parts(problem.hidden, plan.down)
    passes = 0
    for count in counts:
        units = -(-count // plan.rows)
        for factor in plan.unroll:
            passes += units // factor
            units %= factor
    return passes * each


def assert_right(kernel, x, w13, w2, counts, *, times=1, swiglu=(), **options):
    out = launched(kernel, x, w13, w2, cases.offsets(counts), swiglu=swiglu, **options)
    names = dict(zip(("limit", "alpha", "beta"), swiglu, strict=False))
    expected = oracle.ffn(x, w13, w2, counts, round_to=x.dtype, **names)
    tolerance = times * TOLERANCE[x.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=10)
@given(
    layer_shapes(max_tokens=30, max_hidden_size=80, max_intermediate_size=50),
    st.data(),
    st.sampled_from(NPU_DTYPES),
    st.booleans(),
    st.sampled_from(tiling.PRESETS),
)
def test_any_distribution(kernel, shape, data, dtype, transposed, preset):
    """Balanced, uneven, skewed, empty: units of all widths, sizes that are no multiple of anything, tail rows."""
    n = shape.tokens * shape.top_k
    counts = data.draw(expert_cumsums(shape.num_experts, n)).diff().tolist()
    x, w13, w2, _ = cases.ffn_inputs(n, shape.hidden_size, shape.intermediate_size, counts, dtype)
    assert_right(kernel, x, w13, w2, counts, transposed=transposed, preset=preset)


# Rows of the experts, and why.
DISTRIBUTIONS = {
    "mixed_widths": (0, 1, 33, 64, 65, 31, 0, 130),  # a unit less one, full, and one more; several units
    "one_row": (1,),
    "many_experts": (1,) * 20 + (0,) * 20 + (3,) * 5,  # few rows each: one part, one root function
    "balanced": (16,) * 6,
    "long": (300, 0, 200),  # wide units of 128 rows
}


@pytest.mark.parametrize(
    ("counts", "preset"),
    [(counts, "auto") for counts in DISTRIBUTIONS.values()] + [(DISTRIBUTIONS["mixed_widths"], "buffered")],
    ids=[*DISTRIBUTIONS, "mixed_widths_buffered"],
)
def test_named_distributions(kernel, counts, preset):
    """H and I of several tiles, so that parts, tiles and their ragged ends all take part."""
    x, w13, w2, _ = cases.ffn_inputs(sum(counts) + 3, 200, 88, counts, torch.bfloat16)  # 3 tail rows
    assert_right(kernel, x, w13, w2, counts, transposed=len(counts) % 2 == 1, preset=preset)


@pytest.mark.parametrize(
    ("transposed", "counts"),
    [(False, (0, 1, 2, 4, 8, 16, 32, 0)), (True, (3, 0, 33))],
    ids=["[E,H,2I]", "[E,2I,H]"],
)
def test_llada2_size(kernel, transposed, counts):
    """H = 2048, I = 512, in the first case with the counts of the original's test: within its 8e-3, and tighter."""
    x, w13, w2, c = cases.ffn_inputs(sum(counts), 2048, 512, counts, torch.bfloat16)
    out = launched(kernel, x, w13, w2, c, transposed=transposed).double()
    expected = oracle.ffn(x, w13, w2, counts, round_to=torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=8e-3, atol=8e-3)
    error = (out - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 2**-8 / 3**0.5  # a rounding of bf16 is within 2^-8, uniform


LIMITS = [
    ((0.5, 1.0, 0.0), torch.bfloat16),
    ((0.4, 1.702, 1.0), torch.float16),
    ((None, 2.0, -0.5), torch.float32),
]


@pytest.mark.parametrize(("swiglu", "dtype"), LIMITS, ids=str)
def test_limit_alpha_beta(kernel, swiglu, dtype):
    counts = (3, 0, 17, 40)
    x, w13, w2, _ = cases.ffn_inputs(sum(counts), 48, 40, counts, dtype)
    assert_right(kernel, x, w13, w2, counts, swiglu=swiglu)


def test_limit_at_llada2_size_fits_the_vector_buffer(kernel):
    counts = (40,)
    x, w13, w2, _ = cases.ffn_inputs(sum(counts), 128, 512, counts, torch.bfloat16)
    assert_right(kernel, x, w13, w2, counts, swiglu=(0.5, 1.702, 1.0))


@pytest.mark.parametrize("preset", tiling.PRESETS)
def test_every_pass_of_the_compiler(kernel, preset):
    counts = (5, 0, 36)
    x, w13, w2, _ = cases.ffn_inputs(sum(counts), 72, 40, counts, torch.bfloat16)
    assert_right(kernel, x, w13, w2, counts, preset=preset, passes=virtual.ALL_PASSES)


def test_all_passes_are_many(kernel):
    counts = (2, 3)
    x, w13, w2, c = cases.ffn_inputs(5, 32, 16, counts, torch.float32)
    found = simulate.run(x, w13, w2, c, passes=virtual.ALL_PASSES).passes
    assert len(found.passed) > 30
    assert found.passed["Pass_36_CodegenPreproc"] > 0


def test_renaming_experts_gives_the_same_bits(kernel):
    counts, order = (7, 0, 33, 2, 64), (3, 0, 4, 1, 2)
    x, w13, w2, c = cases.ffn_inputs(sum(counts), 64, 48, counts, torch.bfloat16)
    rows = torch.cat([torch.arange(c[e], c[e + 1]) for e in order])
    renamed_c = cases.offsets([counts[e] for e in order])
    renamed = launched(kernel, x[rows], w13[list(order)], w2[list(order)], renamed_c)
    assert torch.equal(renamed, launched(kernel, x, w13, w2, c)[rows])


def test_nan_stays_in_its_row_and_expert(kernel):
    counts = (3, 40, 2)
    x, w13, w2, c = cases.ffn_inputs(sum(counts), 48, 32, counts, torch.float32)
    clean = launched(kernel, x, w13, w2, c)
    x[4, 7] = torch.nan
    w13[2, 1] = torch.nan
    got = launched(kernel, x, w13, w2, c)
    others = [row for row in range(43) if row != 4]
    assert torch.equal(got[others], clean[others])
    assert got[4].isnan().all()
    assert got[43:].isnan().all()


BAD_OFFSETS = {
    "beyond": [0, 4, 9999],
    "negative": [-7, 2, 5],
    "decreasing": [0, 6, 2],
    "far_beyond": [0, 2**40, 2**41],
    "gap": [3, 4, 6],
}


@pytest.mark.parametrize("offsets", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
def test_bad_offsets_do_no_harm(kernel, offsets):
    """Values are not looked at on an NPU: no hang, nothing written outside, rows of no expert 0."""
    x, w13, w2, _ = cases.ffn_inputs(6, 32, 16, (3, 3), torch.float32)
    c = torch.tensor(offsets)
    out = launched(kernel, x, w13, w2, c)
    safe = c.clamp(0, 6).cummax(0).values.tolist()
    assert torch.count_nonzero(out[: safe[0]]) == 0
    assert torch.count_nonzero(out[safe[-1] :]) == 0
    assert torch.count_nonzero(out[safe[0] : safe[-1]]) > 0


def test_no_rows(kernel):
    x, w13, w2, c = cases.ffn_inputs(0, 16, 16, (0, 0), torch.bfloat16)
    assert launched(kernel, x, w13, w2, c).shape == (0, 16)
    found = simulate.run(x, w13, w2, c)
    assert found.out.shape == (0, 16)
    assert not found.passes.passed


def test_run_takes_what_the_op_takes():
    """Flat and strided weights, int64 offsets, an output in any layout: and refuses what it refuses."""
    counts = (2, 0, 5)
    x, w13, w2, c = cases.ffn_inputs(7, 24, 16, counts, torch.float32)
    expected = torch.ops.npu_moe.grouped_swiglu_ffn(x, w13, w2, c)
    with pytest.warns(UserWarning, match=r"w13 with strides .* is copied on every call"):
        got = simulate.run(cases.MEMORY["sliced"](x), cases.MEMORY["sliced"](w13), cases.flat(w2), c.long())
    torch.testing.assert_close(got.out, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"w13 must be \[E\*H, 2\*I\]"):
        simulate.run(x, w13[:2], w2, c)
    with pytest.raises(ValueError, match=r"got c\[0\] = 2"):
        simulate.run(x, w13, w2, torch.tensor([2, 2, 2, 7]))
    with pytest.raises(TypeError, match=r"must be bfloat16, float16 or float32 on 'npu', got float64"):
        simulate.run(x.double(), w13.double(), w2.double(), c)
    with pytest.raises(ValueError, match=r"preset must be one of auto, .* got 'fast'"):
        simulate.run(x, w13, w2, c, plan="fast")


def test_output_in_another_layout(kernel):
    x, w13, w2, c = cases.ffn_inputs(7, 24, 16, (2, 5), torch.float32)
    call = launch.prepare(x, w13, w2, c)
    plan = tiling.choose(call.problem)
    built = kernel.build(call.problem, plan, kernel.SwiGLU(), **virtual.options())
    out = torch.full((24, 7), torch.nan).t()
    launch.launch(lambda *tensors: virtual.interpret(built, tensors), call, out)
    torch.testing.assert_close(out, torch.ops.npu_moe.grouped_swiglu_ffn(x, w13, w2, c), rtol=1e-5, atol=1e-5)


# A kernel with one fault must not pass `assert_right`. Each names what it breaks.


def broken(kernel, patch, name, change):
    """Replace a helper of the kernel by one that gets its unit changed."""
    whole = getattr(kernel, name)

    def other(first, second, *rest):
        if isinstance(first, kernel.Unit):
            return whole(change(first), second, *rest)
        if isinstance(second, kernel.Unit):
            return whole(first, change(second), *rest)
        return whole(first, second, change(rest[0]), *rest[1:])

    patch.setattr(kernel, name, other)


def swapped_halves(kernel, patch):
    view = kernel.pypto.view

    def other_half(tensor, shape, offset, valid_shape=None):
        if shape[1] == INTERMEDIATE and tensor.shape[1] >= 2 * INTERMEDIATE and offset[0] == 0:
            offset = [0, INTERMEDIATE - offset[1]]
        return view(tensor, shape, offset, valid_shape=valid_shape)

    patch.setattr(kernel.pypto, "view", other_half)


def read_one_row_late(kernel, patch):
    broken(kernel, patch, "_up", lambda unit: replace(unit, start=unit.start + 1))


def wrote_one_row_more(kernel, patch):
    broken(kernel, patch, "_activate", lambda unit: replace(unit, valid=unit.valid + 1))
    broken(kernel, patch, "_up", lambda unit: replace(unit, valid=unit.valid + 1))
    view = kernel.pypto.view

    def one_more(tensor, shape, offset, valid_shape=None):
        if list(shape)[1:] == [INTERMEDIATE] and offset == [0, 0] and tensor.shape[1] == INTERMEDIATE:
            valid_shape = [valid_shape[0] + 1, valid_shape[1]]
        return view(tensor, shape, offset, valid_shape=valid_shape)

    patch.setattr(kernel.pypto, "view", one_more)


def left_out_a_row(kernel, patch):
    broken(kernel, patch, "_up", lambda unit: replace(unit, valid=unit.valid - 1))


def took_the_first_expert(kernel, patch):
    broken(kernel, patch, "_down", lambda unit: replace(unit, expert=0))


def lost_the_last_part(kernel, patch):
    whole = kernel.parts

    def fewer(columns, tile):
        return max(1, whole(columns, tile) - 1)

    patch.setattr(kernel, "parts", fewer)


def forgot_the_sigmoid(kernel, patch):
    def same(x):
        return kernel.pypto.mul(x, 1.0)

    patch.setattr(kernel.pypto, "exp", same)


INTERMEDIATE = 24
MUTATIONS = (
    swapped_halves,
    read_one_row_late,
    wrote_one_row_more,
    left_out_a_row,
    took_the_first_expert,
    lost_the_last_part,
    forgot_the_sigmoid,
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_kernel_is_caught(kernel, mutate, monkeypatch):
    """By wrong numbers, not by an error of the compiler: that would prove nothing about the checks above."""
    counts = (3, 0, 35, 9)
    x, w13, w2, _ = cases.ffn_inputs(sum(counts) + 2, 40, INTERMEDIATE, counts, torch.float32)  # 2 tail rows
    mutate(kernel, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        assert_right(kernel, x, w13, w2, counts, whole=False)


def control_flow(kernel, order):
    counts = (1, 2)
    x, w13, w2, c = cases.ffn_inputs(3, 16, 16, counts, torch.float32)
    call = launch.prepare(x, w13, w2, c)
    built = kernel.build(call.problem, tiling.choose(call.problem), kernel.SwiGLU(), order, **virtual.options())
    before = set(virtual.start().glob("output_*"))
    virtual.interpret(built, (*call.tensors, torch.empty_like(x)))
    (folder,) = set(virtual.start().glob("output_*")) - before
    return next(folder.glob("kernel_aicpu/controlFlow_host*.cpp")).read_text()


def test_offsets_are_read_after_the_stream_has_come_so_far(kernel):
    """Under graph capture nothing else orders the loop bounds after the op that computes the offsets."""

    def waits_first(source):
        return 0 < source.find("WaitAicoreStart(") < source.find("RUNTIME_GetInputDataInt32Dim1(")

    assert waits_first(control_flow(kernel, True))
    assert not waits_first(control_flow(kernel, False))


def test_working_directory_stays_clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, w13, w2, c = cases.ffn_inputs(3, 16, 16, (1, 2), torch.float32)
    simulate.run(x, w13, w2, c)
    assert not list(tmp_path.iterdir())
