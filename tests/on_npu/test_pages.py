"""The pages whose code needs an NPU, and the picture that one of them shows."""

import runpy

import pytest
import test_docs

from npu_moe_ops import virtual_npu


@pytest.mark.parametrize("page", sorted(test_docs.ON_NPU))
def test_code_blocks(page):
    test_docs.run_page(test_docs.ROOT / "docs" / page)


def test_the_picture_is_of_todays_graph(tmp_path, monkeypatch):
    drawn = tmp_path / "graph.svg"
    monkeypatch.setattr("sys.argv", ["07_ge_graph.py", str(drawn)])
    runpy.run_path(str(test_docs.ROOT / "examples/07_ge_graph.py"))
    assert drawn.read_text() == (test_docs.ROOT / "docs/npu-graph.svg").read_text()
    assert len(virtual_npu.graphs()) == 1
