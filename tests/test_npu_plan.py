"""Tiling, launch arguments and refusals of the NPU path: what needs neither pypto nor an NPU."""

import importlib.metadata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_moe_ops.npu import launch, tiling, toolchain
from npu_moe_ops.npu.tiling import Problem, choose

LLADA2 = Problem(experts=256, hidden=2048, intermediate=512, rows=256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
problems = st.builds(
    Problem,
    experts=st.integers(1, 300),
    hidden=st.integers(1, 8000),
    intermediate=st.integers(1, 16000),
    rows=st.integers(0, 40000),
    dtype=st.sampled_from(DTYPES),
)


@settings(max_examples=300)
@given(problems, st.sampled_from(tiling.PRESETS[:-1]))
def test_every_plan_fits_the_chip_and_covers_all_columns(problem, preset):
    plan = choose(problem, preset, environ={})  # checks the limits
    for columns, tile in ((2 * problem.intermediate, plan.up), (problem.hidden, plan.down)):
        count = tiling.parts(columns, tile)
        assert count * tile.width >= columns > (count - 1) * tile.width
        tiles = -(-tile.width // tile.n)
        assert plan.cube_nbuffer >= tiles  # a part is one task
        assert count == 1 or not plan.one_graph


@settings(max_examples=100)
@given(problems, st.lists(st.integers(0, 40000), min_size=2, max_size=2), st.sampled_from(tiling.PRESETS))
def test_order_of_a_rows_sum_does_not_depend_on_other_rows(problem, rows, preset):
    """Row invariance: the K that one step adds up is the same, however many rows there are."""
    few, many = (choose(Problem(**{**problem.__dict__, "rows": n}), preset, environ={}) for n in rows)
    assert (few.up.k0, few.down.k0) == (many.up.k0, many.down.k0)


def test_auto_follows_what_the_host_knows():
    """At LLaDA2's size. 24 cube cores: eight experts get three parts each; many get one, and one root function."""
    prompt, decode = (choose(Problem(8, 2048, 512, rows), environ={}) for rows in (64, 8))
    assert [tiling.parts(1024, plan.up) for plan in (prompt, decode)] == [3, 3]
    assert choose(LLADA2, environ={}).one_graph
    assert choose(Problem(1, 2048, 512, 1), environ={}).up.width < 128
    assert [choose(Problem(8, 2048, 512, n), environ={}).rows for n in (8, 200, 4000)] == [32, 32, 64]


def test_a_plan_is_made_once():
    """Making one takes longer than launching a kernel."""
    assert choose(LLADA2) is choose(Problem(**LLADA2.__dict__))


def test_presets():
    single, original = (choose(LLADA2, preset, environ={}) for preset in ("single", "llada2_original"))
    assert single.unroll == (1,)
    assert original.unroll == (64, 32, 16, 8, 4, 2, 1)
    assert original.split_k
    assert (original.up.n, original.up.k0, original.vector_rows, original.stitch) == (256, 128, 13, 64)
    buffered = choose(LLADA2, "buffered", environ={})
    for tile in (buffered.up, buffered.down):
        tokens = 32 * tiling.token_k(tile, 32, 2) * 2
        assert tokens + 2 * tile.n * tile.kb * 2 <= tiling.L1


def test_original_variables_override_any_plan():
    environ = {
        "PYPTO_CUBE_NBUFFER": "3",
        "PYPTO_VEC_NBUFFER": "4",
        "PYPTO_MM1_K": "32",
        "PYPTO_MM1_N": "64",
        "PYPTO_MM2_K": "48",
        "PYPTO_MM2_N": "80",
        "PYPTO_MM1_M": "32",
        "PYPTO_VEC_FIRST": "8",
        "PYPTO_OTHER": "x",
    }
    plan = choose(Problem(8, 2048, 512, 100), environ=environ)
    assert (plan.cube_nbuffer, plan.vec_nbuffer, plan.vector_rows, plan.unroll) == (3, 4, 8, (1,))
    assert (plan.up.k0, plan.up.ka, plan.up.kb, plan.up.n) == (32, 64, 64, 64)
    assert (plan.down.k0, plan.down.n) == (48, 80)


def test_variables_are_read_when_a_plan_is_made(monkeypatch):
    monkeypatch.setenv("PYPTO_CUBE_NBUFFER", "7")
    assert choose(LLADA2).cube_nbuffer == 7
    monkeypatch.delenv("PYPTO_CUBE_NBUFFER")
    assert choose(LLADA2).cube_nbuffer != 7


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PYPTO_MM1_K": "big"}, "PYPTO_MM1_K must be a positive integer, got 'big'"),
        ({"PYPTO_VEC_FIRST": "0"}, "PYPTO_VEC_FIRST must be a positive integer, got '0'"),
        ({"PYPTO_MM1_N": "24"}, "up.n must be a multiple of 16, got 24"),
        ({"PYPTO_MM2_K": "100"}, "down.k0 must be a multiple of 16, got 100"),
        ({"PYPTO_MM1_N": "1024"}, "up: n [*] k0 must fit L0B of 65536 bytes, got 131072"),
        ({"PYPTO_MM1_K": "1024", "PYPTO_MM1_N": "16"}, "up: rows [*] k0 must fit L0A"),
        ({"PYPTO_VEC_FIRST": "64"}, "vector_rows [*] vector_columns must fit a third of UB"),
        ({"PYPTO_MM1_K": "32", "PYPTO_MM1_N": "1024"}, "up: rows [*] n must fit L0C of 131072 bytes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_tiles_that_do_not_fit_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        choose(Problem(8, 2048, 512, 500), environ=environ)


def test_l1_overflow_is_refused():
    """pypto 0.2.0 compiles it without a word."""
    plan = choose(Problem(8, 2048, 512, 64), environ={})
    wide = tiling.replace(plan, up=tiling.replace(plan.up, kb=1024, ka=2048, n=352))
    with pytest.raises(ValueError, match=r"up: rows \* ka \+ n \* kb must fit L1 of 524288 bytes, got 8"):
        tiling.check(wide, Problem(8, 2048, 512, 64))


def test_weights_in_both_layouts_are_not_copied():
    x, c = torch.randn(4, 6), torch.tensor([0, 1, 4])
    w13, w2 = torch.randn(2, 6, 10), torch.randn(2, 5, 6)
    plain = launch.prepare(x, w13, w2, c)
    turned = launch.prepare(x, w13.mT.contiguous().mT, w2.mT.contiguous().mT, c)
    assert (plain.problem.w13_transposed, turned.problem.w13_transposed) == (False, True)
    assert (plain.problem.w2_transposed, turned.problem.w2_transposed) == (False, True)
    for weight, flat in ((w13, plain.tensors[1]), (w2, plain.tensors[2])):
        assert flat.data_ptr() == weight.data_ptr()
    hugging_face = w13.mT.contiguous()
    assert launch.prepare(x, hugging_face.mT, w2, c).tensors[1].data_ptr() == hugging_face.data_ptr()
    assert turned.tensors[1].shape == (20, 6)
    assert plain.tensors[1].shape == (12, 10)


def test_long_rows_are_refused():
    """The matmul's loads take rows of up to 65535 elements: meta tensors, for nobody has these at hand."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x, w2 = torch.empty(3, 8, **meta), torch.empty(1, 40000, 8, **meta)
    c = torch.empty(2, device="meta", dtype=torch.int32)
    with pytest.raises(ValueError, match="w13 must have rows of at most 65535 elements in memory on 'npu', got 80000"):
        launch.prepare(x, torch.empty(1, 8, 80000, **meta), w2, c)
    launch.prepare(x, torch.empty(1, 80000, 8, **meta).mT, w2, c)


def no_pypto(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_missing_software_is_named(monkeypatch):
    x, w13, w2 = torch.randn(2, 4), torch.randn(1, 4, 6), torch.randn(1, 3, 4)
    arguments = (torch.empty(2, 4), x, w13, w2, torch.tensor([0, 2]), None, 1.0, 0.0)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", no_pypto)
        with pytest.raises(RuntimeError, match=r"pypto >= 0.2.0 must be installed .* got none; pip install 'pypto"):
            launch.grouped_swiglu_ffn(*arguments)
        patch.setattr(importlib.metadata, "version", lambda _: "0.1.1")
        with pytest.raises(RuntimeError, match=r"pypto must be >= 0.2.0, got 0.1.1; pip install"):
            launch.grouped_swiglu_ffn(*arguments)
        patch.setattr(importlib.metadata, "version", lambda _: "0.2.0")
        with pytest.raises(RuntimeError, match=r"ASCEND_HOME_PATH is not set; source set_env.sh"):
            launch.grouped_swiglu_ffn(*arguments)


@pytest.mark.parametrize(
    ("version", "ordered"),
    [("0.2.0", True), ("0.2.1", True), ("9.0.0b1", True), ("9.1.0", False), ("9.2.0-beta.1", False), ("10.0", False)],
)
def test_versions_decide_about_the_hazard(version, ordered, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert toolchain.must_order_bounds() is ordered


def test_validation_switch_raises_before_anything_is_launched(monkeypatch):
    x, w13, w2 = torch.randn(2, 4), torch.randn(1, 4, 6), torch.randn(1, 3, 4)
    monkeypatch.setattr(toolchain, "require_pypto", lambda _: None)
    monkeypatch.setattr(toolchain, "require_cann", lambda _: None)
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("launched"))
    monkeypatch.setenv("NPU_MOE_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"got c\[E\] = 3"):
        launch.grouped_swiglu_ffn(torch.empty(2, 4), x, w13, w2, torch.tensor([0, 3]), None, 1.0, 0.0)
