"""The patch for LLaDA2, on a block as the published code has it."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from npu_moe_ops.integrations.llada2 import patch, unpatch
from npu_moe_ops.integrations.packed import PackedExperts


class Expert(nn.Module):
    def __init__(self, hidden, intermediate, act_fn):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, hidden, experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, hidden) / hidden**0.5)
        self.register_buffer("expert_bias", torch.rand(experts) * 0.2)

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]).float(), self.weight.float())
        scores = logits.sigmoid()
        choice = (scores + self.expert_bias).view(len(logits), 2, -1)
        dropped = choice.topk(2, dim=2).values.sum(2).argmin(1)
        choice = choice.masked_fill(F.one_hot(dropped, 2).bool().unsqueeze(2), -torch.inf).flatten(1)
        topk_idx = choice.topk(self.top_k, dim=1).indices
        weight = scores.gather(1, topk_idx)
        return topk_idx, weight / (weight.sum(1, keepdim=True) + 1e-20) * 2.5, logits


class LLaDA2MoeSparseMoeBlock(nn.Module):
    def __init__(self, hidden=16, intermediate=12, experts=6, top_k=2, act_fn=None, shared=True):
        super().__init__()
        act_fn = act_fn or nn.SiLU()
        self.num_experts_per_tok = top_k
        self.experts = nn.ModuleList(Expert(hidden, intermediate, act_fn) for _ in range(experts))
        self.gate = Gate(hidden, experts, top_k)
        self.shared_experts = Expert(hidden, intermediate, act_fn) if shared else None

    def forward(self, hidden_states):
        batch, length, hidden = hidden_states.shape
        topk_idx, topk_weight, router_logits = self.gate(hidden_states)
        x = hidden_states.view(-1, hidden)
        y = x.new_zeros(x.shape, dtype=torch.float32 if x.dtype != torch.float64 else x.dtype)
        for e, expert in enumerate(self.experts):
            token, slot = (topk_idx == e).nonzero(as_tuple=True)
            if len(token):
                y = y.index_add(0, token, (expert(x[token]) * topk_weight[token, slot, None]).to(y.dtype))
        y = y.to(x.dtype).view(batch, length, hidden)
        if self.shared_experts is not None:
            y = y + self.shared_experts(hidden_states)
        return y, (router_logits.view(batch, length, -1), topk_idx.view(batch, length, -1))


class Named(LLaDA2MoeSparseMoeBlock):
    """Found by what it has, not by its name."""


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(blocks)

    def forward(self, x):
        x, chosen = self.first(x), []
        for block in self.layers:
            y, (_, topk_idx) = block(x)
            x, chosen = x + y, [*chosen, topk_idx]
        return x, torch.stack(chosen)


def new_stack(**options):
    return Stack(LLaDA2MoeSparseMoeBlock(**options), Named(**options))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
def test_patch_and_unpatch(shared, dtype, train):
    model = new_stack(shared=shared).to(dtype).train(train)
    x = torch.randn(2, 7, 16, dtype=dtype)
    state, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    expected, chosen = model(x)
    random = torch.get_rng_state()
    assert patch(model) == 2
    assert torch.equal(torch.get_rng_state(), random)
    assert sum(isinstance(module, PackedExperts) for module in model.modules()) == 2
    got, same = model(x)
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    equal = (same == chosen).all(dim=-1).all(dim=0)  # in bf16 a rounding may send a token to another expert
    assert equal.all() if dtype != torch.bfloat16 else equal.sum() >= 10
    torch.testing.assert_close(got[equal], expected[equal], rtol=tolerance, atol=tolerance)
    assert all(module.training == train for module in model.modules())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert unpatch(model) == 2
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x)[0], expected)
    assert "forward" not in model.layers[0].__dict__


def test_patch_changes_one_model_only():
    one, other = new_stack(), new_stack()
    patch(one)
    assert isinstance(other.layers[0].experts, nn.ModuleList)
    assert LLaDA2MoeSparseMoeBlock.forward is type(one.layers[0]).forward
    other(torch.randn(1, 3, 16))


def test_patched_gradients_equal_the_loop():
    model, x = new_stack().double(), torch.randn(1, 9, 16, dtype=torch.float64)
    loop = copy.deepcopy(model)
    patch(model)
    target = torch.randn(1, 9, 16, dtype=torch.float64)
    for each in (model, loop):
        F.mse_loss(each(x)[0], target).backward()
    assert all(p.grad is not None for p in model.parameters())
    unpatch(model)  # brings the gradients along
    for (name, p), (_, q) in zip(model.named_parameters(), loop.named_parameters(), strict=True):
        grad = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def test_patched_training_and_unpatch_keeps_what_was_learned():
    model, x = new_stack(), torch.randn(1, 9, 16)
    patch(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x)[0].square().mean().backward()
    optimizer.step()
    learned, output = copy.deepcopy(model.state_dict()), model(x)[0]
    assert any(not torch.equal(learned[key], before[key]) for key in before if ".experts." in key)
    unpatch(model)
    assert all(torch.equal(value, learned[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(model(x)[0], output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_requires_grad_is_kept(frozen):
    model = new_stack()
    for block in model.layers:
        block.experts.requires_grad_(not frozen)
    patch(model)
    assert all(block.experts.w13.requires_grad != frozen for block in model.layers)
    assert all(block.experts.w2.requires_grad != frozen for block in model.layers)
    model.layers[0].experts.requires_grad_(frozen)
    unpatch(model)
    assert all(p.requires_grad == frozen for p in model.layers[0].experts.parameters())
    assert all(p.requires_grad != frozen for p in model.layers[1].experts.parameters())


def test_patched_model_copies_moves_saves_and_loads(tmp_path):
    model, x = new_stack(), torch.randn(1, 5, 16)
    fresh, late = new_stack(), new_stack()
    expected = model(x)[0]
    patch(model)
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.layers[0].experts.w2)
    torch.testing.assert_close(copied(x)[0], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(x)[0], expected, rtol=1e-2, atol=1e-2)
    assert unpatch(copied) == 2
    torch.testing.assert_close(copied(x)[0], expected, rtol=1e-4, atol=1e-4)
    patch(copied)

    state = copied.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    assert fresh.load_state_dict(load_file(tmp_path / "model.safetensors")).missing_keys == []
    torch.testing.assert_close(fresh(x)[0], expected, rtol=1e-4, atol=1e-4)
    patch(late)
    late.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(late(x)[0], copied(x)[0])

    torch.save(copied, tmp_path / "model.pt")
    unpickled = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(unpickled(x)[0], copied(x)[0])
    nn.init.zeros_(unpickled.layers[0].experts.w2)
    assert not torch.equal(unpickled(x)[0], copied(x)[0])

    half = copied.to(torch.bfloat16)
    assert half(x.bfloat16())[0].dtype == torch.bfloat16
    unpatch(half)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(x.bfloat16())[0].dtype == torch.bfloat16
    patch(half)
    assert all(p.is_meta for p in half.to("meta").parameters())
    unpatch(half)
    assert all(p.is_meta for p in half.parameters())


def test_patch_on_meta_then_load():
    model, x = new_stack(), torch.randn(1, 5, 16)
    with torch.device("meta"):
        empty = new_stack()
    patch(empty)
    empty.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(empty(x)[0], model(x)[0], rtol=1e-4, atol=1e-4)
    assert empty.layers[0].experts.w13.requires_grad


def test_patched_model_compiles(fresh_compiler):
    model = new_stack()
    x = torch.randn(2, 6, 16)
    patch(model)
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(model.layers[0].forward, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], model.layers[0](x)[0])
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(x)[0], model(x)[0])
    assert len(graphs) == 1
    assert sum("grouped_swiglu_ffn" in target for target in graphs[0]) == 1


def test_loading_says_what_is_wrong():
    model = new_stack()
    patch(model)
    state = model.state_dict()
    lost, key = "layers.0.experts.2.up_proj.weight", "layers.1.experts.0.down_proj.weight"
    assert model.load_state_dict({k: v for k, v in state.items() if k != lost}, strict=False).missing_keys == [lost]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{lost}"'):
        model.load_state_dict({k: v for k, v in state.items() if k != lost})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"layers\.0\.experts\.6\.up_proj\.weight"'):
        model.load_state_dict({**state, "layers.0.experts.6.up_proj.weight": torch.ones(12, 16)})
    with pytest.raises(RuntimeError, match=rf"size mismatch for {key}: must be \[16, 12\], got \[16, 13\]"):
        model.load_state_dict({**state, key: torch.ones(16, 13)})


class Doubled(LLaDA2MoeSparseMoeBlock):
    def forward(self, hidden_states):
        y, routing = super().forward(hidden_states)
        return 1.5 * y, routing


class OutputOnly(LLaDA2MoeSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states)[0]


class Lora(nn.Linear):
    pass


def _spoil(change):
    def spoiled():
        model = new_stack()
        change(model.layers[1])
        return model

    return spoiled


def _tie(block):
    block.experts[3].up_proj.weight = block.experts[2].up_proj.weight


REFUSED = {
    "no_block": (
        lambda: nn.Linear(2, 2),
        r"LLaDA2MoeSparseMoeBlock, or with gate, .*; Linear holds none",
    ),
    "no_gate": (lambda: Stack(_without_gate()), "layers.0 must have gate, .* but lacks gate"),
    "gelu": (lambda: new_stack(act_fn=F.gelu), r"layers.0.experts.0.act_fn must be SiLU, got gelu"),
    "more_than_it_should": (lambda: Stack(LLaDA2MoeSparseMoeBlock(), Doubled()), "layers.1 must give the same output"),
    "no_routing": (lambda: Stack(LLaDA2MoeSparseMoeBlock(), OutputOnly()), "layers.1 must return .* got Tensor"),
    "bias": (
        _spoil(lambda b: setattr(b.experts[4], "up_proj", nn.Linear(16, 12))),
        "layers.1.experts.4.up_proj must have no bias",
    ),
    "adapter": (
        _spoil(lambda b: setattr(b.experts[4], "up_proj", Lora(16, 12, bias=False))),
        "layers.1.experts.4.up_proj must be a plain nn.Linear, got Lora",
    ),
    "shape": (
        _spoil(lambda b: b.experts.append(Expert(16, 13, nn.SiLU()))),
        r"layers.1.experts.6.gate_proj.weight must be \[12, 16\] .* got \[13, 16\]",
    ),
    "dtype": (_spoil(lambda b: b.experts[2].half()), "experts.2.gate_proj.weight must have dtype torch.float32"),
    "device": (_spoil(lambda b: b.experts[2].to("meta")), "experts.2.gate_proj.weight must be on cpu .* got meta"),
    "frozen": (
        _spoil(lambda b: b.experts[2].down_proj.requires_grad_(False)),
        "experts.2.down_proj.weight must have requires_grad=True",
    ),
    "gradient": (
        _spoil(lambda b: setattr(b.experts[0].up_proj.weight, "grad", torch.ones(12, 16))),
        "experts.0.up_proj.weight must have no gradient",
    ),
    "tied": (_spoil(_tie), "layers.1.experts.2.up_proj.weight must be used once, but is used 2 times"),
    "twice_in_the_list": (
        _spoil(lambda b: b.experts.append(b.experts[1])),
        "layers.1.experts.1.gate_proj.weight must be used once",
    ),
    "hook": (
        _spoil(lambda b: b.experts[5].register_forward_hook(lambda *_: None)),
        "layers.1.experts.5 must have no hooks",
    ),
    "own_forward": (
        _spoil(lambda b: setattr(b, "forward", lambda x: x)),
        "layers.1 must have its class's forward",
    ),
    "more_weights": (
        _spoil(lambda b: b.experts[5].register_parameter("scale", nn.Parameter(torch.ones(1)))),
        "layers.1.experts.5 must have the weights of .* alone, but has scale",
    ),
    "empty": (
        _spoil(lambda b: setattr(b, "experts", nn.ModuleList())),
        "must be an nn.ModuleList with an expert",
    ),
}


def _without_gate():
    block = LLaDA2MoeSparseMoeBlock()
    del block.gate
    return block


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_patch_refuses_and_changes_nothing(case):
    make, message = case
    model = make()
    parameters = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=message):
        patch(model)
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
    now = dict(model.named_parameters())
    assert list(now) == list(parameters)
    assert all(now[name] is p for name, (p, _) in parameters.items())
    assert all(p.is_meta or torch.equal(p, value) for p, value in parameters.values())


def test_patch_twice_and_unpatch_of_nothing():
    model = new_stack()
    with pytest.raises(ValueError, match="unpatch: model must have been patched, but no block of Stack is"):
        unpatch(model)
    patch(model)
    with pytest.raises(ValueError, match=r"layers\.0 must have a list of experts, but they are packed already"):
        patch(model)
    unpatch(model)
    for function in (patch, unpatch):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
            function("LLaDA2.0-mini")


def test_packed_experts_refuse():
    with pytest.raises(ValueError, match="intermediate_size must be >= 1, got 0"):
        PackedExperts(2, 3, 0)


PEAK = """
import re, sys, torch
sys.path.insert(0, {tests!r})
from test_llada2_patch import LLaDA2MoeSparseMoeBlock
from npu_moe_ops.integrations.llada2 import patch
from torch import nn

def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

model = nn.ModuleList(LLaDA2MoeSparseMoeBlock(1024, 1024, experts=12, shared=False) for _ in range(2))
model[0](torch.randn(1, 8, 1024)), patch(LLaDA2MoeSparseMoeBlock())  # libraries, threads, buffers
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = kib("VmRSS")
patch(model)
print((kib("VmHWM") - before) / 1024 / 12)  # in experts of 12 MiB
"""


def test_patch_peak_memory():
    """24 experts of 12 MiB: the peak grows by about one of them."""
    script = PEAK.format(tests=str(Path(__file__).parent))
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    print(run.stdout)
    assert float(run.stdout) < 2.5
