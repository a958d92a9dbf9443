"""moe(), SparseMoE, fuse_gate_up, pack_experts, load_balancing_loss; and the oracle against Hugging Face."""

import copy
import subprocess
import sys

import cases
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from npu_moe_ops import (
    SparseMoE,
    fuse_gate_up,
    grouped_swiglu_ffn,
    load_balancing_loss,
    moe,
    pack_experts,
    permute,
    topk_router,
    unpermute,
)
from npu_moe_ops.testing import TOLERANCE, layer_shapes, trained_routings

ROUTER = {"scoring": "sigmoid", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}


def layer_inputs(tokens, hidden, intermediate, experts, dtype=torch.float64):
    x, w13, w2, _ = cases.ffn_inputs(tokens, hidden, intermediate, (0,) * experts, dtype)
    return x, (torch.randn(experts, hidden) / hidden**0.5).to(dtype), w13, w2


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("form", [cases.flat, cases.MEMORY["transposed"]], ids=["flat", "transposed"])
def test_moe_matches_the_oracle(dtype, form):
    x, router_weight, w13, w2 = layer_inputs(24, 20, 12, 6, dtype)
    out = moe(x.view(2, 3, 4, 20), router_weight, form(w13), form(w2), 3, **ROUTER)
    expected = oracle.layer(x, router_weight, w13, w2, 3, scoring="sigmoid", n_group=3, topk_group=2, scale=2.5)
    assert out.shape == (2, 3, 4, 20)
    assert out.dtype == dtype
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(out.view(24, 20).double(), expected, rtol=tolerance, atol=tolerance)


@given(layer_shapes(), st.data())
def test_any_shape_of_layer(shape, data):
    t, h, i, e, k = shape
    x, router_weight, w13, w2 = layer_inputs(t, h, i, e)
    scoring = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    out = moe(x, router_weight, w13, w2, k, scoring=scoring)
    torch.testing.assert_close(out, oracle.layer(x, router_weight, w13, w2, k, scoring=scoring))


def test_layer_on_trained_routings():
    """How trained routers share out tokens, through permute, the FFN and unpermute."""
    for ids in trained_routings():
        x, weights = torch.randn(len(ids), 24), torch.rand(ids.shape)
        w13, w2 = torch.randn(16, 24, 20) / 5, torch.randn(16, 10, 24) / 3
        rows, cumsum, row_of = permute(x, ids, 16)
        out = unpermute(grouped_swiglu_ffn(rows, w13, w2, cumsum), row_of, weights)
        t = torch.randint(len(ids), ()).item()
        exact = sum(w * oracle.ffn_row(x[t], w13[e], w2[e]) for w, e in zip(weights[t], ids[t], strict=True))
        torch.testing.assert_close(out[t].double(), exact.double(), rtol=1e-4, atol=1e-4)


def test_one_vector_is_a_batch_of_none():
    x, router_weight, w13, w2 = layer_inputs(1, 20, 12, 6)
    assert torch.equal(moe(x[0], router_weight, w13, w2, 2), moe(x, router_weight, w13, w2, 2)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_oracle_and_the_ops_match_hugging_face(dtype):
    hidden, intermediate, experts, top_k = 24, 10, 6, 3
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_act="silu",
    )
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config).to(dtype)
    nn.init.normal_(theirs.gate_up_proj, std=hidden**-0.5)
    nn.init.normal_(theirs.down_proj, std=intermediate**-0.5)
    x = torch.randn(30, hidden).to(dtype)
    weights, ids, _ = topk_router(x, torch.randn(experts, hidden), None, top_k)
    with torch.no_grad():
        expected = theirs(x, ids, weights.to(dtype)).double()
        w13, w2 = theirs.gate_up_proj.transpose(1, 2), theirs.down_proj.transpose(1, 2)
        rows, cumsum, row_of = permute(x, ids, experts)
        out = unpermute(grouped_swiglu_ffn(rows, w13, w2, cumsum), row_of, weights).double()
        exact = torch.zeros(30, hidden, dtype=torch.float64)
        for t in range(30):
            for k in range(top_k):
                exact[t] += weights[t, k] * oracle.ffn_row(x[t], w13[ids[t, k]], w2[ids[t, k]])
    tolerance = 2 * TOLERANCE[dtype] if dtype != torch.float64 else 1e-7  # its weights were fp32
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance)
    ours, hf = ((y - exact).square().mean().sqrt() for y in (out, expected))
    assert ours <= 1.25 * hf + 1e-7  # no less exact than what it replaces


