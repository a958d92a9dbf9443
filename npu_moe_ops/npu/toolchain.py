"""pypto and torch_npu: are they there and new enough? Which version has which hazard? The one place that knows."""

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

MINIMUM = "0.2.0"
WAITS_FOR_BOUNDS = "9.1.0"  # from here on, generated code waits for the stream before it reads a loop bound


class Missing(RuntimeError):
    """Software that an op on 'npu' needs is not there."""


def require_pypto(op: str) -> None:
    """An error that says what to install, unless pypto is there and new enough. Imports nothing."""
    remedy = f"pip install 'pypto>={MINIMUM}', or move the tensors to the CPU"
    try:
        found = importlib.metadata.version("pypto")
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"{op}: pypto >= {MINIMUM} must be installed for tensors on 'npu', got none; {remedy}") from None
    if _numbers(found) < _numbers(MINIMUM):
        raise Missing(f"{op}: pypto must be >= {MINIMUM}, got {found}; {remedy}")


def import_pypto() -> ModuleType:
    """pypto, without the DEBUG level that it gives the root logger."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    module = importlib.import_module("pypto")
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers
    return module


def require_cann(op: str) -> None:
    if not os.environ.get("ASCEND_HOME_PATH"):
        raise Missing(
            f"{op}: CANN must be set up for tensors on 'npu', but ASCEND_HOME_PATH is not set; "
            f"source set_env.sh of the CANN toolkit before Python starts"
        )


virtual_npu: Callable[[], None] | None = None  # set by npu_moe_ops.virtual_npu: imports pypto, and interprets kernels


def require_npu(op: str) -> None:
    """All that a launch needs, and pypto imported."""
    require_pypto(op)
    if virtual_npu is not None:
        virtual_npu()
        return
    require_cann(op)
    import_pypto()


def require_torch_npu(op: str) -> None:
    if "torch_npu" not in sys.modules:
        raise Missing(f"{op}: torch_npu must be imported for tensors on 'npu', but it is not; pip install torch-npu")


def runtime_options(stitch: int, simulated: bool) -> dict[str, int]:
    """Of pypto.frontend.jit, for every kernel. stitch: root functions of one device task."""
    return {"run_mode": int(simulated), "device_sched_mode": 1, "stitch_function_max_num": stitch}


def must_order_bounds() -> bool:
    """Whether a captured kernel may read its loop bounds before the op that computes them has run."""
    return _numbers(importlib.metadata.version("pypto")) < _numbers(WAITS_FOR_BOUNDS)


def _numbers(version: str) -> tuple[int, ...]:
    """The release part: "9.2.0b1" and "9.2.0-beta.1" are (9, 2, 0)."""
    numbers = []
    for piece in version.split(".")[:3]:
        digits = piece[: next((i for i, c in enumerate(piece) if not c.isdigit()), len(piece))]
        numbers.append(int(digits or 0))
    return tuple(numbers)
