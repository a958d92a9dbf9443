"""Time generation with the experts in a loop and in one call: `python examples/llada2/bench.py --model-path FOLDER`.

Both models are held at once and take turns, so that a busy moment of the machine hits both.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import options
import torch
from generate import generate
from rich.console import Console
from rich.progress import track
from rich.table import Table

KINDS = ("loop", "npu_moe")


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--experts", choices=KINDS, nargs="+", default=KINDS, help="what to time")
    parser.add_argument("--warmup", type=int, default=3, help="generations before the clock starts")
    parser.add_argument("--runs", type=int, default=10, help="generations that are timed")
    parser.add_argument("--plot", type=Path, help="draw the seconds here")
    args = parser.parse_args()
    runs: dict[str, Callable[..., torch.Tensor]] = {}
    weights: dict[str, int] = {}
    for kind in args.experts:
        model, tokenizer = options.load(args, kind)
        ids = options.prompt(args, tokenizer)
        runs[kind] = partial(generate, model, ids, **options.generation(args, tokenizer))
        weights[kind] = sum(p.numel() * p.element_size() for p in model.parameters())
    measured = measure(runs, weights, args)
    report = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "device": args.device,
        "prompt_tokens": ids.shape[1],
        "steps": args.steps,
        "block_length": args.block_length,
        "warmup": args.warmup,
        "runs": args.runs,
        "experts": {kind: summary(**values) for kind, values in measured.items()},
    }
    show(report)
    if args.report_file:
        args.report_file.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot({kind: values["seconds"] for kind, values in measured.items()}, args.plot)


@torch.no_grad()
def measure(
    runs: dict[str, Callable[..., torch.Tensor]], weights: dict[str, int], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Peak: the model's own weights, and what its generation took beyond what both models hold."""
    found: dict[str, dict[str, Any]] = {kind: {"seconds": [], "tokens": 0, "peak": 0} for kind in runs}
    for n in track(range(args.warmup + args.runs), "generating", transient=True):
        for kind, run in runs.items():
            held = memory(args.device, peak=False)
            forget_peak(args.device)
            start = time.perf_counter()
            tokens = len(run(generator=options.generator(args)).flatten().tolist())  # waits for the device
            seconds = time.perf_counter() - start
            if n >= args.warmup:
                took = max(0, memory(args.device, peak=True) - held)
                found[kind]["seconds"].append(seconds)
                found[kind]["tokens"] = tokens
                found[kind]["peak"] = max(found[kind]["peak"], weights[kind] + took)
    return found


def forget_peak(device: str) -> None:
    if device == "npu":
        torch.npu.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def memory(device: str, peak: bool) -> int:
    """Bytes now or at most since forget_peak: of the device, or of this process; 0 where the system does not tell."""
    if device == "npu":
        return int(torch.npu.max_memory_allocated() if peak else torch.npu.memory_allocated())
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    name = "VmHWM" if peak else "VmRSS"
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def summary(seconds: list[float], tokens: int, peak: int) -> dict[str, float]:
    mean = statistics.mean(seconds)
    return {
        "seconds_mean": mean,
        "seconds_std": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens": tokens,
        "tokens_per_s": tokens / mean,
        "peak_mb": peak / 2**20,
    }


def show(report: dict[str, Any]) -> None:
    title = f"{report['machine']}, {report['device']}, {report['threads']} threads, {report['runs']} runs"
    table = Table(title=title, title_justify="left")
    for column in ("experts", "s, mean +- std", "min", "max", "tokens/s", "peak, MB", "times faster"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    slowest = max(values["seconds_mean"] for values in report["experts"].values())
    for kind, v in report["experts"].items():
        table.add_row(
            kind,
            f"{v['seconds_mean']:.3f} +- {v['seconds_std']:.3f}",
            f"{v['seconds_min']:.3f}",
            f"{v['seconds_max']:.3f}",
            f"{v['tokens_per_s']:.1f}",
            f"{v['peak_mb']:,.0f}",
            f"{slowest / v['seconds_mean']:.2f}",
        )
    Console().print(table)


def plot(seconds: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 0.8 + 0.7 * len(seconds)), layout="constrained")
    for row, values in enumerate(seconds.values()):
        axes.barh(row, statistics.mean(values), height=0.5, color=f"C{row}")
        axes.plot(values, [row] * len(values), "|", color="black", markersize=12)
    axes.set(yticks=range(len(seconds)), yticklabels=seconds, xlabel="seconds a generation; a line is one run")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
