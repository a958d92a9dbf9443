"""Options that ask.py and bench.py share, and the model that they name."""

import argparse
from pathlib import Path
from typing import Any

import checkpoint
import torch
from config import Config
from model import LLaDA2MoeModelLM
from text import ByteTokenizer, PublishedTokenizer, tokenizer_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parser(description: str | None) -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    shared.add_argument("--model-path", type=Path, required=True, help="folder with config.json and safetensors")
    shared.add_argument("--prompt", default="The for statement", help="text to complete, or to answer")
    shared.add_argument("--output-length", type=int, default=100, help="tokens at most")
    shared.add_argument("--steps", type=int, default=32, help="of denoising, for each block")
    shared.add_argument("--block-length", type=int, default=32, help="tokens of a block")
    shared.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    shared.add_argument(
        "--threshold", type=float, default=0.95, help="probability from which a token is accepted at once"
    )
    shared.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    shared.add_argument("--dtype", choices=DTYPES, help="of the weights; that of the checkpoint if not given")
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--report-file", type=Path, help="write what was measured here, as JSON")
    return shared


def load(args: argparse.Namespace, experts: str) -> tuple[LLaDA2MoeModelLM, ByteTokenizer | PublishedTokenizer]:
    if args.device == "npu":
        import torch_npu  # noqa: F401  # makes 'npu' a device
    dtype = DTYPES[args.dtype] if args.dtype else None
    model = checkpoint.load(args.model_path, experts=experts, device=args.device, dtype=dtype).eval()
    config: Config = model.config
    return model, tokenizer_of(args.model_path, config.vocab_size, config.pad_token_id)


def generation(args: argparse.Namespace, tokenizer: ByteTokenizer | PublishedTokenizer) -> dict[str, Any]:
    """Arguments of generate() after the model and the prompt."""
    return {
        "temperature": args.temperature,
        "block_length": args.block_length,
        "steps": args.steps,
        "gen_length": args.output_length,
        "threshold": args.threshold,
        "eos_early_stop": True,
        "eos_id": tokenizer.eos_id,
        "mask_id": tokenizer.mask_id,
    }


def prompt(args: argparse.Namespace, tokenizer: ByteTokenizer | PublishedTokenizer) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(args.prompt)], device=args.device)


def generator(args: argparse.Namespace) -> torch.Generator:
    return torch.Generator(args.device).manual_seed(args.seed)
