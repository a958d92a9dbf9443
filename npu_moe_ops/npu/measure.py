"""The same workloads on a real NPU, timed with its events: what only silicon can tell."""

from collections.abc import Iterator

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
    device = torch.device("npu")
    calls = [_prepared(job, device) for job in jobs]
    flush = torch.empty(CACHE, dtype=torch.uint8, device=device)
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(ROUNDS + 3):  # the first ones compile and warm up
        for (kernel, call, out), spent in zip(calls, times, strict=True):
            flush.zero_()
            start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch.launch(kernel, call, out)
            end.record()
            end.synchronize()
            if turn >= 3:
                spent.append(start.elapsed_time(end) * 1000)
    for spent in times:
        yield sorted(spent)[len(spent) // 2]


def _prepared(job: Job, device: torch.device):  # type: ignore[no-untyped-def]
    problem = job.problem()
    tokens = torch.randn(problem.rows, problem.hidden, device=device, dtype=problem.dtype)
    w13 = torch.randn(problem.experts, problem.hidden, 2 * problem.intermediate, device=device, dtype=problem.dtype)
    w2 = torch.randn(problem.experts, problem.intermediate, problem.hidden, device=device, dtype=problem.dtype)
    if job.transposed:
        w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2))
    offsets = torch.tensor([0, *job.counts], device=device).cumsum(0)
    call = launch.prepare(tokens, w13, w2, offsets)
    return launch.kernel_for(call.problem, job.plan), call, torch.empty_like(tokens)
