"""Arithmetic of CANN's fused operators on CPU tensors, shared by eager mode and by GE graphs.

Each operator is a pair: `check_x` looks at shapes, dtypes and options alone, so that it can refuse a call before its
data exist (while a graph is captured); `x` computes. Sums are in fp32 with one rounding to the result's dtype; memory
that an operator leaves undefined is poisoned, so that a caller who reads it sees NaN or a hopeless index.

The rules come from the torch_npu wheel, the only description of these operators at hand: `_op_plugin_docs.py`,
`op_plugin/meta/_meta_registrations.py` and `dynamo/torchair/_ge_concrete_graph/`. Nothing was compared with a device.
"""

from .activations import (
    check_clipped_swiglu,
    check_swiglu,
    check_swiglu_backward,
    clipped_swiglu,
    swiglu,
    swiglu_backward,
)
from .finalize import check_moe_finalize_routing, moe_finalize_routing
from .gating import check_moe_gating_top_k, moe_gating_top_k
from .matmul import check_grouped_matmul, grouped_matmul
from .routing import check_moe_init_routing_v2, moe_init_routing_v2

__all__ = [
    "check_clipped_swiglu",
    "check_grouped_matmul",
    "check_moe_finalize_routing",
    "check_moe_gating_top_k",
    "check_moe_init_routing_v2",
    "check_swiglu",
    "check_swiglu_backward",
    "clipped_swiglu",
    "grouped_matmul",
    "moe_finalize_routing",
    "moe_gating_top_k",
    "moe_init_routing_v2",
    "swiglu",
    "swiglu_backward",
]
