"""pytest -p npu_moe_ops.virtual_npu.plugin: tests run with an NPU that is not there."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from . import device, graphs, silence, start

if TYPE_CHECKING:
    from .ge.graph import Graph

start()


@pytest.fixture(autouse=True)
def _virtual_npu() -> Iterator[None]:
    """Nothing of one test is left for the next; what a replayed kernel raised fails the test."""
    silence()  # pytest puts filters of its own in place for each test
    yield
    raised = list(device.errors)
    device.errors.clear()
    torch._dynamo.reset()
    graphs().clear()
    assert not raised, f"kernels raised while a graph was replayed: {raised}"


@pytest.fixture
def npu_graphs() -> "list[Graph]":
    """The graphs given to the graph engine in this test, newest last."""
    return graphs()
