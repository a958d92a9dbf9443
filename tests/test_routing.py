"""topk_router, permute, unpermute: by hand, against the oracle, on any routing."""

import cases
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_moe_ops.testing import TOLERANCE, layer_shapes, routings

op = torch.ops.npu_moe
DEEPSEEK = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
OPTIONS = {
    "softmax": {},
    "softmax_raw": {"renormalize": False},
    "sigmoid": {"scoring": "sigmoid"},
    "deepseek_v3": DEEPSEEK,
    "softmax_grouped": {"n_group": 2, "topk_group": 1},
    "groups_of_one": {"n_group": 12, "topk_group": 5},
}


def as_oracle(options):
    renamed = {"routed_scaling_factor": "scale"}
    return {renamed.get(name, name): value for name, value in options.items()}


def choose(logits, top_k, bias=None, **options):
    """Route given logits: an identity router."""
    logits = torch.as_tensor(logits, dtype=torch.float64)
    bias = None if bias is None else torch.as_tensor(bias, dtype=torch.float64)
    weights, ids, _ = op.topk_router(logits, torch.eye(logits.shape[1], dtype=torch.float64), bias, top_k, **options)
    return weights, ids.tolist()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_router_matches_the_oracle(options, top_k, with_bias):
    experts = 12
    x, weight = torch.randn(40, 10, dtype=torch.float64), torch.randn(experts, 10, dtype=torch.float64)
    bias = torch.randn(experts, dtype=torch.float64) if with_bias else None
    weights, ids, logits = op.topk_router(x, weight, bias, top_k, **options)
    torch.testing.assert_close(logits, x @ weight.t())
    rows = [
        oracle.route_row(row, top_k, bias=bias.tolist() if with_bias else None, **as_oracle(options))
        for row in logits.tolist()
    ]
    assert ids.tolist() == [ids for _, ids in rows]
    torch.testing.assert_close(weights, torch.tensor([w for w, _ in rows], dtype=torch.float64))
    assert ids.is_contiguous()
    assert weights.is_contiguous()


@pytest.mark.parametrize("weight_dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_router_works_in_fp32_whatever_comes(dtype, weight_dtype):
    """fp64 tokens stay in fp64. Weights and bias need not have the dtype of the tokens."""
    x, weight = torch.randn(30, 64).to(dtype), torch.randn(8, 64).to(weight_dtype)
    weights, ids, logits = op.topk_router(x, weight, torch.randn(8).to(weight_dtype), 2)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    assert weights.dtype == logits.dtype == acc
    assert ids.dtype == torch.int64
    if weight_dtype != torch.float64 or dtype == torch.float64:
        torch.testing.assert_close(
            logits.double(), x.double() @ weight.double().t(), rtol=TOLERANCE[acc], atol=TOLERANCE[acc] * 10
        )


def test_by_hand():
    logits = [[0.0, 2.0, 1.0, -1.0]]
    weights, ids = choose(logits, 2, scoring="sigmoid", routed_scaling_factor=2.0)
    assert ids == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1.0929, 0.9071]], dtype=torch.float64), atol=1e-4, rtol=0)
    assert choose(logits, 1, renormalize=True)[0].item() == pytest.approx(0.6439, abs=1e-4)  # top_k = 1: as it is
    assert choose(logits, 2, renormalize=False)[0].sum().item() == pytest.approx(0.8808, abs=1e-4)


def test_bias_chooses_and_does_not_weigh():
    weights, ids = choose([[0.0, 2.0, 1.0, -1.0]], 1, bias=[0, 0, 0, 9], scoring="sigmoid", renormalize=False)
    assert ids == [[3]]
    assert weights.item() == pytest.approx(0.2689, abs=1e-4)


def test_groups_drop_by_minus_infinity_not_by_zero():
    """With all biased scores below 0, a dropped expert at 0 would be chosen."""
    bias = [-2.0, -3.0, -4.0, -5.0]
    assert choose([[0.0] * 4], 2, bias=bias, scoring="sigmoid", n_group=2, topk_group=1)[1] == [[0, 1]]


def test_a_group_counts_by_its_two_best():
    """Group 1 has the single best expert, group 0 the better pair."""
    logits = [[1.0, 1.0, -9.0, 2.0, -9.0, -9.0]]
    assert choose(logits, 2, scoring="sigmoid", n_group=2, topk_group=1)[1] == [[0, 1]]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ties_go_to_the_lowest_id(options, compiled, fresh_compiler):
    experts, top_k = 12, 5

    def route(x, weight):
        return op.topk_router(x, weight, None, top_k, **options)[1]

    route = torch.compile(route, backend="aot_eager") if compiled else route
    everyone_equal = route(torch.zeros(3, 4), torch.zeros(experts, 4))
    assert everyone_equal.tolist() == [list(range(5))] * 3
    many = torch.randint(0, 3, (200, experts)).float()  # plenty of ties, also across groups and at the k-th place
    expected = [oracle.route_row(row, top_k, **as_oracle(options))[1] for row in many.tolist()]
    assert route(many, torch.eye(experts)).tolist() == expected


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nan_rows_get_ids_of_experts(options):
    x = torch.randn(4, 12)
    clean = op.topk_router(x, torch.eye(12), None, 5, **options)
    x[1], x[2, 3] = torch.nan, torch.nan
    weights, ids, _ = op.topk_router(x, torch.eye(12), None, 5, **options)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == 5 for row in ids.tolist())
    for row in (0, 3):
        assert torch.equal(ids[row], clean[1][row])
        assert torch.equal(weights[row], clean[0][row])


