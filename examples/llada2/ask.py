"""Ask a LLaDA2 model: `python examples/llada2/ask.py --model-path FOLDER --prompt TEXT`."""

import json
import time

import options
import torch
from generate import generate
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--experts", choices=("npu_moe", "loop"), default="npu_moe", help="how experts are computed")
    args = parser.parse_args()
    console = Console()
    with console.status(f"loading {args.model_path}"):
        model, tokenizer = options.load(args, args.experts)
    ids = options.prompt(args, tokenizer)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar, torch.no_grad():
        task = bar.add_task("generating", total=args.output_length)
        start = time.perf_counter()
        out = generate(
            model,
            ids,
            **options.generation(args, tokenizer),
            generator=options.generator(args),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        seconds = time.perf_counter() - start
    tokens = out.flatten().tolist()
    answer = tokenizer.decode(tokens)
    console.print(f"[bold]{args.prompt}[/bold]{answer}", highlight=False)
    rate = len(tokens) / seconds
    console.print(f"{len(tokens)} tokens in {seconds:.2f} s, {rate:.1f} tokens/s, experts: {args.experts}", style="dim")
    if args.report_file:
        report = {
            "prompt": args.prompt,
            "answer": answer,
            "tokens": len(tokens),
            "seconds": seconds,
            "tokens_per_s": rate,
            "experts": args.experts,
            "device": args.device,
        }
        args.report_file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
