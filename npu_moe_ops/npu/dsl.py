"""What both kernels take from pypto. Imports it, as they do."""

from typing import Any

import pypto
import torch

DTYPES = {torch.bfloat16: pypto.DT_BF16, torch.float16: pypto.DT_FP16, torch.float32: pypto.DT_FP32}
FP32 = pypto.DT_FP32
ND = pypto.TileOpFormat.TILEOP_ND


def least(value: Any, limit: int) -> Any:
    """min(value, limit), where value is an int or a symbol."""
    return min(value, limit) if isinstance(value, int) else value.min(limit)
