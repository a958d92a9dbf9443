"""Train a small LLaDA2 on English text in a few minutes on two cores; the checkpoint has the published keys.

    python examples/llada2/train_tiny.py --out tiny
    python examples/llada2/ask.py --model-path tiny --prompt "The for statement"

Block diffusion: each block of the text is masked to a degree of its own and predicted from what is left of it and from
all blocks before it, unmasked. Both copies of the text go through the model at once, so that no block is wasted. The
loss weighs a masked position by 1 / (how much of its block is masked), and adds the load-balancing loss.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import checkpoint
import torch
import torch.nn.functional as F
from config import Config
from model import LLaDA2MoeModelLM
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import EOS, MASK, VOCABULARY, ByteTokenizer, batches, english
from torch import Tensor

from npu_moe_ops import load_balancing_loss

TINY = Config(
    vocab_size=VOCABULARY,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_experts=16,
    num_experts_per_tok=4,
    num_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    max_position_embeddings=1024,
    rope_theta=10000.0,
    pad_token_id=EOS,
)


@dataclass
class History:
    """What each step measured."""

    loss: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    load: list[list[list[float]]] = field(default_factory=list)  # [step][layer][expert]: its part of all choices


@dataclass(frozen=True)
class Recipe:
    steps: int = 700
    sequences: int = 8
    length: int = 128
    block: int = 8
    rate: float = 3e-3
    balance: float = 0.01
    seed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiny-llada2"), help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--sequences", type=int, default=Recipe.sequences, help="a step")
    parser.add_argument("--length", type=int, default=Recipe.length, help="of a sequence, in bytes")
    parser.add_argument("--block-length", type=int, default=Recipe.block)
    parser.add_argument("--rate", type=float, default=Recipe.rate, help="learning rate")
    parser.add_argument("--experts", choices=("npu_moe", "loop"), default="npu_moe")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    recipe = Recipe(args.steps, args.sequences, args.length, args.block_length, args.rate, seed=args.seed)
    model = new_model(TINY, args.experts, args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {TINY.num_experts} experts, top {TINY.num_experts_per_tok}")
    history = train(model, recipe, progress=True)
    checkpoint.save(model, args.out)
    (args.out / "history.json").write_text(json.dumps(vars(history)))
    plot(history, args.out / "history.png")
    layers = routings(model, recipe).flatten(1).tolist()
    (args.out / "routings.txt").write_text("".join("".join(f"{e:x}" for e in ids) + "\n" for ids in layers))
    print(
        f"loss {history.loss[0]:.2f} -> {mean(history.loss[-20:]):.2f}; checkpoint, curves and routings in {args.out}"
    )


def new_model(config: Config, experts: str, seed: int) -> LLaDA2MoeModelLM:
    """The same numbers for both kinds of experts: drawn for one, handed to the other."""
    torch.manual_seed(seed)
    drawn = LLaDA2MoeModelLM(config, experts="loop")
    for name, parameter in drawn.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embeddings" in name else parameter.shape[1] ** -0.5)
    if experts == "loop":
        return drawn
    model = LLaDA2MoeModelLM(config, experts=experts)
    model.load_state_dict(drawn.state_dict())
    return model


def train(model: LLaDA2MoeModelLM, recipe: Recipe, progress: bool = False) -> History:
    history = History()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, n / recipe.steps)))
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    tokens = torch.tensor(ByteTokenizer().encode(english()))
    text = batches(tokens, recipe.sequences, recipe.length, recipe.seed)
    for _ in steps(recipe.steps, history, shown=progress):
        loss, balance, load = losses(model, next(text), recipe.block, generator)
        optimizer.zero_grad(set_to_none=True)
        (loss + recipe.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.loss.append(loss.item())
        history.balance.append(balance.item())
        history.load.append(load)
    return history


def losses(
    model: LLaDA2MoeModelLM, clean: Tensor, block: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, list[list[float]]]:
    """(diffusion loss, mean load-balancing loss of the layers, each layer's load) of clean text [B, S]."""
    length = clean.shape[1]
    masked, weight = mask_blocks(clean, block, generator)
    ids = torch.cat([torch.where(masked, MASK, clean), clean], dim=1)
    positions = torch.arange(length).repeat(2)
    logits, routed = model.forward_with_routing(ids, both_copies(length, block), positions)
    entropy = F.cross_entropy(logits[:, :length].transpose(1, 2).float(), clean, reduction="none")
    loss = (entropy * weight).sum() / clean.numel()
    experts = model.config.num_experts
    balance = torch.stack([load_balancing_loss(router_logits, topk_ids, experts) for router_logits, topk_ids in routed])
    return loss, balance.mean(), [load(topk_ids, experts) for _, topk_ids in routed]


def mask_blocks(clean: Tensor, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(which positions are masked, weight of each in the loss) [B, S]; at least one in a block."""
    sequences, length = clean.shape
    blocks = length // block
    degree = torch.rand(sequences, blocks, 1, generator=generator).clamp(min=1 / block)
    noise = torch.rand(sequences, blocks, block, generator=generator)
    masked = (noise < degree) | (noise == noise.amin(dim=-1, keepdim=True))
    return masked.view(sequences, length), (masked / degree).view(sequences, length)


def both_copies(length: int, block: int) -> Tensor:
    """[1, 1, 2S, 2S]: a masked block sees itself and the clean blocks before it, a clean one those up to its own."""
    number = torch.arange(length) // block
    itself, before = number[:, None] == number[None, :], number[:, None] > number[None, :]
    masked_rows = torch.cat([itself, before], dim=1)
    clean_rows = torch.cat([torch.zeros_like(itself), before | itself], dim=1)
    return torch.cat([masked_rows, clean_rows])[None, None]


@torch.no_grad()
def routings(model: LLaDA2MoeModelLM, recipe: Recipe) -> Tensor:
    """Expert ids that the trained routers choose, [layers, T, K]; npu_moe_ops.testing keeps those of one training."""
    tokens = torch.tensor(ByteTokenizer().encode(english()))
    clean = next(batches(tokens, 4, recipe.length, recipe.seed + 1))
    number = torch.arange(recipe.length) // recipe.block
    _, routed = model.forward_with_routing(clean, (number[:, None] >= number[None, :])[None, None])
    return torch.stack([topk_ids.view(-1, topk_ids.shape[-1]) for _, topk_ids in routed])


def load(topk_ids: Tensor, experts: int) -> list[float]:
    counts = torch.bincount(topk_ids.flatten(), minlength=experts)
    part: list[float] = (counts / counts.sum()).tolist()
    return part


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def steps(count: int, history: History, shown: bool) -> Iterator[int]:
    if not shown:
        yield from range(count)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=count)
        for step in range(count):
            yield step
            recent = f"loss {mean(history.loss[-20:]):.3f}, balance {mean(history.balance[-20:]):.3f}"
            bar.update(task, advance=1, description=recent)


def plot(history: History, path: Path) -> None:
    """Loss, balance, and the load of every expert of every layer over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loads = torch.tensor(history.load)  # [steps, layers, experts]
    layers = loads.shape[1]
    figure, axes = plt.subplots(1, 1 + layers, figsize=(4 + 2.2 * layers, 3), layout="constrained")
    axes[0].plot(smooth(history.loss), label="loss, nats a byte")
    axes[0].plot(smooth(history.balance), label="load balancing")
    axes[0].set(xlabel="step", ylim=(0, None))
    axes[0].legend(frameon=False)
    for layer, ax in enumerate(axes[1:]):
        for expert in range(loads.shape[2]):
            ax.plot(smooth(loads[:, layer, expert].tolist()), linewidth=0.8)
        ax.axhline(1 / loads.shape[2], color="black", linestyle=":")
        ax.set(title=f"MoE layer {layer}: load of its experts", xlabel="step", ylim=(0, None))
        ax.title.set_fontsize(9)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(values: list[float], width: int = 15) -> list[float]:
    return [mean(values[max(0, n - width) : n + 1]) for n in range(len(values))]


if __name__ == "__main__":
    main()
