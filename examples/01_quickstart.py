"""An MoE layer of LLaDA2.0-mini's size (H=2048, I=512, E=256, K=8, bf16) on real text, eager and compiled."""

import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from npu_moe_ops import grouped_swiglu_ffn, permute, reference, topk_router, unpermute

H, I, E, K, console = 2048, 512, 256, 8, Console(width=100)
text = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md"
torch.manual_seed(0)
x = torch.randn(256, H).bfloat16()[torch.tensor(list(text.read_bytes()[:512]), dtype=torch.int64)]  # bytes, embedded
router_weight = torch.randn(E, H).bfloat16() / H**0.5
w13, w2 = (torch.randn(size, dtype=torch.bfloat16).mul_(size[1] ** -0.5) for size in ((E, H, 2 * I), (E, I, H)))


def layer(x, experts=grouped_swiglu_ffn):  # the four ops; `experts` runs the third
    topk_weights, topk_ids, _ = topk_router(x, router_weight, None, K)
    rows, cumsum, row_of = permute(x, topk_ids, E)
    return unpermute(experts(rows, w13, w2, cumsum), row_of, topk_weights), cumsum


def loop(rows, w13, w2, cumsum):  # what the op replaces: E times three launches
    out, c = torch.zeros_like(rows), cumsum.tolist()
    for e in range(E):
        gate, up = (rows[c[e] : c[e + 1]] @ w13[e]).chunk(2, -1)
        out[c[e] : c[e + 1]] = (torch.nn.functional.silu(gate) * up) @ w2[e]
    return out


def exact(rows, w13, w2, cumsum):
    out = torch.empty_like(rows)
    reference.grouped_swiglu_ffn(out, rows, w13, w2, cumsum, None, 1.0, 0.0)
    return out


compiled = torch.compile(layer, fullgraph=True)
ways = {"per-expert loop": lambda: layer(x, loop), "op, eager": lambda: layer(x), "op, compiled": lambda: compiled(x)}
table = Table("way", "ms (median of 3)", "speed", "largest error / largest output", title="one layer, on this CPU")
with torch.inference_mode(), console.status("compiling and measuring"):
    right, cumsum = layer(x, exact)
    errors = [((way()[0] - right).abs().max() / right.abs().max()).item() for way in ways.values()]
    clock = [[(time.perf_counter(), way(), time.perf_counter()) for way in ways.values()] for _ in range(3)]
    ms = [sorted(1e3 * (end - start) for start, _, end in runs)[1] for runs in zip(*clock, strict=True)]
for name, error, t in zip(ways, errors, ms, strict=True):
    table.add_row(name, f"{t:.0f}", f"{ms[0] / t:.2f} x loop", f"{error:.4f}")
console.print(f"{len(x)} tokens (bytes of {text.name}), top {K} of {E} experts. Experts by tokens:")
for label, low, high in (("0", 0, 0), ("1-3", 1, 3), ("4-15", 4, 15), ("16-63", 16, 63), ("64+", 64, 8 * len(x))):
    n = int(((cumsum.diff() >= low) & (cumsum.diff() <= high)).sum())
    console.print(f"{label:>6} {'█' * (n // 2)} {n}", highlight=False)
peak, graphs, breaks = getrusage(RUSAGE_SELF).ru_maxrss / 2**20, counters["stats"], len(counters["graph_break"])
console.print(table, f"graphs compiled: {graphs['unique_graphs']}, graph breaks: {breaks}")
console.print(f"memory: weights {(w13.nbytes + w2.nbytes) / 2**30:.2f} GiB, peak of the process {peak:.2f} GiB")
