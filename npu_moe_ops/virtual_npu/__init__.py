"""An Ascend NPU that is not there: torch_npu and torchair, unchanged, on a machine without CANN.

start() makes the device 'npu' usable in this process. Its memory is the host's, its ops are computed by the CPU, and
what torch.compile gives to CANN's graph engine is executed node by node. Numbers are right; times mean nothing.
"""

import contextlib
import ctypes
import importlib
import io
import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..npu import toolchain
from . import aten, device, stubs, wheel
from .device import capturing, errors, launch, view
from .refused import Refused

if TYPE_CHECKING:
    from .ge.graph import Graph

__all__ = ["Refused", "capturing", "errors", "graphs", "launch", "start", "view"]

# Said by torch_npu and torchair about themselves, whatever the program does.
UNAVOIDABLE = (
    (UserWarning, r".*Cannot create tensor with (internal|interal) format.*"),
    (UserWarning, r"Your compiler for AOTAutograd is returning a function that doesn't take boxed arguments"),
)
_started: list[ModuleType] = []


def start() -> ModuleType:
    """Make 'npu' a device of torch, and return torch_npu. Raises Refused where this cannot be; twice is once."""
    if _started:
        return _started[0]
    _refuse_what_cannot_be()
    folder = wheel.find()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of processes that this one starts
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # or copies happen in another thread, later than they should
    for library in stubs.build(folder):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    silence()
    from . import kernels, npu_ops
    from .ge import hook

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is imported, about itself
        torch_npu = importlib.import_module("torch_npu")
        device.install()
        aten.install()
        npu_ops.install()
        hook.install()
    kernels.install_on_import()
    toolchain.virtual_npu = kernels.install
    _started.append(torch_npu)
    return torch_npu


def graphs() -> "list[Graph]":
    """The graphs that torch.compile(backend="npu") has given to the graph engine, newest last."""
    from .ge import hook

    return hook.GRAPHS


def silence() -> None:
    """Let the warnings that nobody can avoid pass, also where warnings are errors."""
    for category, text in UNAVOIDABLE:
        warnings.filterwarnings("ignore", text, category)


def _refuse_what_cannot_be() -> None:
    if not sys.platform.startswith("linux"):
        raise Refused(f"a virtual NPU needs Linux, got {sys.platform}")
    if "torch_npu" in sys.modules:
        raise Refused("start the virtual NPU before torch_npu is imported")
    if torch.version.cuda or torch.version.hip:
        raise Refused(
            f"torch_npu needs a CPU build of torch, got {torch.__version__}, for GPUs, beside which it crashes"
        )
    home = os.environ.get("ASCEND_HOME_PATH")
    if home:
        raise Refused(f"CANN is set up here (ASCEND_HOME_PATH={home}): use the real NPU, or unset it")
    try:
        ctypes.CDLL(stubs.MAIN)
    except OSError:
        return
    raise Refused(f"CANN is set up here ({stubs.MAIN} can be loaded): use the real NPU")
