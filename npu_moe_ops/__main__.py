"""python -m npu_moe_ops: `simulate`, what the NPU kernel would cost, and `bench`, what the CPU kernel costs here."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m npu_moe_ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_simulate(commands)
    _add_bench(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="cycles of the NPU kernel in pypto's simulator",
        description="Simulate grouped_swiglu_ffn's NPU kernel. All cycles are simulated; see docs/npu.md.",
    )
    what = simulate.add_mutually_exclusive_group(required=True)
    what.add_argument("--counts", type=_counts, help="rows of each expert: 0,1,2,4,8,16,32,0")
    what.add_argument("--bench", action="store_true", help="the eight workloads of docs/npu.md")
    what.add_argument("--router", type=_size, metavar="TOKENS", help="topk_router as in LLaDA2.0-mini, and its halves")
    simulate.add_argument("--hidden", type=_size, default=2048, help="H (default: 2048)")
    simulate.add_argument("--intermediate", type=_size, default=512, help="I (default: 512)")
    simulate.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    simulate.add_argument("--transposed", action="store_true", help="weights as [E, 2I, H] and [E, H, I]")
    simulate.add_argument(
        "--plan",
        action="append",
        metavar="PLAN",
        help="auto, buffered, single or llada2_original; may be repeated (default: auto; with --bench also the last)",
    )
    simulate.add_argument("--json", action="store_true", help='print {"rows": [...]} and nothing else')
    simulate.add_argument("--hardware", action="store_true", help="measure on this machine's NPU instead")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for https://ui.perfetto.dev")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="draw the cores over time")
    simulate.set_defaults(run=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from .npu import measure, report
    from .npu.simulate import WORKLOADS, Job, costs

    if arguments.router:
        return _simulate_router(arguments)
    if arguments.bench and (arguments.trace or arguments.plot):
        raise ValueError("simulate: --trace and --plot need --counts, not --bench")
    if arguments.hardware and (arguments.trace or arguments.plot):
        raise ValueError("simulate: --trace and --plot show simulated cycles, not --hardware")
    plans = arguments.plan or (["auto", report.ORIGINAL] if arguments.bench else ["auto"])
    if arguments.trace and len(plans) > 1:
        raise ValueError(f"simulate: --trace needs one --plan, got {len(plans)}")
    workloads = WORKLOADS if arguments.bench else {",".join(map(str, arguments.counts)): arguments.counts}
    fixed = {name: getattr(arguments, name) for name in ("hidden", "intermediate", "dtype", "transposed")}
    fixed["trace"] = str(arguments.trace) if arguments.trace else None
    jobs = {
        workload: {plan: Job(counts, plan=plan, **fixed) for plan in plans} for workload, counts in workloads.items()
    }
    flat = [job for by_plan in jobs.values() for job in by_plan.values()]
    answers: Iterable[Any] = measure.measure(flat) if arguments.hardware else costs(flat)
    results = dict(zip(flat, _tracked(answers, len(flat), arguments.json), strict=True))
    found = {workload: {plan: results[job] for plan, job in by_plan.items()} for workload, by_plan in jobs.items()}
    if arguments.plot:
        report.plot([cost for by_plan in found.values() for cost in by_plan.values()], arguments.plot)
    view = report.Measured(found, jobs) if arguments.hardware else report.Simulated(found)
    return _show(view, arguments.json)


def _simulate_router(arguments: argparse.Namespace) -> int:
    from .npu import report
    from .npu.simulate import ROUTER_PARTS, RouterJob, costs

    for name in ("plan", "hardware", "trace", "plot", "transposed"):
        if getattr(arguments, name):
            raise ValueError(f"simulate: --{name} is not for --router")
    jobs = [
        RouterJob(arguments.router, hidden=arguments.hidden, dtype=arguments.dtype, part=part) for part in ROUTER_PARTS
    ]
    found = {cost.job.plan: cost for cost in _tracked(costs(jobs), len(jobs), arguments.json)}
    return _show(report.Simulated({f"{arguments.router} tokens": found}, op="topk_router"), arguments.json)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="an MoE layer on this CPU, beside other ways and the machine's limits",
        description="Time the experts of an MoE layer on this CPU, beside what else is installed and beside the limits "
        "of the machine, measured in the same run. The defaults are LLaDA2.0-mini's layer: 5 GiB, some minutes.",
    )
    bench.add_argument("--tokens", type=_sizes, default=(1, 4, 32, 256, 2048), metavar="T,T,...", help="%(default)s")
    bench.add_argument("--rounds", type=_size, default=7, help="of the rotation (default: %(default)s)")
    bench.add_argument("--experts", type=_size, default=256, help="E (default: %(default)s)")
    bench.add_argument("--hidden", type=_size, default=2048, help="H (default: %(default)s)")
    bench.add_argument("--intermediate", type=_size, default=512, help="I (default: %(default)s)")
    bench.add_argument("--top-k", type=_size, default=8, help="experts of a token (default: %(default)s)")
    bench.add_argument("--threads", type=_size, help="of torch (default: its own choice)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    bench.add_argument("--markdown", type=Path, metavar="FILE", help="write a page with the tables here")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw time over tokens here")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from .bench import measure, report
    from .bench.peers import Sizes

    if arguments.top_k > arguments.experts:
        raise ValueError(f"bench: --top-k must be at most --experts = {arguments.experts}, got {arguments.top_k}")
    for path in (arguments.json, arguments.markdown, arguments.plot):
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"bench: there is no folder {path.absolute().parent}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    sizes = Sizes(arguments.experts, arguments.hidden, arguments.intermediate, arguments.top_k)
    result = measure.measure(sizes, arguments.tokens, arguments.rounds, _progress)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for part in report.console(result):
        console.print(part)
    if arguments.json:
        arguments.json.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(report.page(result, arguments.plot.name if arguments.plot else None))
    if arguments.plot:
        report.plot(result, arguments.plot)
    for path in filter(None, (arguments.json, arguments.markdown, arguments.plot)):
        console.print(f"wrote {path}")
    return 0


def _show(view: Any, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"rows": view.rows()}))
        return 0
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(view.table())
    for line in view.summary():
        console.print(line)
    return 0


def _tracked(results: Iterable[Any], total: int, quiet: bool) -> Iterable[Any]:
    """With a bar on stderr, unless quiet."""
    return results if quiet else _progress(results, "launches", total)


def _progress(steps: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    return track(steps, what, total, console=Console(stderr=True), transient=True)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(piece) for piece in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers >= 0 with commas between them, got {text!r}") from None
    if min(counts) < 0 or not sum(counts):
        raise argparse.ArgumentTypeError(f"must be integers >= 0, not all 0, got {text!r}")
    return counts


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(piece) for piece in text.split(","))


def _size(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
