"""The simulator as a tool: costs, the ratios that the kernel is held to, the command line."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean

import pytest

from npu_moe_ops.npu import report, simulate
from npu_moe_ops.npu.simulate import WORKLOADS, Job

if find_spec("pypto") is None:
    pytest.skip("needs pypto", allow_module_level=True)
DOCS = Path(__file__).parents[1] / "docs/npu.md"
PLANS = ("auto", report.ORIGINAL)


@pytest.fixture(scope="module")
def bench():
    """Every workload with both plans: what `python -m npu_moe_ops simulate --bench` runs."""
    jobs = [Job(counts, plan=plan) for counts in WORKLOADS.values() for plan in PLANS]
    found = list(simulate.costs(jobs))
    return {name: dict(zip(PLANS, found[2 * n : 2 * n + 2], strict=True)) for n, name in enumerate(WORKLOADS)}


def test_half_the_cycles_of_the_original(bench):
    """Simulated and deterministic, so they can be asserted."""
    plain, floored = (
        [simulate.ratio(by_plan["auto"], by_plan[report.ORIGINAL], floor) for by_plan in bench.values()]
        for floor in (False, True)
    )
    assert geometric_mean(plain) >= 2.2
    assert geometric_mean(floored) >= 1.85
    assert min(floored) >= 1.35


def test_original_costs_what_its_own_source_does(bench):
    """The published kernel, run as it is, takes these cycles on this model: the preset is that kernel."""
    expected = {"a": 145_411, "b": 180_478, "c": 208_410, "d": 719_534, "e": 213_524, "f": 179_846, "g": 334_280}
    assert {name[0]: costs[report.ORIGINAL].cycles for name, costs in bench.items() if name[0] in expected} == expected
    assert {costs[report.ORIGINAL].leaf_kernels for costs in bench.values()} == {55}


def test_few_leaf_kernels_and_quick_passes(bench):
    for by_plan in bench.values():
        assert by_plan["auto"].leaf_kernels <= 6
        assert by_plan["auto"].passes_s < by_plan[report.ORIGINAL].passes_s


def test_every_task_is_accounted_for(bench):
    cost = bench["b 8x64"]["auto"]
    kinds = [task.kind for task in cost.tasks]
    assert kinds.count("gate/up") == kinds.count("down") == 8 * 3
    assert kinds.count("vector") == 8 * 2  # 64 rows are two vector tiles
    assert kinds.count("other") == 1  # what orders the bounds
    assert max(task.end for task in cost.tasks) <= cost.cycles
    assert 0 < cost.cube_utilisation < 1
    assert cost.ddr_floor == 8 * 3 * 2048 * 512 * 2 // 768
    assert cost.load_floor < cost.ddr_floor


def test_table_in_the_docs_is_this_one(bench):
    text = DOCS.read_text()
    for name, by_plan in bench.items():
        ours, theirs = by_plan["auto"], by_plan[report.ORIGINAL]
        plain, floored = (simulate.ratio(ours, theirs, floor) for floor in (False, True))
        row = f"| {name} | {theirs.cycles:,} | {ours.cycles:,} | {ours.ddr_floor:,} | {plain:.2f} | {floored:.2f} |"
        assert row in text, row


def test_summary_names_both_means(bench):
    (line,) = report.Simulated(bench).summary()
    assert line.startswith("auto: 2.")
    assert "where none is counted below its DDR floor" in line


def command(*arguments, cwd):
    line = [sys.executable, "-m", "npu_moe_ops", "simulate", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd)


def test_json_and_files_are_all_that_is_left(tmp_path):
    done = command("--counts", "0,3,1", "--hidden", "64", "--intermediate", "48", "--trace", "t.json", "--plot",
                   "lanes.png", "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["workload"] == "0,3,1"
    assert row["plan"] == "auto"
    assert row["ddr_floor"] == 2 * 3 * 64 * 48 * 2 // 768
    assert row["cycles"] > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lanes.png", "t.json"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_table_compares_plans(tmp_path):
    done = command("--counts", "5,40", "--hidden", "128", "--intermediate", "64", "--dtype", "float16", "--transposed",
                   "--plan", "single", "--plan", "llada2_original", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "simulated cycles" in done.stdout
    assert "single: " in done.stdout
    assert "times fewer simulated cycles than llada2_original" in done.stdout


def test_router_in_one_kernel_beside_two(tmp_path):
    done = command("--router", "32", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, logits, choice = (row["cycles"] for row in json.loads(done.stdout)["rows"])
    assert max(logits, choice) < one < logits + choice + 10_000  # a launch costs more than that
    assert f"| 32 | {one:,} | {logits:,} | {choice:,} |" in DOCS.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--counts", "1,x"], "integers >= 0 with commas between them, got '1,x'"),
        (["--counts", "0,0"], "not all 0, got '0,0'"),
        (["--counts", "1", "--hidden", "0"], "an integer >= 1, got '0'"),
        (["--counts", "1", "--plan", "fast"], "preset must be one of auto, buffered"),
        (["--counts", "1", "--plan", "auto", "--plan", "single", "--trace", "t"], "--trace needs one --plan, got 2"),
        (["--bench", "--plot", "p.png"], "--trace and --plot need --counts, not --bench"),
        (["--router", "4", "--plan", "auto"], "--plan is not for --router"),
        (["--counts", "1", "--hardware"], "--hardware needs an NPU and torch_npu, got none"),
        ([], "one of the arguments --counts --bench --router is required"),
    ],
)
def test_bad_command_lines_say_what_is_wrong(arguments, message, tmp_path):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_a_simulation_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match=r"npu simulator: Job\(counts=\(1,\).*ended with status"):
        simulate.cost(Job((1,), dtype="float64"))