@pytest.mark.parametrize("ungrouped", [None, 0, 1])
@pytest.mark.parametrize("kept", [None, 0, 1])
def test_none_0_and_1_groups_mean_ungrouped(ungrouped, kept):
    x, weight = torch.randn(9, 6), torch.randn(8, 6)
    plain = op.topk_router(x, weight, None, 3)
    for a, b in zip(plain, op.topk_router(x, weight, None, 3, n_group=ungrouped, topk_group=kept), strict=True):
        assert torch.equal(a, b)


def test_no_tokens():
    weights, ids, logits = op.topk_router(torch.empty(0, 6), torch.randn(8, 6), None, 3, n_group=2)
    assert weights.shape == ids.shape == (0, 3)
    assert logits.shape == (0, 8)


def test_permute_by_hand():
    """Four tokens, two slots, three experts; token 2 comes twice to expert 1; -1 and 3 are nobody's."""
    x = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
    ids = torch.tensor([[2, 0], [-1, 2], [1, 1], [0, 3]])
    rows, c, row_of = op.permute(x, ids, 3)
    assert rows.flatten().tolist() == [10, 13, 12, 12, 10, 11, 0, 0]
    assert c.tolist() == [0, 2, 4, 6]
    assert row_of.tolist() == [[4, 0], [-2, 5], [2, 3], [1, -1]]
    assert c.dtype == torch.int32
    assert row_of.dtype == torch.int64
    out = op.unpermute(torch.arange(8.0).unsqueeze(1), row_of, torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert out.flatten().tolist() == [4, 20, 28, 7]


@settings(max_examples=80)
@given(layer_shapes(max_num_experts=12), st.data(), st.sampled_from(cases.DTYPES), st.booleans())
def test_permute_and_unpermute_match_the_oracle(shape, data, dtype, narrow):
    t, h, _, e, k = shape
    ids = data.draw(routings(t, e, k))
    x = torch.randn(t, h).to(dtype)
    rows, c, row_of = op.permute(x, ids.int() if narrow else ids, e)
    source, offsets, expected_rows = oracle.permute(ids.tolist(), e)
    assert c.tolist() == offsets
    assert row_of.tolist() == expected_rows
    assert torch.equal(rows[: c[-1]], x[source[: c[-1]]])
    assert torch.count_nonzero(rows[c[-1] :]) == 0
    mine = row_of >= 0
    if len(rows):  # for all slots: their own row
        assert torch.equal(rows[row_of], torch.where(mine.unsqueeze(-1), x.unsqueeze(1), 0))

    weights = torch.rand(t, k)
    out = op.unpermute(rows, row_of, weights)
    total = torch.zeros(t, h, dtype=torch.float64)
    for token in range(t):
        for slot in range(k):
            if mine[token, slot]:
                total[token] += weights[token, slot].double() * x[token].double()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), total, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] + 1e-6)
    assert torch.equal(out, op.unpermute(rows, row_of, weights))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_unpermute_sums_in_fp32_and_rounds_once(dtype):
    """1 + 300 halves of an ulp: a sum in the dtype itself would never move."""
    top_k = 301
    eps = torch.finfo(dtype).eps / 2 if dtype in (torch.bfloat16, torch.float16) else 0.25
    rows = torch.cat((torch.ones(1, 4), torch.full((top_k - 1, 4), eps))).to(dtype)
    out = op.unpermute(rows, torch.arange(top_k).unsqueeze(0), torch.ones(1, top_k))
    expected = (rows.double().sum(0, keepdim=True)).to(dtype)
    assert torch.equal(out, expected)


def test_unpermute_adds_in_the_order_of_k():
    """(1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1: the order shows."""
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    one = torch.ones(1, 3)
    assert op.unpermute(rows, torch.tensor([[0, 1, 2]]), one).item() == 0
    assert op.unpermute(rows, torch.tensor([[0, 2, 1]]), one).item() == 1


@pytest.mark.parametrize("memory", cases.MEMORY.values(), ids=cases.MEMORY)
def test_any_memory_layout(memory):
    x, ids, weight = torch.randn(9, 6), torch.randint(-1, 5, (9, 3)), torch.randn(4, 6)
    for a, b in zip(op.permute(memory(x), memory(ids), 4), op.permute(x, ids, 4), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
    for a, b in zip(
        op.topk_router(memory(x), memory(weight), None, 2), op.topk_router(x, weight, None, 2), strict=True
    ):
        torch.testing.assert_close(a, b)
    rows, _, row_of = op.permute(x, ids, 4)
    weights = torch.rand(9, 3)
    got = op.unpermute(memory(rows), memory(row_of), memory(weights))
    assert torch.equal(got, op.unpermute(rows, row_of, weights))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 3), (4, 0), (0, 0)])
def test_no_slots(tokens, top_k):
    rows, c, row_of = op.permute(torch.randn(tokens, 5), torch.zeros(tokens, top_k, dtype=torch.int64), 2)
    assert rows.shape == (0, 5)
    assert c.tolist() == [0, 0, 0]
    assert torch.equal(op.unpermute(rows, row_of, torch.rand(tokens, top_k)), torch.zeros(tokens, 5))


def test_huge_ids_own_no_expert():
    ids = torch.tensor([[2**62, -(2**63)], [0, 2**31]])
    _, c, row_of = op.permute(torch.randn(2, 3), ids, 2)
    assert c.tolist() == [0, 1, 1]
    assert (row_of >= 0).tolist() == [[False, False], [True, False]]