def test_module_is_the_function_and_the_shared_expert():
    layer = SparseMoE(20, 12, 6, 3, shared_intermediate_size=7, correction_bias=True, **ROUTER, dtype=torch.float64)
    layer.correction_bias.normal_()
    x = torch.randn(2, 5, 20, dtype=torch.float64)
    routed = moe(x, layer.router_weight, layer.w13, layer.w2, 3, correction_bias=layer.correction_bias, **ROUTER)
    shared = [oracle.ffn_row(row, layer.shared_w13[0], layer.shared_w2[0]) for row in x.view(10, 20)]
    out, logits, ids = layer.forward_with_routing(x)
    torch.testing.assert_close(out, routed + torch.stack(shared).view(2, 5, 20))
    assert torch.equal(layer(x), out)
    assert logits.shape == (10, 6)
    assert ids.shape == (10, 3)


def test_module_saves_loads_copies_and_moves():
    layer = SparseMoE(20, 12, 6, 3, shared_intermediate_size=7, correction_bias=True)
    other = SparseMoE(20, 12, 6, 3, shared_intermediate_size=7, correction_bias=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 20)
    for same in (other, copy.deepcopy(layer), copy.deepcopy(layer).to(torch.float64).to(torch.float32)):
        assert torch.equal(same(x), layer(x))
    assert sorted(layer.state_dict()) == ["correction_bias", "router_weight", "shared_w13", "shared_w2", "w13", "w2"]
    with torch.device("meta"):
        empty = SparseMoE(20, 12, 6, 3, correction_bias=True)
    empty = empty.to_empty(device="cpu")
    empty.correction_bias.fill_(torch.nan)
    empty.reset_parameters()
    assert torch.count_nonzero(empty.correction_bias) == 0
    for name, fan_in in (("router_weight", 20), ("w13", 20), ("w2", 12)):
        weight = getattr(empty, name)
        assert 0.8 * fan_in**-0.5 < weight.abs().max() <= fan_in**-0.5
    assert "num_experts=6, top_k=3" in repr(layer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    layer, grads = SparseMoE(20, 12, 6, 3), []
    x = torch.randn(9, 20)
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        asked = x.clone().requires_grad_()
        run(asked).square().sum().backward()
        grads.append([asked.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_router_gradient_is_fp32_under_autocast():
    x, weight = torch.randn(9, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    grads = []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = topk_router(x, weight, None, 3)[0].square().sum()
            if inside:
                grads.append(torch.autograd.grad(loss, (x, weight)))
        if not inside:
            grads.append(torch.autograd.grad(loss, (x, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("leading", [(), (3,)], ids=["one", "stacked"])
def test_fuse_gate_up(leading):
    w1, w3 = torch.randn(*leading, 6, 4), torch.randn(*leading, 6, 4)
    assert torch.equal(fuse_gate_up(w1, w3), torch.cat((w1, w3), -1))
    linear1, linear3 = torch.randn(*leading, 4, 6), torch.randn(*leading, 4, 6)
    fused = fuse_gate_up(linear1.transpose(-1, -2), linear3.transpose(-1, -2))
    assert torch.equal(fused, torch.cat((linear1, linear3), -2).transpose(-1, -2))
    assert fused.stride()[-2:] == (1, 6)  # the Linears' order in memory


class Expert(nn.Module):
    def __init__(self, names, hidden=10, intermediate=6):
        super().__init__()
        gate, up, down = names
        setattr(self, gate, nn.Linear(hidden, intermediate, bias=False))
        setattr(self, up, nn.Linear(hidden, intermediate, bias=False))
        setattr(self, down, nn.Linear(intermediate, hidden, bias=False))
        self.names = names

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids="-".join)
def test_pack_experts(names, release):
    experts = nn.ModuleList(Expert(names) for _ in range(4))
    experts.append(experts[0])  # the same expert twice, and a tied weight
    setattr(experts[3], names[1], getattr(experts[2], names[1]))
    counts = (3, 0, 2, 5, 1)
    x = torch.randn(11, 10)
    expected = torch.cat([expert(rows) for expert, rows in zip(experts, x.split(counts), strict=True)])
    w13, w2 = pack_experts(experts, release=release)
    assert (w13.shape, w2.shape) == ((5, 10, 12), (5, 6, 10))
    assert not w13.requires_grad
    torch.testing.assert_close(grouped_swiglu_ffn(x, w13, w2, cases.offsets(counts)), expected)
    assert all(p.numel() == 0 for p in experts.parameters()) == release


def test_pack_experts_releases_nothing_before_an_error():
    experts = [Expert(("w1", "w3", "w2")), Expert(("w1", "w3", "w2"), intermediate=5)]
    with pytest.raises(ValueError, match="gate projection of expert 1"):
        pack_experts(experts, release=True)
    assert all(p.numel() for expert in experts for p in expert.parameters())


PEAK = """
import re, torch
from torch import nn
from npu_moe_ops import pack_experts

class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(1024, 1024, bias=False) for _ in range(3))

def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

experts = nn.ModuleList(Expert() for _ in range(32))
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = kib("VmRSS")
pack_experts(experts, release={release})
print((kib("VmHWM") - before) / 1024 / 12)  # in experts of 12 MiB
"""


def test_pack_experts_peak_memory():
    """32 experts of 12 MiB: the peak grows by the result, or, released, by about one expert."""
    grew = {}
    for release in (False, True):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PEAK.format(release=release)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        grew[release] = float(run.stdout)
    assert 31 < grew[False] < 33
    assert grew[True] < 2


def test_loss_by_hand():
    """Two experts, three tokens: f = (2/3, 1/3), p = (0.5, 0.5)."""
    ids = torch.tensor([[0], [0], [1]])
    assert load_balancing_loss(torch.zeros(3, 2), ids, 2).item() == pytest.approx(1.0)
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]))
    assert load_balancing_loss(logits, ids, 2).item() == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4))


def test_loss_is_1_when_even_and_e_when_one_expert_has_all():
    experts = 8
    even = torch.arange(64).view(-1, 2) % experts
    assert load_balancing_loss(torch.randn(1, experts).expand(32, -1) * 0, even, experts).item() == pytest.approx(1)
    one = torch.full((32, experts), -100.0).index_fill(1, torch.tensor(3), 100.0)
    assert load_balancing_loss(one, torch.full((32, 2), 3), experts).item() == pytest.approx(experts)


def test_loss_masks_tokens_and_sentinels():
    logits, ids = torch.randn(2, 6, 5), torch.randint(0, 5, (2, 6, 2))
    mask = torch.rand(2, 6) < 0.6
    mask[0, 0], mask[1, 5] = True, False
    kept = load_balancing_loss(logits[mask], ids[mask], 5)
    dirty = torch.where(mask.unsqueeze(-1), logits, torch.nan).requires_grad_()
    loss = load_balancing_loss(dirty, ids, 5, mask=mask)
    torch.testing.assert_close(loss, kept)
    for form in (mask.int(), mask.float() * 0.5):
        assert load_balancing_loss(logits, ids, 5, mask=form).item() == pytest.approx(kept.item())
    (grad,) = torch.autograd.grad(loss, dirty)
    assert torch.count_nonzero(grad[~mask]) == 0
    assert grad.isfinite().all()
    sentinels = torch.cat((ids, torch.full_like(ids, -1), torch.full_like(ids, 5)), -1)
    torch.testing.assert_close(load_balancing_loss(logits, sentinels, 5), load_balancing_loss(logits, ids, 5))
    assert load_balancing_loss(logits, ids, 5, mask=torch.zeros(2, 6)).item() == 0
    assert load_balancing_loss(torch.randn(0, 5), torch.zeros(0, 2).int(), 5).item() == 0


def test_loss_gradient():
    logits = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 4, (7, 2))
    assert torch.autograd.gradcheck(lambda x: load_balancing_loss(x, ids, 4), logits)
