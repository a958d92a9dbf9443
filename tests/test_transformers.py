"""Every experts class of the installed transformers, and whole models, against transformers' own eager.

`python tests/test_transformers.py` writes the table of docs/hugging-face.md anew.
"""

import functools
import importlib
import inspect
import itertools
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import use_experts_implementation

from npu_moe_ops.integrations import gates
from npu_moe_ops.integrations.transformers import NAME, experts_forward, why_not_fused

op = torch.ops.npu_moe
PACKAGE = Path(transformers.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "hugging-face.md"
BEGIN, END = "<!-- table: python tests/test_transformers.py -->\n", "<!-- end of table -->\n"
DECORATED = re.compile(r"^@use_experts_implementation\b.*\nclass (\w+)", re.M)
SOURCES = {p.relative_to(PACKAGE): p.read_text() for p in sorted((PACKAGE / "models").glob("*/modeling_*.py"))}
EXPERTS = [(path, name) for path, source in SOURCES.items() for name in DECORATED.findall(source)]
E, H, I, T, K = 5, 24, 12, 11, 3
SIZES = {"experts": E, "hidden_size": H, "intermediate_size": I}  # by the end of a config's attribute
WHY_NOT_FUSED = {
    "DiffusionGemmaTextExperts": "its act_fn is not SiLU",
    "Gemma4TextExperts": "its act_fn is not SiLU",
    "GptOssExperts": "gate and up are interleaved",
    "Inkling2Experts": "its _apply_gate is not SwiGLU",
    "Inkling2LoopExperts": "its _apply_gate is not SwiGLU",
    "MuseSparkExperts": "a norm follows each expert",
    "NemotronHExperts": "no gate",
    "OpenAIPrivacyFilterExperts": "has biases",
}


@pytest.fixture(autouse=True)
def one_thread():
    """Eager's index_add_ of a few rows takes 30 ms with two threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(path, name):
    """The experts class with a tiny config of its own model's, random weights, eager."""
    module = importlib.import_module(".".join(("transformers", *path.with_suffix("").parts)))
    cls = getattr(module, name)
    init = inspect.unwrap(cls.__init__)
    config = tiny_config(module, name, set(re.findall(r"config\.(\w+)", inspect.getsource(init))))
    extra = {"intermediate_size": I} if "intermediate_size" in inspect.signature(init).parameters else {}
    experts = cls(config, **extra)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    return experts.eval()


def tiny_config(module, name, used):
    configuration = importlib.import_module(module.__name__.replace("modeling_", "configuration_"))
    found = [
        cls
        for cls in vars(configuration).values()
        if inspect.isclass(cls)
        and issubclass(cls, transformers.PreTrainedConfig)
        and cls.__module__ == configuration.__name__
    ]
    found.sort(key=lambda cls: -alike(cls.__name__, name))  # Thinker's or Talker's
    for cls in found:
        config = cls()
        config = config.per_layer_config[-1] if config.is_heterogeneous else config
        if all(hasattr(config, attribute) for attribute in used):
            break
    else:
        raise AssertionError(f"no config of {configuration.__name__} has {used}")
    for attribute in used:
        for end, size in SIZES.items():
            if attribute.endswith(end):
                setattr(config, attribute, [size] * 2 if isinstance(getattr(config, attribute), list) else size)
    return config


def alike(a, b):
    return sum(itertools.accumulate((x == y for x, y in zip(a, b, strict=False)), operator.and_))


def some_empty(t):
    return torch.stack([torch.randperm(E - 2)[:K] + 1 for _ in range(t)]) if t else torch.zeros(0, K, dtype=torch.int64)


ROUTINGS = {
    "even": lambda: torch.arange(T * K).view(T, K) % E,
    "some_empty": lambda: some_empty(T),
    "repeated": lambda: torch.randint(E, (T, 1)).expand(T, K),
    "sentinels": lambda: torch.where(torch.rand(T, K) < 0.5, E, torch.randint(E, (T, K))),
    "all_sentinels": lambda: torch.full((T, K), E),
    "one_token": lambda: some_empty(1),
    "no_tokens": lambda: some_empty(0),
}


def results(experts, implementation, x, ids, weights, grad):
    """Output and the gradients of tokens, weights and parameters."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, ids, weights)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    if ids.numel() == 0:
        return {"out": out.detach()}
    if out.requires_grad:
        out.backward(grad.to(out.dtype))
    named = [("tokens", x), ("weights", weights), *experts.named_parameters()]
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
    return {"out": out.detach()} | grads


def eager(experts, x, ids, weights, grad):
    try:
        return results(experts, "eager", x, ids, weights, grad)
    except (RuntimeError, IndexError):  # gpt_oss and two more have no sentinels: "not mine" is weight 0 there
        mine = ids < E
        assert not mine.all()
        expected = results(experts, "eager", x, ids.where(mine, 0), weights * mine, grad)
        return expected | {"weights": expected["weights"] * mine}


def distance(got, expected):
    pairs = {k: (got[k].double(), e.double()) for k, e in expected.items()}
    return {k: ((g - e).norm() / e.norm().clamp(min=1e-9)).item() for k, (g, e) in pairs.items()}


@pytest.mark.parametrize(("path", "name"), EXPERTS, ids=[name for _, name in EXPERTS])
def test_every_experts_class_equals_eager(path, name):
    experts = build(path, name)
    assert why_not_fused(experts) == WHY_NOT_FUSED.get(name)
    for routing, draw in ROUTINGS.items():
        ids = draw()
        experts._is_expert_parallel = "sentinels" in routing
        # Rounded to bf16, so that fp32 eager is the reference of both. Large enough that limits of 7 and 10
        # bind; small enough in bf16 that they do not: a value which rounding moves past a limit has no gradient.
        x, grad = torch.randn(2, len(ids), H).bfloat16().float()
        weights = torch.rand(ids.shape)
        experts.bfloat16().float()
        expected = eager(experts, x * 2, ids, weights, grad)
        for what, error in distance(results(experts, NAME, x * 2, ids, weights, grad), expected).items():
            assert error < 3e-6, (routing, what, error)
        expected = eager(experts, x / 4, ids, weights, grad)
        experts.bfloat16()
        x = (x / 4).bfloat16()
        theirs = distance(eager(experts, x, ids, weights, grad), expected)
        ours = distance(results(experts, NAME, x, ids, weights, grad), expected)
        for what, error in ours.items():
            assert error < 1.5 * theirs[what] + (0.01 if what == "out" else 0.04), (routing, what, error, theirs[what])


def test_all_are_found_and_none_is_refused():
    uses = sum(len(re.findall(r"^@use_experts_implementation\b", source, re.M)) for source in SOURCES.values())
    assert len(EXPERTS) == uses >= 60
    assert set(WHY_NOT_FUSED) < {name for _, name in EXPERTS}


class Config(transformers.PreTrainedConfig):
    pass


def decorated(gate=None, **flags):
    """An experts class like those of transformers, with a gate and flags of our choice."""

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = E
            self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H))
            self.down_proj = nn.Parameter(torch.randn(E, H, I))
            self.act_fn, self.limit, self.alpha = nn.SiLU(), 2.0, 1.3

        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for t, k in itertools.product(*map(range, top_k_index.shape)):
                e = top_k_index[t, k]
                h = self._apply_gate(self.gate_up_proj[e] @ hidden_states[t])
                out[t] += top_k_weights[t, k] * (self.down_proj[e] @ h)
            return out

    if gate is not None:
        Experts._apply_gate = gate
    return use_experts_implementation(Experts, **flags)(Config())


def tokens():
    return torch.randn(T, H), torch.randint(E, (T, K)), torch.rand(T, K)


def assert_equals_eager(experts, *args, run=None):
    experts.config._experts_implementation = "eager"
    expected = experts(*args)
    experts.config._experts_implementation = NAME
    torch.testing.assert_close((experts if run is None else run)(*args), expected, rtol=1e-4, atol=1e-4)


def limited(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


def negated(self, gate_up):
    return -limited(self, gate_up)


def change_limit(experts):
    experts.limit = 0.5


def change_limit_to_tensor(experts):
    experts.limit = torch.tensor(0.5)


def change_act(experts):
    experts.act_fn = nn.GELU()


def change_gate_of_instance(experts):
    experts._apply_gate = lambda gate_up: negated(experts, gate_up)


def change_gate_of_class(experts):
    type(experts)._apply_gate = negated


CHANGES = [change_limit, change_limit_to_tensor, change_act, change_gate_of_instance, change_gate_of_class]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_after_the_first_call_counts(change, compiled, fresh_compiler):
    experts, args = decorated(limited), tokens()
    run = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    assert why_not_fused(experts) is None
    assert_equals_eager(experts, *args, run=run)
    before = run(*args)
    change(experts)
    assert_equals_eager(experts, *args, run=run)
    assert not torch.allclose(before, run(*args), atol=1e-2)


# Gates written in many ways, right and wrong: every one that is taken for SwiGLU must be it.
GATES = ("g", "g.clamp(max=self.limit)", "g.clamp(None, self.limit)", "g.clamp(min=-self.limit, max=self.limit)", "u")
UPS = ("u", "u.clamp(-self.limit, self.limit)", "u.clamp(min=-self.limit, max=self.limit)", "u.clamp(max=self.limit)")
RETURNS = (
    "self.act_fn(g) * u",
    "u * functional.silu(g)",
    "g * torch.sigmoid(g * self.alpha) * (u + 1)",
    "(1.0 + u) * (g * torch.sigmoid(self.alpha * g))",
    "(self.act_fn(g.float()) * u.float()).to(x.dtype)",
    "g * torch.sigmoid(u) * u",
    "g * torch.sigmoid(g + self.alpha) * u",
    "g * torch.sigmoid(g) * u * u",
    "torch.tanh(g) * u",
    "self.act_fn(g) * (u - 1)",
    "self.act_fn(g) * u if x.mean() > 0 else g * u",
    "2 * self.act_fn(g) * u",
    "self.act_fn(g) + u",
    "self.act_fn(u) * g",
)
SPLITS = (
    "g, u = x.chunk(2, dim=-1)",
    "g, u = torch.chunk(x, 2, -1)",
    "u, g = x.chunk(2, dim=-1)",
    "g, u = x, x",
    "g, u = (x * x).chunk(2, -1)",
)


def test_what_is_taken_for_swiglu_is_swiglu(tmp_path, monkeypatch):
    bodies = list(itertools.product(SPLITS, GATES, UPS, RETURNS))
    source = "import torch\nfrom torch.nn import functional\n" + "".join(
        f"def gate_{n}(self, x):\n    {split}\n    g = {gate}\n    u = {up}\n    return {value}\n"
        for n, (split, gate, up, value) in enumerate(bodies)
    )
    (tmp_path / "many_gates.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("many_gates")
    experts, x = decorated(), torch.randn(7, 2 * I, dtype=torch.float64) * 4
    read = {n: gates.swiglu_of(getattr(module, f"gate_{n}")) for n in range(len(bodies))}
    for n, swiglu in read.items():
        if swiglu is not None:
            torch.testing.assert_close(
                getattr(module, f"gate_{n}")(experts, x), formula(experts, swiglu, x), rtol=1e-5, atol=1e-5
            )
    taken = [bodies[n] for n, swiglu in read.items() if swiglu is not None]
    # 2 ways to split; no limit, or 2 ways for each half; 5 ways to multiply; and once more with the names swapped.
    assert len([b for b in taken if not b[0].startswith("u")]) == 2 * (1 + 2 * 2) * 5
    assert {b[3] for b in taken if b[0].startswith("u")} == {"self.act_fn(u) * g", "g * torch.sigmoid(u) * u"}


def formula(experts, swiglu, x):
    value = {k: getattr(experts, v) if isinstance(v, str) else v for k, v in swiglu._asdict().items()}
    gate, up = x[:, :I], x[:, I:]
    if value["limit"] is not None:
        gate, up = gate.minimum(torch.tensor(value["limit"])), up.clip(-value["limit"], value["limit"])
    return gate / (1 + torch.exp(-value["alpha"] * gate)) * (up + value["beta"])


def test_a_gate_without_source_runs_one_by_one():
    namespace = {}
    exec("def gate(self, x):\n    g, u = x.chunk(2, dim=-1)\n    return self.act_fn(g) * u", namespace)
    experts = decorated(namespace["gate"])
    assert why_not_fused(experts) == "its _apply_gate is not SwiGLU"
    assert_equals_eager(experts, *tokens())


def twice(gate):
    @functools.wraps(gate)
    def both(self, x):
        return 2 * gate(self, x)

    return both


@twice
def decorated_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def test_a_decorated_gate_runs_one_by_one():
    experts = decorated(decorated_gate)
    assert why_not_fused(experts) == "its _apply_gate is not SwiGLU"
    assert_equals_eager(experts, *tokens())


def test_gradient_of_a_bias_is_summed_in_fp32():
    experts, rows = build(*next(pair for pair in EXPERTS if pair[1] == "GptOssExperts")).bfloat16(), 3000
    args = torch.randn(rows, H).bfloat16(), torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
    got = results(experts, NAME, *args, torch.ones(rows, H))
    assert got["down_proj_bias"][0].tolist() == [float(torch.tensor(rows).bfloat16())] * H  # in bf16: stuck at 256


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops, self.addresses = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        if func is op.grouped_swiglu_ffn.default:
            self.addresses |= {w.data_ptr() for w in args[1:3]}
        return func(*args, **(kwargs or {}))


def test_weights_are_not_copied():
    experts = decorated()
    experts.config._experts_implementation = NAME
    with Calls() as calls, torch.no_grad():
        experts(*tokens())
    assert calls.addresses == {experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()}


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "MuseSparkExperts"])
def test_autocast(name):
    experts = build(*next(pair for pair in EXPERTS if pair[1] == name))
    x, ids, weights = tokens()
    experts.config._experts_implementation = NAME
    exact = experts(x, ids, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = experts(x, ids, weights)
    assert got.dtype == torch.float32
    assert 1e-4 < (got - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("name", ["DeepseekV4Experts", "GptOssExperts", "MuseSparkExperts", "NemotronHExperts"])
def test_compiled_with_any_number_of_tokens(name, fresh_compiler):
    experts = build(*next(pair for pair in EXPERTS if pair[1] == name))
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (7, 2, 19):
        x, ids, weights = torch.randn(t, H), torch.randint(E + 1, (t, K)), torch.rand(t, K)
        experts.config._experts_implementation = NAME
        grads = []
        for run in (experts, compiled):
            experts.zero_grad()
            run(x, ids, weights).sum().backward()
            grads.append([p.grad for p in experts.parameters()])
        torch.testing.assert_close(*grads)
        torch.testing.assert_close(compiled(x, ids, weights), experts(x, ids, weights))


def without(name):
    def spoil(experts):
        delattr(experts, name)

    return spoil


def put(name, value):
    def spoil(experts):
        setattr(experts, name, nn.Parameter(value, requires_grad=False) if isinstance(value, torch.Tensor) else value)

    return spoil


SPOILT = {
    "no_flag": (without("has_bias"), TypeError, "Experts must be an experts module .* but has no has_bias"),
    "interleaved": (put("is_concatenated", False), NotImplementedError, "no _apply_gate that splits.*eager"),
    "no_weight": (without("gate_up_proj"), ValueError, "gate_up_proj must have 3 dims, 5 experts first, got None"),
    "no_bias": (put("has_bias", True), ValueError, "gate_up_proj_bias must have 2 dims, 5 experts first, got None"),
    "experts": (put("num_experts", 4), ValueError, r"gate_up_proj must .*4 experts first, got \[5, 24, 24\]"),
    "flat": (put("down_proj", torch.ones(E * H, I)), ValueError, r"down_proj must have 3 dims, .* got \[120, 12\]"),
    "inner": (
        put("down_proj", torch.ones(E, H, I + 1)),
        ValueError,
        r"down_proj must map \[12, 24\] .* got \[13, 24\]",
    ),
    "odd": (put("gate_up_proj", torch.ones(E, 2 * I + 1, H)), ValueError, r"gate_up_proj must map \[24, 24\]"),
    "int8": (put("down_proj", torch.ones(E, H, I).to(torch.int8)), TypeError, "down_proj must be bf16.*torch.int8"),
    "fp8": (put("down_proj", torch.ones(E, H, I).to(torch.float8_e4m3fn)), TypeError, "down_proj must be bf16.*float8"),
    "dtypes": (put("down_proj", torch.ones(E, H, I).double()), TypeError, "w2 must have dtype float32 .* got float64"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_does_not_fit_is_refused(case):
    spoil, error, message = SPOILT[case]
    experts, args = decorated(), tokens()
    experts.config._experts_implementation = NAME
    spoil(experts)
    with pytest.raises(error, match=message):
        experts(*args)


def test_wrong_tokens_are_refused():
    experts, (x, ids, weights) = decorated(), tokens()
    with pytest.raises(ValueError, match=r"hidden_states must be \[T, 24\], got \[1, 11, 24\]"):
        experts_forward(experts, x[None], ids, weights)
    with pytest.raises(ValueError, match=r"hidden_states must be \[T, 24\], got \[11, 23\]"):
        experts_forward(experts, x[:, :-1], ids, weights)
    with pytest.raises(ValueError, match=r"topk_weights must be .*got \[11, 5\]"):
        experts_forward(experts, x, ids, torch.rand(T, E))
    with pytest.raises(TypeError, match=r"topk_ids must have dtype .*got float32"):
        experts_forward(experts, x, ids.float(), weights)


def in_a_new_process(script):
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


def test_transformers_is_imported_when_asked_and_must_be_new():
    assert in_a_new_process("import sys, npu_moe_ops; print('transformers' in sys.modules)").strip() == "False"
    old = "import transformers; transformers.__version__ = '5.23.9'; import npu_moe_ops.integrations.transformers"
    assert "needs transformers >= 5.24; pip install 'npu-moe-ops[hf]' (found 5.23.9)" in in_a_new_process(old)
    none = "import sys; sys.modules['transformers'] = None; import npu_moe_ops.integrations.transformers"
    assert "ImportError: npu_moe_ops.integrations.transformers needs transformers >= 5.24" in in_a_new_process(none)


MODELS = {
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_key_value_heads": 2},
    ),
    "mixtral": (
        transformers.MixtralForCausalLM,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 2, "sliding_window": None},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3ForCausalLM,
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 8,
            "q_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}


def whole_model(name):
    cls, options = MODELS[name]
    config = cls.config_class(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,  # or the experts would hardly matter
        pad_token_id=0,
        **options,
    )
    return cls(config).eval(), torch.randint(1, 101, (2, 9))


@pytest.mark.parametrize("name", MODELS)
def test_whole_model(name):
    model, ids = whole_model(name)
    outcomes = {}
    for implementation in ("eager", NAME):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        with Calls() as calls:
            out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        outcomes[implementation] = (out.logits, {n: p.grad for n, p in model.named_parameters()}, new)
        assert calls.ops.count(op.grouped_swiglu_ffn.default) == (2 if implementation == NAME else 0)
    (logits, grads, new), (logits_eager, grads_eager, new_eager) = outcomes[NAME], outcomes["eager"]
    torch.testing.assert_close(logits, logits_eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads, grads_eager, rtol=1e-3, atol=1e-5)
    assert torch.equal(new, new_eager)
    assert new.shape == (2, 15)


@pytest.mark.parametrize("name", MODELS)
def test_whole_model_compiled(name, fresh_compiler):
    model, ids = whole_model(name)
    model.set_experts_implementation(NAME)
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    out = compiled(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    forward, backward = graphs
    for name in ("permute", "grouped_swiglu_ffn"):
        assert forward.count(getattr(op, name).default) == 2
    assert backward.count(op.grouped_swiglu_ffn_backward.default) == 2
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.set_experts_implementation("eager")
    model.zero_grad()
    expected = model(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads, {n: p.grad for n, p in model.named_parameters()}, rtol=1e-3, atol=1e-5)


def test_from_pretrained_takes_the_name(tmp_path):
    model, ids = whole_model("mixtral")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation=NAME)
    assert loaded.get_experts_implementation() == {"": NAME}
    model.set_experts_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def table():
    """The table of the page: one row for each way that experts run."""
    rows = {}
    for path, name in EXPERTS:
        experts = build(path, name)
        try:
            rows.setdefault(row_of(experts), []).append(path.parent.name)
        except (ValueError, TypeError, NotImplementedError) as error:
            rows.setdefault(("refused", str(error)), []).append(path.parent.name)
    if not any(how == "refused" for how, _ in rows):
        rows["refused", "-"] = []
    lines = [
        f"| {how} | {why} | {', '.join(dict.fromkeys(names)) or 'none'} |" for (how, why), names in sorted(rows.items())
    ]
    head = f"Of {len(EXPERTS)} experts classes of transformers {transformers.__version__}:\n\n"
    return head + "\n".join(["| runs | gate, or why not one op | families |", "|---|---|---|", *lines]) + "\n"


def row_of(experts):
    reason = why_not_fused(experts)
    if reason is not None:
        return "exact, expert by expert", reason
    swiglu, plain = gates.swiglu_of(type(experts)._apply_gate), gates.SwiGLU()
    extras = [k for k in ("limit", "alpha", "beta") if getattr(swiglu, k) != getattr(plain, k)]
    return "exact, one op", ", ".join(["SwiGLU", *extras])


def page_with(new_table):
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + new_table + END + rest.split(END)[1]


def test_the_page_has_this_table():
    assert page_with(table()) == PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
