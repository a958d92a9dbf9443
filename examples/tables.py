"""The tables of the two sources of this project, made anew: `python examples/tables.py` prints them all.

1. one fixed number of tokens over 2 to 32 experts; 2. dense against MoE with 8 and 16 experts; 3. top_k = 1, 2, 4;
4. a layer of LLaDA2.0-mini: one expert after the other against grouped_swiglu_ffn; 5. the same two on the loads that
trained routers make.

Times are measured here, on the CPU, in rotation, medians. Cycles are simulated: the FFN's NPU kernel in pypto's cost
model, which knows no HBM limit. Where both stand in a row, they are of the same routing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

from npu_moe_ops import backend_info, grouped_swiglu_ffn, moe
from npu_moe_ops.bench.measure import cpu_name
from npu_moe_ops.npu import simulate
from npu_moe_ops.testing import trained_routings

PUBLISHED = {2: 18.3, 4: 21.5, 8: 25.8, 16: 31.2, 32: 42.5}  # experts: ms of the CANN sample's layer, Ascend 910
PUBLISHED_GROWTH = PUBLISHED[32] / PUBLISHED[2]
Timed = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of tables 1 to 3 (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="H of tables 1 to 3 (default %(default)s)")
    parser.add_argument("--intermediate", type=int, default=512, help="I of an expert (default %(default)s)")
    parser.add_argument(
        "--experts", type=int, nargs="+", default=list(PUBLISHED), help="of table 1 (default: as published)"
    )
    parser.add_argument("--llada2", type=int, nargs=3, default=(2048, 512, 256), metavar=("H", "I", "E"))
    parser.add_argument("--rounds", type=int, default=9, help="of the rotation (default %(default)s)")
    parser.add_argument("--no-npu", action="store_true", help="simulate nothing")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--markdown", type=Path, help="write a page with the tables here")
    parser.add_argument("--plot", type=Path, help="draw latency over experts here")
    args = parser.parse_args()
    torch.manual_seed(0)
    tables = [over_experts(args), against_dense(args), over_top_k(args), llada2(args), trained(args)]
    for table in tables:
        show(table)
    numbers = {table["name"]: table["rows"] for table in tables}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(page(tables))
    if args.plot:
        plot(tables[0]["rows"], args.plot)


def over_experts(args: argparse.Namespace) -> dict:
    """Every token to one expert, evenly: the work is the same, only the number of experts grows."""
    x = torch.randn(args.tokens, args.hidden).bfloat16()
    timed: Timed = {}
    for experts in args.experts:
        w13, w2 = weights(experts, args.hidden, args.intermediate)
        cumsum = torch.linspace(0, args.tokens, experts + 1).int()
        timed[str(experts)] = lambda w13=w13, w2=w2, c=cumsum: grouped_swiglu_ffn(x, w13, w2, c)
    seconds = rotate(timed, args.rounds, "experts")
    cycles = simulated(args, [tuple(even(args.tokens, int(e))) for e in timed], args.hidden, args.intermediate)
    first = next(iter(timed))
    rows = []
    for experts, count in zip(timed, cycles, strict=True):
        row = {"experts": int(experts), "rows of each": args.tokens // int(experts)} | speed(
            seconds[experts], args.tokens
        )
        row["growth"] = round(seconds[experts] / seconds[first], 2)
        if count:
            row |= {"simulated cycles": count, "simulated growth": round(count / cycles[0], 2)}
        rows.append(row)
    return {
        "name": "experts",
        "title": f"{args.tokens} tokens over more experts (the published layer grows {PUBLISHED_GROWTH:.1f} times)",
        "rows": rows,
    }


def against_dense(args: argparse.Namespace) -> dict:
    """A dense FFN eight experts wide, and MoE layers that compute two of 8 or 16 experts for each token."""
    h, i, top_k = args.hidden, args.intermediate, 2
    x = torch.randn(args.tokens, h).bfloat16()
    up, gate, down = (torch.randn(*size).bfloat16() for size in ((h, 8 * i), (h, 8 * i), (8 * i, h)))
    timed: Timed = {"dense": lambda: F.silu(x @ gate) * (x @ up) @ down}
    held, used = {"dense": 3 * h * 8 * i}, {"dense": 3 * h * 8 * i}
    for experts in (8, 16):
        w13, w2 = weights(experts, h, i)
        router = torch.randn(experts, h)
        name = f"MoE-{experts}"
        timed[name] = lambda r=router, w13=w13, w2=w2: moe(x, r, w13, w2, top_k)
        held[name], used[name] = 3 * h * i * experts, 3 * h * i * top_k
    seconds = rotate(timed, args.rounds, "dense, MoE")
    rows = [
        {"layer": name, "parameters, M": round(held[name] / 1e6, 1), "used by a token, M": round(used[name] / 1e6, 1),
         "weights, MB": round(2 * held[name] / 2**20, 1)} | speed(seconds[name], args.tokens)
        for name in timed
    ]  # fmt: skip
    return {"name": "dense", "title": f"Dense against MoE, {args.tokens} tokens, top_k = {top_k}", "rows": rows}


def over_top_k(args: argparse.Namespace) -> dict:
    x, router = torch.randn(args.tokens, args.hidden).bfloat16(), torch.randn(8, args.hidden)
    w13, w2 = weights(8, args.hidden, args.intermediate)
    timed: Timed = {str(k): lambda k=k: moe(x, router, w13, w2, k) for k in (1, 2, 4)}
    seconds = rotate(timed, args.rounds, "top_k")
    rows = [
        {"top_k": int(k)} | speed(seconds[k], args.tokens) | {"growth": round(seconds[k] / seconds["1"], 2)}
        for k in timed
    ]
    return {"name": "top_k", "title": f"8 experts, {args.tokens} tokens, more experts a token", "rows": rows}


def llada2(args: argparse.Namespace) -> dict:
    """A block of 32 tokens of LLaDA2.0-mini, routed at random: what a step of its generation computes in a layer."""
    h, i, experts = args.llada2
    top_k = min(8, experts)
    ids = torch.rand(32, experts).topk(top_k).indices.flatten()
    counts = torch.bincount(ids, minlength=experts)
    cumsum = F.pad(counts.cumsum(0), (1, 0)).int()
    x = torch.randn(32 * top_k, h).bfloat16()
    w13, w2 = weights(experts, h, i)

    timed: Timed = {
        "loop": lambda: loop(x, w13, w2, cumsum),
        "grouped_swiglu_ffn": lambda: grouped_swiglu_ffn(x, w13, w2, cumsum),
    }
    seconds = rotate(timed, args.rounds, "LLaDA2")
    rows = [
        {"FFN": name} | speed(seconds[name], 32) | {"times faster": round(seconds["loop"] / seconds[name], 2)}
        for name in timed
    ]
    if not args.no_npu:
        jobs = [simulate.Job(tuple(counts.tolist()), h, i, plan=plan) for plan in ("llada2_original", "auto")]
        published, ours = (cost.cycles for cost in simulate.costs(jobs))
        rows.append({"FFN": "published NPU kernel's settings", "simulated cycles": published, "times faster": 1.0})
        rows.append({"FFN": "NPU kernel", "simulated cycles": ours, "times faster": round(published / ours, 2)})
    return {"name": "llada2", "title": f"32 tokens, {top_k} of {experts} experts, H = {h}, I = {i}", "rows": rows}


def trained(args: argparse.Namespace) -> dict:
    """512 tokens as the routers of examples/llada2/train_tiny.py sent them to 16 experts, and evenly."""
    h, i, _ = args.llada2
    routings = {f"layer {n}": ids.flatten() for n, ids in enumerate(trained_routings())}
    slots = len(routings["layer 0"])
    counts = {name: torch.bincount(ids, minlength=16) for name, ids in routings.items()}
    counts |= {"even": torch.full((16,), slots // 16)}
    x, (w13, w2) = torch.randn(slots, h).bfloat16(), weights(16, h, i)
    timed: Timed = {}
    for name, of_expert in counts.items():
        c = F.pad(of_expert.cumsum(0), (1, 0)).int()
        timed[f"loop, {name}"] = lambda c=c: loop(x, w13, w2, c)
        timed[name] = lambda c=c: grouped_swiglu_ffn(x, w13, w2, c)
    seconds = rotate(timed, args.rounds, "trained loads")
    cycles = simulated(args, [tuple(of_expert.tolist()) for of_expert in counts.values()], h, i)
    rows = []
    for (name, of_expert), count in zip(counts.items(), cycles, strict=True):
        row = {"loads": name, "fewest rows": of_expert.min().item(), "most rows": of_expert.max().item()}
        row |= {"loop, ms": round(1e3 * seconds[f"loop, {name}"], 2), "ms": round(1e3 * seconds[name], 2)}
        rows.append(row | ({"simulated cycles": count} if count else {}))
    title = f"512 tokens as trained routers send them to 4 of 16 experts, H = {h}, I = {i}"
    return {"name": "trained", "title": title, "rows": rows}


def loop(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, cumsum: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, (start, end) in enumerate(pairwise(cumsum.tolist())):
        if end > start:
            gate, up = (x[start:end] @ w13[e]).chunk(2, dim=-1)
            out[start:end] = F.silu(gate) * up @ w2[e]
    return out


def weights(experts: int, hidden: int, intermediate: int) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = torch.randn(experts, hidden, 2 * intermediate) / hidden**0.5
    return w13.bfloat16(), (torch.randn(experts, intermediate, hidden) / intermediate**0.5).bfloat16()


def even(rows: int, experts: int) -> list[int]:
    return torch.linspace(0, rows, experts + 1).int().diff().tolist()


def simulated(args: argparse.Namespace, counts: list[tuple[int, ...]], hidden: int, intermediate: int) -> list[int]:
    if args.no_npu:
        return [0] * len(counts)
    jobs = [simulate.Job(rows, hidden, intermediate) for rows in counts]
    return [cost.cycles for cost in track(simulate.costs(jobs), "simulating", total=len(jobs), transient=True)]


def rotate(timed: Timed, rounds: int, what: str) -> dict[str, float]:
    """Median seconds of each, taken in turns so that a busy moment of the machine hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in track(range(rounds + 1), f"measuring {what}", transient=True):
        for name, run in timed.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def speed(seconds: float, tokens: int) -> dict[str, float]:
    return {"ms": round(1e3 * seconds, 2), "tokens/s": round(tokens / seconds)}


