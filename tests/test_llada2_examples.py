"""Training, asking and benchmarking a small LLaDA2, as a user types it; and the tables."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/llada2"


@pytest.fixture(scope="module")
def examples():
    """The scripts import each other as neighbours."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        import train_tiny

        yield train_tiny
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == FOLDER:
                del sys.modules[name]


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_trains_alike(examples):
    """Forward and backward of the ops, over some steps of an optimizer."""
    config = replace(examples.TINY, num_hidden_layers=3, hidden_size=64, num_experts=8, moe_intermediate_size=32)
    recipe = examples.Recipe(steps=12, sequences=2, length=64)
    loop, ops = (examples.train(examples.new_model(config, kind, seed=3), recipe) for kind in ("loop", "npu_moe"))
    torch.testing.assert_close(torch.tensor(ops.loss), torch.tensor(loop.loss), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(torch.tensor(ops.balance), torch.tensor(loop.balance), rtol=2e-2, atol=2e-2)
    assert loop.loss[-1] < 0.8 * loop.loss[0]


def test_masks(examples):
    """Each block has a mask, of the weight of its degree; the clean copy is what a masked block sees of the others."""
    clean = torch.randint(0, 256, (500, 64))
    masked, weight = examples.mask_blocks(clean, 16, torch.Generator())
    assert masked.view(500, 4, 16).any(dim=2).all()
    assert (weight[~masked] == 0).all()
    assert 0.9 < weight.mean() < 1.25  # the expected weight of a position is 1, but for the mask that each block has
    sees = examples.both_copies(4, 2)[0, 0].int().tolist()
    assert sees == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ]


def test_a_masked_block_sees_what_generation_shows_it(examples):
    """The logits of training are those of a forward over the clean blocks before and the masked block."""
    model = examples.new_model(examples.TINY, "npu_moe", seed=1).eval()
    clean, block = torch.randint(0, 256, (1, 96)), 32
    masked = torch.rand(1, 96) < 0.5
    both = torch.cat([torch.where(masked, examples.MASK, clean), clean], dim=1)
    logits, _ = model.forward_with_routing(both, examples.both_copies(96, block), torch.arange(96).repeat(2))
    for end in (32, 64, 96):
        ids = clean[:, :end].clone()
        ids[:, end - block :] = both[:, end - block : end]
        number = torch.arange(end) // block
        shown = model(ids, (number[:, None] >= number[None, :])[None, None])
        torch.testing.assert_close(logits[:, end - block : end], shown[:, -block:], rtol=1e-3, atol=1e-3)


def test_train_ask_and_bench(tmp_path):
    tiny, report, timing = tmp_path / "tiny", tmp_path / "ask.json", tmp_path / "bench.json"
    printed = run("llada2/train_tiny.py", "--out", tiny, "--steps", 3, "--sequences", 2, "--length", 64)
    assert "1.6 M parameters" in printed
    assert (tiny / "history.png").stat().st_size > 10_000
    history = json.loads((tiny / "history.json").read_text())
    assert len(history["loss"]) == 3
    assert all(abs(sum(load) - 1) < 1e-5 for step in history["load"] for load in step)
    layers = (tiny / "routings.txt").read_text().split()
    assert [len(ids) for ids in layers] == [256 * 4] * 3
    assert all(len(set(ids[t : t + 4])) == 4 for ids in layers for t in range(0, len(ids), 4))

    short = ("--model-path", tiny, "--output-length", 20, "--block-length", 8, "--steps", 4, "--threshold", 0.5)
    for kind in ("loop", "npu_moe"):
        run("llada2/ask.py", *short, "--experts", kind, "--report-file", report)
        answered = json.loads(report.read_text())
        assert 1 <= answered["tokens"] <= 20
        assert answered["experts"] == kind
    printed = run(
        "llada2/bench.py", *short, "--warmup", 1, "--runs", 2, "--report-file", timing, "--plot", tmp_path / "b.png"
    )
    assert "times faster" in printed
    found = json.loads(timing.read_text())["experts"]
    for values in found.values():
        assert 0 < values["seconds_min"] <= values["seconds_mean"] <= values["seconds_max"]
        assert 1 <= values["tokens"] <= 20
        assert values["peak_mb"] > 6  # the weights alone
    assert (tmp_path / "b.png").stat().st_size > 5_000


def test_tables(tmp_path):
    sizes = (
        "--tokens",
        32,
        "--hidden",
        32,
        "--intermediate",
        16,
        "--llada2",
        64,
        32,
        16,
        "--rounds",
        1,
        "--experts",
        2,
        8,
    )
    files = tmp_path / "t.json", tmp_path / "t.md", tmp_path / "t.png"
    printed = run("tables.py", *sizes, "--json", files[0], "--markdown", files[1], "--plot", files[2])
    tables = json.loads(files[0].read_text())
    assert list(tables) == ["experts", "dense", "top_k", "llada2", "trained"]
    assert [row["experts"] for row in tables["experts"]] == [2, 8]
    assert all(row["ms"] > 0 and row["simulated cycles"] > 0 for row in tables["experts"])
    assert tables["llada2"][-1]["simulated cycles"] > 0
    assert [row["most rows"] for row in tables["trained"]][-1] == 128
    assert all(row["fewest rows"] < 128 < row["most rows"] for row in tables["trained"][:-1])
    assert all(row["simulated cycles"] > 0 for row in tables["trained"])
    assert files[1].read_text().count("|---|") >= 4
    assert files[2].stat().st_size > 5_000
    assert "32 tokens over more experts" in printed
