"""Gradients of all ops: gradcheck in fp64, the oracle's autograd, exact zeros, poisoned memory."""

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from npu_moe_ops import reference
from npu_moe_ops.testing import TOLERANCE, expert_cumsums, layer_shapes, routings

op = torch.ops.npu_moe
SWIGLU = ({}, {"swiglu_limit": 0.7}, {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0})
SMALL = {
    "empty_experts": (6, 5, 3, (0, 2, 0, 4, 0)),
    "tail_rows": (7, 4, 3, (2, 0, 3)),
    "all_empty": (3, 4, 2, (0, 0)),
    "no_rows": (0, 4, 2, (0, 0)),
}


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def by_autograd(x, w13, w2, c, swiglu_limit=None, swiglu_alpha=1.0, swiglu_beta=0.0):
    """The formula in fp64, differentiated by torch."""
    limit, alpha, beta = swiglu_limit, swiglu_alpha, swiglu_beta
    x, w13, w2 = x.double(), w13.double(), w2.double()
    rows = []
    for e, (start, end) in enumerate(zip(c.tolist(), c.tolist()[1:], strict=False)):
        gate, up = (x[start:end] @ w13[e]).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        rows.append((gate * torch.sigmoid(alpha * gate) * (up + beta)) @ w2[e])
    return torch.cat([*rows, x[c[-1] :] * 0])


@pytest.mark.parametrize("swiglu", SWIGLU, ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_ffn_gradcheck(shape, swiglu):
    x, w13, w2, c = cases.ffn_inputs(*shape, torch.float64)
    assert gradcheck(lambda *a: op.grouped_swiglu_ffn(*a, c, **swiglu), leaves(x, w13, w2))
    flat = leaves(x, cases.flat(w13), cases.flat(w2))
    assert gradcheck(lambda *a: op.grouped_swiglu_ffn(*a, c, **swiglu), flat)


@pytest.mark.parametrize("memory", cases.MEMORY.values(), ids=cases.MEMORY)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_ffn_gradients_match_autograd(dtype, memory):
    for shape in cases.SHAPES.values():
        x, w13, w2, c = (memory(t) if t.is_floating_point() else t for t in cases.ffn_inputs(*shape, dtype))
        mine, theirs = [t.requires_grad_() for t in (x, w13, w2)], leaves(x, w13, w2)
        weight = torch.randn(x.shape, dtype=torch.float64)
        (op.grouped_swiglu_ffn(*mine, c).double() * weight).sum().backward()
        (by_autograd(*theirs, c) * weight).sum().backward()
        for ours, exact in zip(mine, theirs, strict=True):
            assert ours.grad.dtype == dtype
            scale = exact.grad.abs().max().item() if exact.numel() else 0.0
            torch.testing.assert_close(
                ours.grad.double(), exact.grad.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(1, scale)
            )


@settings(max_examples=40)
@given(layer_shapes(max_tokens=6), st.data(), st.sampled_from(SWIGLU))
def test_ffn_gradients_on_any_distribution(shape, data, swiglu):
    n = shape.tokens * shape.top_k
    c = data.draw(expert_cumsums(shape.num_experts, n))
    x, w13, w2, _ = cases.ffn_inputs(
        n, shape.hidden_size, shape.intermediate_size, (0,) * shape.num_experts, torch.float64
    )
    mine, theirs = leaves(x, w13, w2), leaves(x, w13, w2)
    op.grouped_swiglu_ffn(*mine, c, **swiglu).square().sum().backward()
    by_autograd(*theirs, c, **swiglu).square().sum().backward()
    for ours, exact in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_each_gradient_alone_and_no_other_is_computed(asked, monkeypatch):
    inputs = cases.ffn_inputs(*cases.SHAPES["mixed"], torch.float64)
    full = leaves(*inputs[:3])
    op.grouped_swiglu_ffn(*full, inputs[3]).sum().backward()
    tensors = [t.clone().requires_grad_(i in asked) for i, t in enumerate(inputs[:3])]
    masks, mm = [], torch.Tensor.__matmul__

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "backward" in func.name():
                masks.append(args[5])
            return func(*args, **(kwargs or {}))

    with Watch():
        op.grouped_swiglu_ffn(*tensors, inputs[3]).sum().backward()
    assert masks == [[i in asked for i in range(3)]]
    for i, t in enumerate(tensors):
        assert torch.equal(t.grad, full[i].grad) if i in asked else t.grad is None

    products = []
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append(1) or mm(a, b))
    x, w13, w2, c = inputs
    grads = tuple(torch.empty_like(t) if i in asked else t.new_empty(0) for i, t in enumerate((x, w13, w2)))
    reference.grouped_swiglu_ffn_backward(grads, x, x, w13, w2, c, masks[0], None, 1.0, 0.0)
    busy = 4  # experts with rows; each needs one product for gate and up again
    need_hidden = 0 in asked or 1 in asked
    assert len(products) == busy * (1 + (2 in asked) + need_hidden + (1 in asked) + (0 in asked))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_exact_zeros_and_poisoned_memory(dtype):
    """Freed blocks hold NaN, twice in a row: every element of every gradient is written."""
    n, hidden, intermediate, counts = 24, 32, 16, (0, 5, 0, 7, 0)
    x, w13, w2, c = cases.ffn_inputs(n, hidden, intermediate, counts, dtype)
    grad = torch.randn(n, hidden).to(dtype)
    grad[12:] = torch.nan  # tail rows: whatever comes back for them
    x[12:] = torch.nan
    first = None
    for _ in range(2):
        poison = [torch.full(t.shape, torch.nan, dtype=dtype) for t in (x, w13, w2) for _ in range(6)]
        del poison
        tensors = leaves(x, w13, w2)
        op.grouped_swiglu_ffn(*tensors, c).backward(grad)
        grads = [t.grad for t in tensors]
        assert all(g.isfinite().all() for g in grads)
        assert torch.count_nonzero(grads[0][12:]) == 0
        for g in grads[1:]:
            assert torch.count_nonzero(g[[0, 2, 4]]) == 0
            assert torch.count_nonzero(g[[1, 3]]) > 0
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))


