"""The same workloads on a real NPU, timed with its events: what only silicon can tell."""

from collections.abc import Iterator
from statistics import median

import torch

from . import launch
from .simulate import Job

ROUNDS = 30
CACHE = 256 * 2**20  # bytes; more than any L2, so that weights come from HBM as in a model with many layers


def measure(jobs: list[Job]) -> Iterator[float]:
    """Microseconds of each job's launch: median of 30, jobs in rotation, weights not in L2.

    Raises RuntimeError where there is no NPU.
    """
    if not hasattr(torch, "npu") or not torch.npu.is_available():
        raise RuntimeError("simulate: --hardware needs an NPU and torch_npu, got none")
    calls = [job.call(torch.randn, "npu") for job in jobs]
    kernels = [launch.kernel_for(call.problem, job.plan) for call, job in zip(calls, jobs, strict=True)]
    outs = [torch.empty_like(call.tensors[0]) for call in calls]
    flush = torch.empty(CACHE, dtype=torch.uint8, device="npu")
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(ROUNDS + 3):  # the first ones compile and warm up
        for kernel, call, out, spent in zip(kernels, calls, outs, times, strict=True):
            flush.zero_()
            start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch.launch(kernel, call, out)
            end.record()
            end.synchronize()
            if turn >= 3:
                spent.append(start.elapsed_time(end) * 1000)
    yield from map(median, times)
