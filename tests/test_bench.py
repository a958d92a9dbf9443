"""The bench: its peers compute the same; its floors and turns; what it writes. No time is compared with another."""

import contextlib
import dataclasses
import json
import sys

import pytest
import torch

from npu_moe_ops import __main__ as command
from npu_moe_ops.bench import clock, kt, measure, peers, report

SIZES = peers.Sizes(experts=8, hidden=64, intermediate=32, top_k=3)
TINY = ["--experts", "8", "--hidden", "64", "--intermediate", "32", "--top-k", "3", "--rounds", "2"]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(measure, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "SQUARE", 64)
    monkeypatch.setattr(measure, "MOST_ROWS", 2 * measure.FEW_ROWS)


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_peers_compute_the_same(tokens):
    w13, w2 = peers.weights(SIZES)
    layers, left_out = peers.peers(SIZES, w13, w2, peers.layouts(w13, w2))
    assert len(layers) + len(left_out) == len(report.ORDER) - 1
    x, ids, scores = peers.batch(SIZES, tokens, seed=tokens)
    assert all(len(set(row)) == SIZES.top_k for row in ids.tolist())
    right = torch.zeros(tokens, SIZES.hidden, dtype=torch.float64)
    for t in range(tokens):
        for expert, score in zip(ids[t], scores[t], strict=True):
            gate, up = (w13[expert].double() @ x[t].double()).chunk(2)
            right[t] += score * (w2[expert].double() @ (gate * gate.sigmoid() * up))
    for name, layer in layers.items():
        torch.testing.assert_close(
            layer(x, ids, scores).double(), right, rtol=0, atol=3e-2, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_floor_is_the_slower_of_reading_and_multiplying():
    limits = measure.Limits(read=1e9, gemm=1e12, gemm_dtype="float32")
    sizes = peers.Sizes(experts=4, hidden=1000, intermediate=100, top_k=2)  # 600 kB and 600 kFLOP a row
    assert limits.floor(sizes, active=3, rows=6) == (pytest.approx(1.8e-3), "read")
    assert limits.floor(sizes, active=4, rows=10_000) == (pytest.approx(6e-3), "GEMM")


def test_each_peer_has_each_place_as_often():
    names = ["a", "b", "c", "d"]
    turns = [clock.rotated(names, turn) for turn in range(8)]
    for place in range(4):
        assert sorted(turn[place] for turn in turns) == sorted(names * 2)


def test_writes_what_it_found(tmp_path, capsys):
    places = [tmp_path / name for name in ("found.json", "page.md", "plot.png")]
    options = [str(word) for pair in zip(("--json", "--markdown", "--plot"), places, strict=True) for word in pair]
    assert command.main(["bench", "--tokens", "1,5", *TINY, *options]) == 0
    shown = capsys.readouterr().out
    found = json.loads(places[0].read_text())
    assert found["sizes"] == dataclasses.asdict(SIZES)
    assert [point["tokens"] for point in found["points"]] == [1, 5]
    names = set(found["points"][0]["seconds"])
    assert names | set(found["left_out"]) == set(report.ORDER)
    for point in found["points"]:
        assert SIZES.top_k <= point["active"] <= SIZES.experts
        assert min(point["seconds"].values()) > 0
        limits = measure.Limits(**point["limits"])
        assert [point["floor"], point["bound"]] == list(
            limits.floor(SIZES, point["active"], SIZES.top_k * point["tokens"])
        )
    assert [line["values"] for line in found["lines"]] == [[1, 2, 4, 8], [512, 1024]]
    page = places[1].read_text()
    for name in names:
        assert shown.count(name) >= 3
        assert page.count(f"| {name} |") == 3
    first = found["points"][0]
    assert f"| {peers.OURS} | {1e3 * first['seconds'][peers.OURS]:.2f} |" in page
    assert "| loop over experts | 1.00 | 1.00 |" in page
    assert "](plot.png)" in page
    assert places[2].read_bytes()[:4] == b"\x89PNG"
    assert all(f"wrote {place}" in shown.replace("\n", "") for place in places)


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    for module in ("transformers", "kt_kernel"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(kt, "times", _not_there)
    assert command.main(["bench", "--tokens", "2", *TINY]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"left out: {peers.KT}: No module named 'kt_kernel'" in shown
    assert f"left out: {peers.HF_EAGER}: import of transformers halted" in shown


def _not_there(*_):
    raise kt.LeftOut("No module named 'kt_kernel'")


def test_a_process_that_fails_is_left_out():
    """Whether kt-kernel is missing or cannot take such sizes."""
    with pytest.raises(kt.LeftOut, match=r"\w+"):
        kt.times(peers.Sizes(experts=0), (1,), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1,0"], "must be an integer >= 1, got '0'"),
        (["--tokens", "1,,2"], "must be an integer >= 1, got ''"),
        (["--rounds", "x"], "must be an integer >= 1, got 'x'"),
        (["--experts", "4", "--top-k", "5"], "--top-k must be at most --experts = 4, got 5"),
        (["--json", "nowhere/found.json"], "there is no folder"),
    ],
)
def test_bad_options(options, message, capsys):
    with contextlib.suppress(SystemExit):  # argparse's
        assert command.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err