def test_nan_stays_in_its_expert():
    x, w13, w2, c = cases.ffn_inputs(9, 8, 4, (3, 3, 3))
    grads = []
    for bad in (False, True):
        tensors = leaves(x, w13, w2)
        if bad:
            tensors[0].data[4] = torch.nan
        op.grouped_swiglu_ffn(*tensors, c).sum().backward()
        grads.append([t.grad for t in tensors])
    clean, dirty = grads
    others = torch.arange(9) != 4
    assert torch.equal(clean[0][others], dirty[0][others])
    assert not dirty[0][4].isfinite().any()
    for a, b in zip(clean[1:], dirty[1:], strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_gradients_keep_the_memory_order_of_the_weights():
    """Hugging Face's parameters are transposed views: their gradients need no transposition either."""
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"])
    parameter = w13.transpose(1, 2).contiguous().requires_grad_()
    op.grouped_swiglu_ffn(x, parameter.transpose(1, 2), w2, c).sum().backward()
    assert parameter.grad.stride() == parameter.stride()


def test_second_derivatives_are_refused():
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["tail_rows"], torch.float64)
    (x,) = leaves(x)
    (g,) = torch.autograd.grad(op.grouped_swiglu_ffn(x, w13, w2, c).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="grouped_swiglu_ffn: second derivatives"):
        g.sum().backward()


