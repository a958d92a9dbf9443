"""The layer once more, in fp64, one token after the other: shares no code with the package."""

import math

import torch


def ffn_row(x, w_gate_up, w_down, limit=None, alpha=1.0, beta=0.0, round_to=torch.float64):
    """One row [H] through one expert ([H, 2I], [I, H]); h is rounded to round_to, as the contract says."""
    x, w_gate_up, w_down = x.double(), w_gate_up.double(), w_down.double()
    intermediate = w_down.shape[0]
    gate = torch.mv(w_gate_up[:, :intermediate].t(), x)
    up = torch.mv(w_gate_up[:, intermediate:].t(), x)
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    h = gate / (1 + torch.exp(-alpha * gate)) * (up + beta)
    return torch.mv(w_down.t(), h.to(round_to).double())


def ffn(tokens, w13, w2, counts, round_to=torch.float64, **swiglu):
    """Rows sorted by expert; w13 [E, H, 2I], w2 [E, I, H]; rows past sum(counts) are 0."""
    rows, n = [], 0
    for e, count in enumerate(counts):
        for row in tokens[n : n + count]:
            rows.append(ffn_row(row, w13[e], w2[e], round_to=round_to, **swiglu))
        n += count
    rows += [torch.zeros(tokens.shape[1], dtype=torch.float64)] * (len(tokens) - n)
    return torch.stack(rows) if rows else torch.zeros(tokens.shape, dtype=torch.float64)


def route_row(logits, top_k, bias=None, scoring="softmax", n_group=1, topk_group=1, renormalize=True, scale=1.0):
    """One row of logits as floats -> (weights, ids), by sorting tuples; ties to the lowest id."""
    if scoring == "softmax":
        peak = max(logits)
        exps = [math.exp(v - peak) for v in logits]
        scores = [v / sum(exps) for v in exps]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    experts = range(len(logits))
    choice = [s + b for s, b in zip(scores, bias, strict=True)] if bias is not None else scores
    size = len(logits) // n_group
    group_score = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    kept = sorted(range(n_group), key=lambda g: (-group_score[g], g))[:topk_group]
    ids = sorted((e for e in experts if e // size in kept), key=lambda e: (-choice[e], e))[:top_k]
    weights = [scores[e] for e in ids]
    if renormalize and top_k > 1:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return [w * scale for w in weights], ids


def permute(ids, num_experts):
    """Ids as lists -> (source token of each row, offsets, row of each slot, -rows from the end where no expert)."""
    slots = [(e, t, k) for t, row in enumerate(ids) for k, e in enumerate(row)]
    mine = [s for e in range(num_experts) for s in slots if s[0] == e]
    others = [s for s in slots if not 0 <= s[0] < num_experts]
    order = mine + others
    offsets = [sum(s[0] < e for s in mine) for e in range(num_experts + 1)]
    place = {(t, k): n for n, (_, t, k) in enumerate(order)}
    rows = [
        [place[t, k] - (0 if 0 <= e < num_experts else len(order)) for k, e in enumerate(row)]
        for t, row in enumerate(ids)
    ]
    return [t for _, t, _ in order], offsets, rows


def layer(x, router_weight, w13, w2, top_k, **router):
    """The whole layer for tokens [T, H]."""
    logits = x.double() @ router_weight.double().t()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(logits.tolist()):
        for weight, e in zip(*route_row(row, top_k, **router), strict=True):
            out[t] += weight * ffn_row(x[t], w13[e], w2[e])
    return out
