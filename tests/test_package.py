"""The package as a whole: names, order of imports, one place for each fact."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_moe_ops
from npu_moe_ops import testing
from npu_moe_ops.testing import DISTRIBUTIONS, token_counts, trained_routings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "npu_moe_ops"
# A module imports from lower levels only.
LEVELS = (
    {"checks", "native.build", "npu.toolchain", "npu.tiling", "npu.dsl", "npu.nodes"},
    {"reference", "native.__init__", "npu.virtual", "npu.kernel", "npu.router_tiling", "npu.cann"},
    {"outputs", "routing", "npu.launch", "npu.router", "npu.cost_model", "npu.lowering"},
    {"cpu", "npu.router_launch", "npu.backward"},
    {"npu.routing"},
    {"npu.__init__"},
    {"vmap"},
    {"ops"},
    {"backends", "functional", "losses", "weights"},
    {"layer"},
    {"__init__"},
    {"integrations.__init__", "integrations.packed", "integrations.gates"},
    {"integrations.llada2_blocks", "integrations.transformers"},
    {"integrations.llada2"},
    {"npu.simulate", "bench.__init__", "bench.clock", "bench.peers"},
    {"npu.report", "npu.worker", "npu.measure", "bench.kt"},
    {"bench.measure"},
    {"bench.report"},
    {"__main__"},
)
APART = {"testing"}  # for tests: imports nothing of the package, and nothing imports it
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
VIRTUAL_NPU = {module for module in MODULES if module.startswith("virtual_npu.")}  # for users: nothing imports it


def imported(module):
    """Modules of this package that a module imports, at its top or in a function."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = module.split(".")[: -node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                target = ".".join([*package, name])
                places = (target, f"{target}.__init__", ".".join([*package, "__init__"]))  # the last: a name in it
                yield next(place for place in places if place in MODULES)


def test_imports_go_one_way():
    level = {module: n for n, modules in enumerate(LEVELS) for module in modules}
    assert set(MODULES) == set(level) | APART | VIRTUAL_NPU
    for module in set(level):
        for other in imported(module):
            assert level[other] < level[module], f"{module} imports {other}"
    assert not list(imported("testing"))
    apart = VIRTUAL_NPU | {"npu.__init__", "npu.toolchain"}
    assert not [(module, other) for module in VIRTUAL_NPU for other in imported(module) if other not in apart]


def test_one_file_says_torch_library():
    sayers = {name for name, path in MODULES.items() if "torch.library" in path.read_text().split('"""', 2)[-1]}
    assert sayers - VIRTUAL_NPU == {"ops"}


def test_public_names():
    assert npu_moe_ops.__all__ == sorted(npu_moe_ops.__all__)
    for name in npu_moe_ops.__all__:
        assert getattr(npu_moe_ops, name).__doc__
    assert (PACKAGE / "py.typed").exists()


def test_import_needs_torch_alone():
    script = """
import sys, torch
before = set(sys.modules)
import npu_moe_ops
new = {m.partition(".")[0] for m in set(sys.modules) - before}
print(sorted(new - {"npu_moe_ops", "torch"} - sys.stdlib_module_names))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_changelog_knows_the_version():
    assert f"## [{npu_moe_ops.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_strategies_give_what_they_say(distribution):
    @settings(max_examples=30)
    @given(st.data(), st.integers(3, 12), st.integers(0, 50))
    def run(data, experts, rows):
        counts = data.draw(token_counts(experts, rows, distribution))
        assert len(counts) == experts
        assert min(counts) >= 0
        if distribution == "all_empty":
            assert sum(counts) == 0
        elif distribution == "tail_rows":
            assert sum(counts) < max(rows, 1)
        else:
            assert sum(counts) == rows
        empty = {"empty_first": 0, "empty_middle": experts // 2, "empty_last": -1}
        if distribution in empty:
            assert counts[empty[distribution]] == 0
        if distribution == "balanced":
            assert max(counts) - min(counts) <= 1
        if distribution == "all_to_one":
            assert sorted(counts)[:-1] == [0] * (experts - 1)

    run()


def test_trained_routings():
    ids = trained_routings()
    assert ids.shape == (3, 512, 4)
    assert ids.dtype == torch.int64
    assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all()  # four experts a token
    assert set(ids.flatten().tolist()) == set(range(16))
    assert ((ids // 4).sort(dim=-1).values.diff(dim=-1) > 0).sum(dim=-1).max() == 1  # of two groups


@settings(max_examples=1)
@given(st.data())
def test_strategies_refuse(data):
    with pytest.raises(ValueError, match=r"distribution must be one of balanced, .* got 'even'"):
        data.draw(token_counts(3, 4, "even"))
    with pytest.raises(ValueError, match="num_experts must be >= 1 and rows >= 0, got 0 and 4"):
        data.draw(token_counts(0, 4))
    assert set(testing.TOLERANCE) == set(npu_moe_ops._ops.checks.FLOATS)
