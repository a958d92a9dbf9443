"""Which implementation of the FFN a device and a dtype take, and why: for people who ask."""

from . import native
from .checks import FLOATS
from .npu import toolchain


def backend_info() -> dict[str, dict[str, str]]:
    """Device -> dtype -> what computes `grouped_swiglu_ffn` there, and why, as text.

    Devices are "cpu", "npu" and "others". The native CPU kernel is built for this, if it is not built yet.
    """
    names = [str(dtype).removeprefix("torch.") for dtype in FLOATS]
    kernels = {str(dtype).removeprefix("torch.") for dtype in native.DTYPES}
    cpu, npu = native.describe(), _npu()
    return {
        "cpu": {name: cpu if name in kernels else "torch, expert by expert in fp64" for name in names},
        "npu": {name: npu if name in kernels else "refused: no fp64 products on an NPU" for name in names},
        "others": dict.fromkeys(names, "torch, expert by expert"),
    }


def _npu() -> str:
    graph = 'CANN\'s grouped products under torch.compile(backend="npu"), the PyPTO kernel otherwise'
    try:
        toolchain.require_pypto("grouped_swiglu_ffn")
        toolchain.require_cann("grouped_swiglu_ffn")
        toolchain.require_torch_npu("grouped_swiglu_ffn")
    except toolchain.Missing as error:
        return f"{graph}; not here: {error}"
    return graph
