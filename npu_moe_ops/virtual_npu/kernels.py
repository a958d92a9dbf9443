"""PyPTO kernels on npu tensors: pypto's own interpreter computes them, on the memory of the device.

pypto launches a kernel on the device, or, in its simulation, on CPU tensors. Here each jit kernel that gets tensors on
'npu' runs in the simulation with the interpreter on, which writes its outputs, whatever the kernel was built for.
"""

import copy
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from . import device
from .refused import Refused

OUTPUT = "TILE_FWK_OUTPUT_DIR"  # npu.virtual sets it before it imports pypto

_installed = False


def install_on_import() -> None:
    """install() once the program imports pypto, which may be never."""
    if "pypto" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _Finder())


def install() -> None:
    """Imports pypto; from here on its kernels take npu tensors."""
    global _installed
    if _installed:
        return
    _installed = True
    if "pypto" not in sys.modules:
        _virtual().start()
    from pypto.frontend.parser.entry import JitCallableWrapper

    JitCallableWrapper.__call__ = _launching(JitCallableWrapper.__call__)


def _launching(original: Callable[..., None]) -> Callable[..., None]:
    def call(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if not any(isinstance(arg, Tensor) and arg.device.type == "npu" for arg in args):
            return original(kernel, *args, **kwargs)
        definitions, names = kernel._cached_signature
        tensors, rest = args[: len(definitions)], args[len(definitions) :]
        if len(rest) > len(names) or set(kwargs) - set(names):
            raise Refused(f"{kernel.__name__} takes {names} beside its tensors, got {rest} and {sorted(kwargs)}")
        values = kernel._merge_non_tensor_params(names, list(rest), kwargs)
        constants = tuple(values[name] for name in names)
        simulated = _simulated(kernel)
        return device.launch(lambda *views: _interpret(simulated, views + constants), *tensors)

    return call


def _interpret(kernel: Any, arguments: tuple[Any, ...]) -> None:
    found = _virtual().interpret(kernel, arguments)
    if found.failed:
        raise Refused(f"{kernel.__name__}: the compiler changed its numbers, in {dict(found.failed)}")


def _simulated(kernel: Any) -> Any:
    """The kernel as it would have been built for the interpreter. The original is left alone: it may be elsewhere."""
    options = _virtual().options()
    simulated = copy.copy(kernel)
    simulated._runtime_options = kernel._runtime_options | {"run_mode": options["runtime_options"]["run_mode"]}
    simulated._verify_options = options["verify_options"]
    simulated._use_cache = options["use_cache"]
    simulated._cache_hashes = simulated._compute_cache_hashes()
    simulated.kmodule = None
    return simulated


def _virtual() -> Any:
    from ..npu import virtual  # here, as it needs what a program without kernels has no need to install

    return virtual


class _Finder(importlib.abc.MetaPathFinder):
    """Finds pypto where it is, and has install() follow its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "pypto":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if OUTPUT not in os.environ:
                _virtual().start()  # the settings: to it pypto is imported already
            execute(module)
            install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
