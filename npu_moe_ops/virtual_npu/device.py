"""The device: its memory seen from the CPU, and work on it, done now or recorded while a graph is captured."""

import atexit
import ctypes
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import stubs
from .refused import Refused

errors: list[BaseException] = []  # what kernels raised while a graph was replayed

_acl: Any = None
_torch_npu: Any = None
_recorded: dict[int, Callable[[], None]] = {}  # kernels of the graphs that exist
_numbers = itertools.count(1)


@dataclass(slots=True)  # not frozen: one is made for each argument of each op
class Memory:
    """Where a tensor lies: what a captured kernel keeps of it, as on a device. It does not keep the tensor alive."""

    address: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Memory":
        if tensor.device.type != "npu":
            raise Refused(f"a kernel on 'npu' must get tensors on 'npu', got one on '{tensor.device}'")
        storage = tensor.untyped_storage()
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(storage.data_ptr(), storage.nbytes(), tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def view(self) -> Tensor:
        """A CPU tensor over the memory."""
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        if not self.size or not self.address:
            raise Refused(f"a tensor of shape {list(self.shape)} has no memory")
        block = (ctypes.c_char * self.size).from_address(self.address)
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(storage, self.offset, self.shape, self.stride)


def view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of an npu tensor, valid while that one is alive."""
    return Memory.of(tensor).view()


def capturing() -> bool:
    """Whether work on the current stream of this thread is recorded, not done."""
    return _acl is not None and _torch_npu.npu.is_initialized() and bool(_acl.vnpu_capturing(_stream()))


def launch(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Run kernel(*CPU views of the tensors) on the current stream; while a graph is captured, in each replay instead.

    A kernel writes into its arguments, and sees nothing else that may change: neither tensors nor the shapes of others.
    """
    memories = [Memory.of(tensor) for tensor in tensors]
    if capturing():
        record(lambda: kernel(*(memory.view() for memory in memories)))
    else:
        kernel(*(memory.view() for memory in memories))


def record(work: Callable[[], None]) -> None:
    """Add work to the graph that the current stream captures."""
    number = next(_numbers)
    _recorded[number] = work
    if _acl.vnpu_record(_stream(), number):
        del _recorded[number]
        raise Refused("no graph is being captured on this stream")


def default_generator() -> torch.Generator:
    """Of the current device: what torch.manual_seed and torch.npu.manual_seed seed."""
    generator: torch.Generator = _torch_npu.npu.default_generators[_torch_npu.npu.current_device()]
    return generator


def wait(what: str) -> None:
    """Raises Refused, and spoils the capture, where a device would not let the host wait."""
    if _torch_npu.npu.is_initialized() and _acl.vnpu_may_wait(_stream(), what.encode()):
        raise Refused(f"not allowed while a graph is being captured: {what}")


def spoil(reason: str) -> Refused:
    """The error to raise for what cannot be captured. The capture fails, even if somebody swallows the error."""
    _acl.vnpu_break_capture(_stream(), reason.encode())
    return Refused(reason)


def install() -> None:
    """Let the stand-in libraries, which are loaded, call kernels."""
    global _acl, _torch_npu
    if _acl is not None:
        return
    _torch_npu = importlib.import_module("torch_npu")
    _acl = ctypes.CDLL(stubs.MAIN)
    for name in ("vnpu_capturing", "vnpu_may_wait", "vnpu_break_capture", "vnpu_record"):
        second = {"vnpu_capturing": [], "vnpu_record": [ctypes.c_int64]}.get(name, [ctypes.c_char_p])
        getattr(_acl, name).argtypes = [ctypes.c_void_p, *second]
    _acl.vnpu_set_message.argtypes = [ctypes.c_char_p]
    _acl.vnpu_set_message.restype = None
    _acl.vnpu_set_kernels.restype = None
    _acl.vnpu_set_kernels(_RUN, _FREE)
    atexit.register(_acl.vnpu_set_kernels, None, None)  # graphs may be freed after Python is gone


def _stream() -> int:
    return int(_torch_npu._C._npu_getCurrentRawStream(_torch_npu.npu.current_device()))


def _run(number: int) -> int:
    """An exception cannot pass through C: it is kept, and torch_npu raises one of its own with the message."""
    try:
        with torch.no_grad():
            _recorded[number]()
    except BaseException as error:
        errors.append(error)
        _acl.vnpu_set_message(f"virtual NPU: {type(error).__name__} in a kernel: {error}".encode())
        return 1
    return 0


def _free(number: int) -> None:
    _recorded.pop(number, None)


_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(_run)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_free)