def test_forward_mode_is_refused_rather_than_lost():
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["tail_rows"], torch.float64)
    with pytest.raises(NotImplementedError, match="grouped_swiglu_ffn: forward-mode AD"):
        torch.func.jvp(lambda x: op.grouped_swiglu_ffn(x, w13, w2, c), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert op.grouped_swiglu_ffn(x, w13, w2, c).isfinite().all()  # no tangent: nothing to lose
        for call in (
            lambda: op.topk_router(dual, torch.randn(4, 16).double(), None, 2),
            lambda: op.permute(dual, torch.zeros(11, 1).long(), 2),
            lambda: op.unpermute(dual, torch.zeros(3, 1).long(), torch.rand(3, 1)),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                call()


ROUTERS = {
    "softmax": {},
    "not_renormalized": {"renormalize": False},
    "sigmoid_grouped": {"scoring": "sigmoid", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
}


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("top_k", [1, 3])
def test_router_gradcheck(top_k, options):
    hidden, weight = leaves(torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def floats(h, w):
        topk_weights, topk_ids, logits = op.topk_router(h, w, bias, top_k, **options)
        assert not topk_ids.requires_grad
        return topk_weights, logits

    assert gradcheck(floats, (hidden, weight))
    assert gradgradcheck(floats, (hidden, weight))
    op.topk_router(hidden, weight, bias, top_k, **options)[0].sum().backward()
    assert bias.grad is None


def test_router_gradient_of_one_input_and_in_its_dtype():
    hidden = torch.randn(5, 4, dtype=torch.bfloat16)
    weight = torch.randn(6, 4, requires_grad=True)
    op.topk_router(hidden, weight, None, 2)[0].square().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.abs().max() > 0
    hidden.requires_grad_()
    op.topk_router(hidden, weight.detach(), None, 2)[2].sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


IDS = {
    "plain": [[0, 2], [1, 0], [2, 2]],
    "sentinels": [[-1, 2], [3, 0], [7, -5]],
    "same_expert_twice": [[1, 1], [1, 1], [0, 0]],
    "nobody": [[-1, -1], [3, 3], [9, -1]],
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_permute_and_unpermute_gradcheck(ids):
    ids = torch.tensor(ids)
    x, weights = leaves(torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64))
    (y,) = leaves(torch.randn(6, 4, dtype=torch.float64))
    row_of = op.permute(x, ids, 3)[2]
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x: op.permute(x, ids, 3)[0], x)
        assert check(lambda y, w: op.unpermute(y, row_of, w), (y, weights))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 3), (4, 0), (0, 0)])
def test_permute_and_unpermute_gradients_of_nothing(tokens, top_k):
    (x,) = leaves(torch.randn(tokens, 5))
    (weights,) = leaves(torch.rand(tokens, top_k))
    rows, _, row_of = op.permute(x, torch.zeros(tokens, top_k, dtype=torch.int64), 2)
    op.unpermute(rows, row_of, weights).sum().backward()
    assert torch.equal(x.grad, torch.zeros(tokens, 5))
    assert torch.equal(weights.grad, torch.zeros(tokens, top_k))


@settings(max_examples=40)
@given(layer_shapes(max_tokens=8), st.data())
def test_rows_of_no_expert_get_and_give_nothing(shape, data):
    """NaN in every row beyond c[E], of the output and of the gradients, changes nothing."""
    t, h, _, e, k = shape
    ids = data.draw(routings(t, e, k))
    (x,) = leaves(torch.randn(t, h))
    rows, c, row_of = op.permute(x, ids, e)
    grad = torch.randn(rows.shape)
    grad[c[-1] :] = torch.nan
    rows.backward(grad)
    mine = ((ids >= 0) & (ids < e)).unsqueeze(-1)
    expected = torch.where(mine, grad[row_of], 0).sum(1) if rows.numel() else torch.zeros_like(x)
    torch.testing.assert_close(x.grad, expected)

    y, weights = leaves(torch.randn(rows.shape), torch.rand(t, k))
    y.data[c[-1] :] = torch.nan
    weights.data[~mine.squeeze(-1)] = torch.nan
    out = op.unpermute(y, row_of, weights)
    out.sum().backward()
    assert out.isfinite().all()
    assert torch.count_nonzero(y.grad[c[-1] :]) == 0
    assert torch.count_nonzero(weights.grad[~mine.squeeze(-1)]) == 0
    assert weights.grad.isfinite().all()


def test_unpermute_adds_up_rows_named_twice():
    y, w = leaves(torch.randn(4, 3, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64))
    row_of = torch.tensor([[0, 0], [3, 0], [-1, 2]])
    assert gradcheck(lambda y, w: op.unpermute(y, row_of, w), (y, w))
