"""Tests of tensors on 'npu': pytest -p npu_moe_ops.virtual_npu.plugin tests/on_npu

On a machine with an NPU, leave the plugin out: what looks into the virtual NPU is then left out too.
"""

import sys
from importlib.util import find_spec

import pytest

if "npu_moe_ops.virtual_npu.plugin" not in sys.modules:
    collect_ignore = ["test_device.py", "test_graph_engine.py", "test_mutations.py"]
    collect_ignore_glob = ["test_*.py"] if find_spec("torch_npu") is None else []

    @pytest.fixture(autouse=True)
    def _compiles_afresh(fresh_compiler):
        pass

    @pytest.fixture
    def npu_graphs():
        pytest.skip("no graph can be looked at on a real NPU")
