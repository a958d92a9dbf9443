"""The router's PyPTO kernel in pypto's interpreter, against the oracle on the kernel's own logits.

A problem costs 1 to 3 s, most of it compiling; hence few examples, and none larger than they have to be.
"""

from dataclasses import replace
from importlib.util import find_spec

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_moe_ops import outputs, routing
from npu_moe_ops.npu import router_launch, router_tiling, tiling, toolchain, virtual

if find_spec("pypto") is None:  # not importorskip: virtual.start() has to come before the import
    pytest.skip("needs pypto", allow_module_level=True)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LLADA2 = {"scoring": "sigmoid", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
GROUPED = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
UNWRITTEN = -7


@pytest.fixture(scope="module")
def router():
    virtual.start()
    from npu_moe_ops.npu import router

    return router


def run(router, x, weight, bias, top_k, parts=("all",), passes=virtual.LAST_PASS, want_logits=True, **options):
    """(topk_weights, topk_ids, router_logits) of the kernel, or of its parts one after the other."""
    call = router_launch.prepare(x, weight, bias, top_k, **options)
    problem = replace(call.problem, want_logits=want_logits)
    result = tuple(t.fill_(UNWRITTEN) for t in outputs.topk_router(x, weight, bias, top_k))
    for part in parts:
        kernel = router.build(problem, call.tile, part, **virtual.options(passes))
        found = []
        router_launch.launch(lambda *t, k=kernel, f=found: f.append(virtual.interpret(k, t)), call, result)
        assert not found[0].failed
        assert set(found[0].passed.values()) == {tasks(problem, call.tile, len(x), part)}
    return result


def tasks(problem, tile, tokens, part):
    """How many results the interpreter has to check after a pass. It skips, in silence, what it fails to compute."""
    count = 0
    for first in range(0, tokens, tile.rows):
        if part != "choose":
            count += -(-problem.experts // tile.columns)
            count += -(-problem.hidden // tile.widen_columns) if problem.tokens != problem.weight else 0
        if part != "logits":
            count += 2 * -(-min(tokens - first, tile.rows) // tile.vector_rows)
    return count


def check(router, x, weight, bias, top_k, **options):
    """fp64's logits; on these logits the oracle's ids and weights."""
    weights, ids, logits = run(router, x, weight, bias, top_k, **options)
    error = (logits.double() - x.double() @ weight.double().t()).abs()
    assert (error <= 1e-6 * (x.double().abs() @ weight.double().abs().t())).all()
    options = {name: value for name, value in options.items() if name not in ("passes", "parts")}
    options["scale"] = options.pop("routed_scaling_factor", 1.0)
    bias = None if bias is None else bias.float().tolist()
    for row in range(len(x)):
        if rounding_decides(logits[row].tolist(), bias, **options):
            continue
        expected_weights, expected_ids = oracle.route_row(logits[row].tolist(), top_k, bias=bias, **options)
        assert ids[row].tolist() == expected_ids
        expected_weights = torch.tensor(expected_weights, dtype=torch.float64)
        torch.testing.assert_close(weights[row].double(), expected_weights, rtol=2e-6, atol=0)


def rounding_decides(logits, bias, scoring="softmax", n_group=1, **_):
    """Whether two biased scores, or sums of two, differ by less than fp32 has digits. Equal ones do not count."""
    scores, ids = oracle.route_row(logits, len(logits), scoring=scoring, renormalize=False)
    choice = torch.zeros(len(logits), dtype=torch.float64)
    choice[ids] = torch.tensor(scores, dtype=torch.float64)
    if bias is not None:
        choice += torch.tensor(bias, dtype=torch.float64)
    groups = choice.view(n_group, -1)
    sums = groups.topk(min(2, groups.shape[1])).values.sum(dim=1)
    gaps = torch.cat((choice.sort().values.diff(), sums.sort().values.diff()))
    return bool(((gaps > 0) & (gaps < 1e-6 * choice.abs().max())).any())


def given_logits(logits, dtype=FP32):
    """Tokens and a router weight that make just these logits."""
    logits = torch.as_tensor(logits).to(dtype)
    return logits, torch.eye(logits.shape[1], dtype=dtype)


@st.composite
def problems(draw):
    """Experts are copies of fewer different ones, and so are their biases: equal scores are common."""
    n_group = draw(st.integers(1, 4))
    experts = n_group * draw(st.sampled_from([1, 2, 3, 5, 8]))
    topk_group = draw(st.integers(1, n_group))
    top_k = draw(st.integers(1, min(6, experts // n_group * topk_group)))
    dtype, weight_dtype = draw(st.sampled_from([(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP32, BF16)]))
    tokens, hidden = draw(st.integers(1, 70)), draw(st.integers(1, 130))
    originals = draw(st.integers(1, experts))
    copy = torch.randint(originals, (experts,))
    bias = draw(st.sampled_from([None, 0.0, -3.0]))
    return {
        "x": torch.randn(tokens, hidden).to(dtype),
        "weight": (torch.randn(originals, hidden) / hidden**0.5)[copy].to(weight_dtype),
        "bias": None if bias is None else (torch.randn(originals) * 0.1 + bias)[copy].to(weight_dtype),
        "top_k": top_k,
        "scoring": draw(st.sampled_from(["softmax", "sigmoid"])),
        "n_group": n_group,
        "topk_group": topk_group,
        "renormalize": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }


@settings(max_examples=10)
@given(problem=problems())
def test_any_problem(router, problem):
    check(router, **problem)


def test_llada2(router):
    """Its real sizes, a partly valid block, and the same numbers after every pass of the compiler."""
    x, weight = torch.randn(33, 2048).bfloat16(), (torch.randn(256, 2048) / 2048**0.5).bfloat16()
    check(router, x, weight, torch.randn(256) * 0.05, 8, passes=virtual.ALL_PASSES, **LLADA2)


TIES = {
    "all_equal": [0.0] * 32,
    "neighbours": torch.randn(16).repeat_interleave(2).tolist(),
    "across_groups": torch.randn(16).repeat(2).tolist(),
    "equal_groups": torch.randn(8).repeat(4).tolist(),
    "last_place": [2.0] * 3 + [1.0] * 29,  # the sixth is one of 29 equal ones
}


@pytest.mark.parametrize("options", [{}, GROUPED], ids=["softmax", "grouped"])
def test_ties_go_to_the_lowest_id(router, options):
    check(router, *given_logits(list(TIES.values())), None, 6, **options)


def test_one_ulp_is_no_tie(router):
    """Scores in 0.5..1, of which the odd experts' are the next number up."""
    logits = torch.linspace(0.5, 4, 16)[torch.randperm(16)].repeat_interleave(2).unsqueeze(0)
    bias = torch.tensor([0.0, 6e-8]).repeat(16)
    _, ids, _ = run(router, *given_logits(logits), bias, 8, scoring="sigmoid")
    best = logits[0, ::2].argsort(descending=True)[:4]
    assert ids.view(4, 2).tolist() == [[2 * e + 1, 2 * e] for e in best.tolist()]


def test_dropped_groups_lose_even_to_negative_scores(router):
    """As in test_routing.py: at 0, or with a bias within reach, a dropped expert would be chosen."""
    bias = torch.tensor([-2.0, -3.0, -4.0, -5.0])
    weights, ids, _ = run(
        router, *given_logits(torch.zeros(1, 4)), bias, 2, scoring="sigmoid", n_group=2, renormalize=False
    )
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_infinite_bias(router):
    """-inf takes an expert, or a group, out of the choice as long as there are others; none is chosen twice."""
    bias = torch.tensor([-torch.inf, 0, 0, torch.inf, 0, -torch.inf, 0, 0])
    x, weight = given_logits([[0.0, 1, 2, 3, 4, 5, 6, 7]])
    assert run(router, x, weight, bias, 8, scoring="sigmoid")[1].tolist() == [[3, 7, 6, 4, 2, 1, 0, 5]]
    ids = run(router, x, weight, bias, 4, scoring="sigmoid", n_group=4, topk_group=2)[1]
    assert ids.tolist() == [[3, 7, 6, 2]]


def test_nan_rows_get_ids_of_experts(router):
    x, weight = torch.randn(5, 24), torch.randn(16, 24)
    clean = run(router, x, weight, None, 3, **GROUPED)
    x[1], x[3, 3] = torch.nan, torch.nan
    weights, ids, logits = run(router, x, weight, None, 3, **GROUPED)
    expected = outputs.topk_router(x, weight, None, 3)
    routing.topk_router(expected, x, weight, None, 3, renormalize=True, **GROUPED)
    for row in (1, 3):
        assert ids[row].tolist() == expected[1][row].tolist() == [0, 1, 2]
        assert weights[row].isnan().all()
        assert logits[row].isnan().all()
    for row in (0, 2, 4):
        assert all(torch.equal(a[row], b[row]) for a, b in zip((weights, ids, logits), clean, strict=True))


def test_all_experts_of_an_odd_number(router):
    check(router, torch.randn(3, 5), torch.randn(13, 5), torch.randn(13), 13, renormalize=False)


def test_tokens_widened_and_loaded_in_pieces(router):
    check(router, torch.randn(3, 2100).bfloat16(), torch.randn(9, 2100) / 2100**0.5, None, 2)


def test_one_expert(router):
    check(router, torch.randn(4, 1).bfloat16(), torch.randn(1, 1).bfloat16(), None, 1)


def test_logits_that_nobody_wants_are_not_written(router):
    x, weight = torch.randn(40, 16), torch.randn(12, 16)
    wanted = run(router, x, weight, None, 3)
    unwanted = run(router, x, weight, None, 3, want_logits=False)
    assert torch.equal(unwanted[0], wanted[0])
    assert torch.equal(unwanted[1], wanted[1])
    assert (unwanted[2] == UNWRITTEN).all()


def test_two_kernels_make_one(router):
    x, weight, bias = torch.randn(40, 16).bfloat16(), torch.randn(12, 16).bfloat16(), torch.randn(12)
    whole = run(router, x, weight, bias, 3)
    halves = run(router, x, weight, bias, 3, parts=("logits", "choose"))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def test_no_tokens(router):
    def never(*_):
        raise AssertionError("launched")

    x, weight = torch.empty(0, 8), torch.randn(4, 8)
    router_launch.launch(never, router_launch.prepare(x, weight, None, 2), outputs.topk_router(x, weight, None, 2))


def highest_id(values, ids):
    import pypto

    highest = pypto.amax(values, -1, True)
    best = pypto.amax(pypto.where(pypto.eq(values, highest), ids, -1.0), -1, True)
    return best, pypto.where(pypto.eq(ids, best), -3e38, values)


def never_dropped(take_best):
    return lambda values, ids: (take_best(values, ids)[0], values)


def weighed_by_choice(scores):
    return lambda *arguments: scores(*arguments)[1:] * 2  # (choice, choice)


def sum_without_second(values, ids):
    import pypto

    return pypto.amax(values, -1, True)


BROKEN = {
    "highest_id": ("_take_best", lambda old: highest_id),
    "chosen_again": ("_take_best", never_dropped),
    "bias_in_weights": ("_scores", weighed_by_choice),
    "groups_by_their_best": ("_sum_of_two_best", lambda old: sum_without_second),
    "never_normalised": ("_weights", lambda old: lambda s, p: old(s, replace(p, renormalize=False))),
    "one_group_fewer": ("_of_kept_groups", lambda old: lambda c, i, r, p: old(c, i, r, replace(p, topk_group=2))),
    "infinity_too_low": ("DROPPED", lambda old: 0.0),
}


@pytest.mark.parametrize(("name", "breaks"), BROKEN.values(), ids=BROKEN)
def test_check_catches_a_broken_kernel(router, monkeypatch, name, breaks):
    paired, single = torch.randn(64, 4), torch.randn(64, 8)  # half of the experts with ties, half without
    logits = torch.cat([paired.repeat_interleave(2, dim=1), single], dim=1)
    bias = torch.cat([torch.randn(4).repeat_interleave(2), torch.randn(8)]) / 10 - 1.5  # all biased scores below 0
    problem = (*given_logits(logits), bias, 5)
    options = {**GROUPED, "topk_group": 3}
    if name == "_take_best":
        check(router, *problem, **options)  # the kernel as it is passes
    monkeypatch.setattr(router, name, breaks(getattr(router, name)))
    with pytest.raises(AssertionError):
        check(router, *problem, **options)


@given(
    st.integers(0, 5000),
    st.integers(1, 700),
    st.integers(1, 9000),
    st.sampled_from([(BF16, BF16), (FP32, FP32), (BF16, FP32)]),
)
def test_tiles_fit_the_chip(tokens, experts, hidden, dtypes):
    problem = router_tiling.RouterProblem(*dtypes, has_bias=False, hidden=hidden, experts=experts, top_k=1)
    tile, size = router_tiling.choose_tile(problem, tokens), dtypes[1].itemsize
    assert tile.columns % 16 == tile.k0 % 16 == tile.k1 % tile.k0 == tile.rows % tile.vector_rows == 0
    assert tile.rows * tile.k0 * size <= tiling.L0A
    assert tile.columns * tile.k0 * size <= tiling.L0B
    assert tile.rows * tile.columns * 4 <= tiling.L0C
    assert (tile.rows + tile.columns) * tile.k1 * size <= tiling.L1
    assert tile.vector_rows * experts * 4 <= tiling.UB // 6
    assert tile.rows * tile.widen_columns * (4 + 2) <= tiling.UB


def test_refusals(monkeypatch):
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(TypeError, match="hidden_states must be bfloat16, float16 or float32 on 'npu', got float64"):
        router_launch.prepare(x.double(), weight, None, 2)
    with pytest.raises(ValueError, match="hidden_states must have rows of at most 65535 elements on 'npu', got 65536"):
        router_launch.prepare(torch.empty(0, 65536), torch.empty(4, 65536), None, 2)
    with pytest.raises(ValueError, match="router_weight must have at most 8192 rows on 'npu', got 8193"):
        router_launch.prepare(x, torch.empty(8193, 8), None, 2)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(toolchain.Missing, match="topk_router: CANN must be set up"):
        router_launch.topk_router(
            outputs.topk_router(x, weight, None, 2), x, weight, None, 2, "softmax", 1, 1, True, 1.0
        )