def columns(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def show(table: dict) -> None:
    drawn = Table(title=table["title"], title_justify="left")
    for column in columns(table["rows"]):
        drawn.add_column(column, justify="left" if isinstance(table["rows"][0].get(column), str) else "right")
    for row in table["rows"]:
        drawn.add_row(*(format_cell(row.get(column)) for column in columns(table["rows"])))
    Console().print(drawn)


def page(tables: list[dict]) -> str:
    """docs/tables.md is one of these."""
    kernel = backend_info()["cpu"]["bfloat16"].rpartition(",")[0]
    head = f"""# Tables

Made by `python examples/tables.py --markdown docs/tables.md --plot docs/tables.png`, on {cpu_name()},
{torch.get_num_threads()} threads, torch {torch.__version__}, {kernel}.

Columns in ms are medians measured on this CPU, in rotation. Cycles are simulated, of the NPU kernel, by a model that
knows no HBM limit. The machine is shared with others: ratios mean more than times.

![Latency over the number of experts, as published, measured here, and simulated](tables.png)
"""
    return "\n".join([head, *(markdown(table) for table in tables)])


def markdown(table: dict) -> str:
    names = columns(table["rows"])
    lines = [f"**{table['title']}**", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(format_cell(row.get(name)) for name in names) + " |" for row in table["rows"]]
    return "\n".join([*lines, ""])


def format_cell(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    experts = [row["experts"] for row in rows]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    published = [ms / PUBLISHED[2] for ms in PUBLISHED.values()]
    axes.plot(list(PUBLISHED), published, "o--", color="#999", label="published, Ascend 910")
    axes.plot(experts, [row["growth"] for row in rows], "o-", label="measured here, CPU")
    if "simulated growth" in rows[0]:
        axes.plot(experts, [row["simulated growth"] for row in rows], "s-", label="simulated, NPU kernel")
    axes.set(xscale="log", xticks=experts, xticklabels=experts, ylim=(0, None), xlabel="experts",
             ylabel="latency, 2 experts = 1")  # fmt: skip
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
