"""The native CPU kernel: chosen for this machine's CPU, built and loaded when it is first needed.

`NPU_MOE_CPU` says what to take: `auto` (the default), `torch` for none, or the name of an instruction set.
Its functions answer None or False for what the kernel does not do; the implementation in torch does it then.
"""

import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import build

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}
NEEDS = {  # flags of /proc/cpuinfo, best first
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimd"},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Kernel:
    """What is loaded, or why nothing is."""

    isa: str | None
    path: Path | None = None
    reason: str = ""
    ops: Any = None


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def best_isa() -> str | None:
    """The best instruction set that this CPU has and the kernel knows."""
    flags = cpu_flags()
    return next((isa for isa, needed in NEEDS.items() if needed <= flags), None)


_kernel: Kernel | None = None
_lock = threading.Lock()


def kernel() -> Kernel:
    """The kernel of this process; the first call may build it."""
    global _kernel
    if _kernel is None:
        with _lock:
            if _kernel is None:
                _kernel = _load(os.environ.get("NPU_MOE_CPU") or "auto")
    return _kernel


def describe() -> str:
    """What computes the kernel's dtypes on this CPU, and why."""
    found = kernel()
    return f"native kernel, {found.isa}, {found.path}" if found.isa else f"torch: {found.reason}"


def _load(wanted: str) -> Kernel:
    if wanted == "torch":
        return Kernel(None, reason="NPU_MOE_CPU=torch")
    if wanted != "auto" and wanted not in NEEDS:
        raise ValueError(f"NPU_MOE_CPU must be auto, torch or one of {', '.join(NEEDS)}, got {wanted!r}")
    isa = best_isa() if wanted == "auto" else wanted
    try:
        if isa is None or not NEEDS[isa] <= cpu_flags():
            raise build.BuildError(
                f"the kernel needs AVX2 with FMA, or NEON, which this {platform.machine()} CPU lacks"
            )
        path = build.library(isa)
        return Kernel(isa, path, ops=load(isa, path))
    except (build.BuildError, OSError) as error:
        if wanted != "auto":
            raise RuntimeError(f"NPU_MOE_CPU={wanted}: {error}") from error
        return Kernel(None, reason=str(error))


def load(isa: str, path: Path) -> Any:
    """The ops of a built library."""
    torch.ops.load_library(path)
    return getattr(torch.ops, f"npu_moe_{isa}")


def grouped_swiglu_ffn(
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
) -> Tensor | None:
    """The result, or None: not for the kernel, or not valid. Needs no checks before."""
    ops = (_kernel or kernel()).ops
    if ops is None:
        return None
    args = (sorted_tokens, w13, w2, expert_cumsum, swiglu_limit, swiglu_alpha, swiglu_beta)
    result: Tensor | None = ops.grouped_swiglu_ffn.default(*args)
    return result


def grouped_swiglu_ffn_out(out: Tensor, *args: Tensor, **options: Any) -> bool:
    """Whether the result was written to out."""
    place = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    done = run("grouped_swiglu_ffn_out", *args, **options, out=place)
    if done and place is not out:
        out.copy_(place)
    return done


def run(name: str, *args: Any, **options: Any) -> bool:
    """Whether the kernel of that name filled the results among its arguments."""
    ops = (_kernel or kernel()).ops
    return ops is not None and bool(getattr(ops, name).default(*args, **options))
