"""LLaDA2 once more, in fp64 and one number after the other: shares no code with the examples."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llada2"))
import checkpoint as checkpoint  # for the tests, which need not know where the examples are
from config import Config as Config
from generate import block_mask as block_mask
from generate import generate as generate
from model import LLaDA2MoeModelLM as LLaDA2MoeModelLM

SMALL = Config(
    vocab_size=43,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=20,
    num_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=10,
    num_shared_experts=2,
    n_group=4,
    topk_group=2,
    partial_rotary_factor=0.5,
    rope_theta=100.0,
    max_position_embeddings=64,
    pad_token_id=41,
)
CONFIGS = {
    "as_published": SMALL,
    "no_shared_no_bias": replace(SMALL, num_shared_experts=0, moe_router_enable_expert_bias=False),
    "one_group_softmax": replace(SMALL, n_group=1, topk_group=1, score_function="softmax", norm_topk_prob=False),
    "one_expert_a_token": replace(SMALL, num_experts_per_tok=1),
    "all_rotated_biases": replace(SMALL, partial_rotary_factor=1.0, use_qkv_bias=True, use_bias=True),
    "no_qk_norm_one_kv": replace(SMALL, use_qk_norm=False, num_key_value_heads=1, first_k_dense_replace=0),
}


def new_model(config=SMALL, experts="npu_moe", dtype=torch.float64):
    """Random weights of a size at which every part matters."""
    model = LLaDA2MoeModelLM(config, experts).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
            if parameter.dim() == 1:
                parameter.add_(1)
        for buffer in model.buffers():
            buffer.uniform_(-0.3, 0.3)
    return model


def oracle_norm(x, weight, eps):
    mean_square = sum(v * v for v in x.tolist()) / len(x)
    return x * weight / math.sqrt(mean_square + eps)


def oracle_turn(x, position, c):
    x, y, half = x.tolist(), x.tolist(), int(c.head_dim * c.partial_rotary_factor) // 2
    for i in range(half):
        angle = position * c.rope_theta ** (-i / half)
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.tensor(y, dtype=torch.float64)


def oracle_attention(w, x, sees, positions, c):
    d, heads, kv = c.head_dim, c.num_attention_heads, c.num_key_value_heads
    out = []
    fused = [w["query_key_value.weight"] @ row + w.get("query_key_value.bias", 0) for row in x]

    def head(t, n, norm):
        part = fused[t][n * d : (n + 1) * d]
        if norm and c.use_qk_norm:
            part = oracle_norm(part, w[f"{norm}_layernorm.weight"], c.rms_norm_eps)
        return oracle_turn(part, positions[t], c) if norm else part

    for t in range(len(x)):
        joined = []
        for h in range(heads):
            shared = h // (heads // kv)
            seen = [s for s in range(len(x)) if sees(t, s)]
            q = head(t, h, "query")
            e = [math.exp(q @ head(s, heads + shared, "key") / math.sqrt(d)) for s in seen]
            joined.append(sum(v / sum(e) * head(s, heads + kv + shared, None) for v, s in zip(e, seen, strict=True)))
        out.append(w["dense.weight"] @ torch.cat(joined) + w.get("dense.bias", 0))
    return torch.stack(out)


def oracle_swiglu(w, prefix, x):
    gate, up = w[prefix + "gate_proj.weight"] @ x, w[prefix + "up_proj.weight"] @ x
    return w[prefix + "down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def oracle_route(w, x, c):
    logits = [float(row @ x) for row in w["gate.weight"]]
    if c.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        scores = [math.exp(v) / sum(math.exp(u) for u in logits) for v in logits]
    bias = w["gate.expert_bias"].tolist() if "gate.expert_bias" in w else [0] * len(scores)
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // c.n_group
    best = {g: sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(c.n_group)}
    groups = sorted(best, key=best.get)[-c.topk_group :]
    chosen = sorted((e for e in range(len(scores)) if e // size in groups), key=lambda e: -biased[e])
    chosen = chosen[: c.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) + 1e-20 if c.norm_topk_prob and len(chosen) > 1 else 1
    return {e: scores[e] / total * c.routed_scaling_factor for e in chosen}, logits


def oracle_block(w, x, c):
    out = []
    for row in x:
        y = sum(weight * oracle_swiglu(w, f"experts.{e}.", row) for e, weight in oracle_route(w, row, c)[0].items())
        out.append(y + (oracle_swiglu(w, "shared_experts.", row) if c.num_shared_experts else 0))
    return torch.stack(out)


def under(state, prefix):
    return {key.removeprefix(prefix): value.double() for key, value in state.items() if key.startswith(prefix)}


def oracle_model(state, ids, sees, c, positions=None):
    positions = range(len(ids)) if positions is None else positions
    x = state["model.word_embeddings.weight"][ids]
    for i in range(c.num_hidden_layers):
        w = under(state, f"model.layers.{i}.")
        normed = torch.stack([oracle_norm(row, w["input_layernorm.weight"], c.rms_norm_eps) for row in x])
        x = x + oracle_attention(under(w, "attention."), normed, sees, positions, c)
        normed = torch.stack([oracle_norm(row, w["post_attention_layernorm.weight"], c.rms_norm_eps) for row in x])
        mlp = under(w, "mlp.")
        if i < c.first_k_dense_replace:
            x = x + torch.stack([oracle_swiglu(mlp, "", row) for row in normed])
        else:
            x = x + oracle_block(mlp, normed, c)
    normed = [oracle_norm(row, state["model.norm.weight"], c.rms_norm_eps) for row in x]
    return torch.stack([state["lm_head.weight"] @ row for row in normed])


EOS, MASK, VOCABULARY = 41, 42, 43


def oracle_generate(model, prompt, length, steps, gen_length, threshold, early, minimal_topk=1):
    """Token lists; the whole of the schedule written out."""
    steps = min(steps, gen_length // minimal_topk)
    total = math.ceil((len(prompt) + gen_length) / length) * length
    tokens = prompt + [MASK] * (total - len(prompt))
    for end in range(length, total + 1, length):
        if end <= len(prompt):
            continue
        for step in range(steps):
            masked = [i for i in range(end - length, end) if tokens[i] == MASK]
            if not masked:
                break
            sees = torch.tensor([[s // length <= t // length for s in range(end)] for t in range(end)])
            logits = model(torch.tensor([tokens[:end]]), sees[None, None])[0].double()
            probability = {i: torch.softmax(logits[i], 0) for i in masked}
            best = {i: int(p.argmax()) for i, p in probability.items()}
            sure = {i: float(probability[i][best[i]]) for i in masked}
            quota = length // steps + (1 if step < length % steps else 0)
            accepted = [i for i in masked if sure[i] > threshold]
            if len(accepted) < quota:
                accepted = sorted(masked, key=lambda i: -sure[i])[:quota]
            for i in accepted:
                tokens[i] = best[i]
            if early and EOS in tokens[len(prompt) : end]:
                place = tokens.index(EOS, len(prompt))
                if MASK not in tokens[len(prompt) : place]:
                    return tokens[len(prompt) : place + 1][:gen_length]
        if EOS in tokens[len(prompt) : end]:
            break
    answer = tokens[len(prompt) : len(prompt) + gen_length]
    return answer[: answer.index(EOS) + 1] if EOS in answer else answer
