"""Mixture-of-Experts ops for torch.compile, with Ascend NPUs in mind. Importing it registers torch.ops.npu_moe."""

from . import ops as _ops  # noqa: F401  registers the ops
from .backends import backend_info
from .functional import grouped_swiglu_ffn, permute, topk_router, unpermute
from .layer import SparseMoE, moe
from .losses import load_balancing_loss
from .weights import fuse_gate_up, pack_experts

__version__ = "0.1.0"
__all__ = [
    "SparseMoE",
    "backend_info",
    "fuse_gate_up",
    "grouped_swiglu_ffn",
    "load_balancing_loss",
    "moe",
    "pack_experts",
    "permute",
    "topk_router",
    "unpermute",
]
