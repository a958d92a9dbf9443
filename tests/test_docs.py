"""Every code block of README and docs runs and prints what the page says; every example runs."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ON_NPU = {"three-ways.md", "virtual-npu.md"}  # run by tests/on_npu
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
SEARCHED = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page):
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ON_NPU], ids=lambda p: p.name)
def test_code_blocks(page, fresh_compiler):
    run_page(page)


def run_page(page):
    namespace, printed = {"__name__": "page"}, None
    for language, code in blocks(page):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, page.name, "exec"), namespace)
            printed = out.getvalue()
        elif language == "text" and printed is not None:
            assert code.strip() == printed.strip()
            printed = None
        else:
            assert language in {"console", "text", "python"}, f"a block of {language!r} is run by no test"
            printed = None
            for line in code.splitlines() if language == "console" else ():
                if line.startswith("$ make "):
                    targets = line.removeprefix("$ make ").split("#")[0].split()
                    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True)
                elif line.startswith("$ "):
                    assert shutil.which(line.split()[1], path=SEARCHED), line


def test_both_readmes_show_the_same_code():
    english, chinese = (blocks(ROOT / name) for name in ("README.md", "README.zh.md"))
    assert [b for b in english if b[0] != "text"] == [b for b in chinese if b[0] != "text"]


def test_links_between_files():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


EXPECT = {
    "01_quickstart.py": ("graphs compiled: 1, graph breaks: 0", "op, compiled"),
    "02_compile.py": ("20 distributions of 24 rows: 1 graph", "run at N = 0, 1, 7: npu_moe.grouped_swiglu_ffn.default"),
    "03_layer.py": ("moe() equals the experts one by one: True", "output: (2, 9, 64)"),
    "04_training.py": ("step 60: loss",),
    "05_npu_simulated.py": (" 0 failed", "published settings 145,411, DDR floor 49,152"),
    "06_model_on_npu.py": ("the same as on the CPU: True", "SparseMoE compiled for the graph engine"),
    "07_ge_graph.py": ("GroupedMatmul -> SwiGlu -> GroupedMatmul", "reads [256, 1024, 2048] as it lies: True"),
    "08_hugging_face.py": ("the same tokens generated: True", "layers in one op: 2 of 2"),
}
UNDER = {"06_model_on_npu.py": ["-m", "npu_moe_ops.virtual_npu"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples(example):
    assert len(example.read_text().splitlines()) < 60
    command = [sys.executable, *UNDER.get(example.name, []), str(example)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    for expected in EXPECT[example.name]:
        assert expected in run.stdout
    if example.name == "01_quickstart.py":
        assert all(float(error) < 0.02 for error in re.findall(r"│ (\d\.\d{4}) ", run.stdout))
    if example.name == "04_training.py":
        losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
        assert losses[-1] < 0.6 * losses[0]
