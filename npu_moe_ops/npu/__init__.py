"""The way onto the NPU: dispatch key PrivateUse1, and GE graphs. pypto and torch_npu are imported when needed."""

from . import lowering as lowering
from .backward import grouped_swiglu_ffn_backward as grouped_swiglu_ffn_backward
from .launch import grouped_swiglu_ffn as grouped_swiglu_ffn
from .routing import permute as permute
from .routing import topk_router as topk_router
from .routing import unpermute as unpermute
