"""The NPU kernel on any machine: `run` gives the numbers it computes, `cost` the cycles that pypto's cost model counts.

Numbers come from the interpreter of the pypto wheel, after its compiler passes; cycles are *simulated*: the model
knows cores, loads and the scheduler, but no limit of HBM or L2. What it counts below `ddr_floor` no chip will do.
Needs `pip install npu-moe-ops[sim]`, cmake and g++.
"""

import json
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import checks
from . import launch, router_launch, tiling, toolchain, virtual
from .cost_model import Task

DDR_BYTES = 768  # a cycle, of the whole chip: 32 for each cube core, from the A2/A3 settings of the wheel
LOAD_BYTES = tiling.CUBE_CORES * tiling.LOAD_BYTES  # a cycle: the most that the cost model lets the cores load


@dataclass(frozen=True)
class Run:
    out: Tensor  # [N, H]
    passes: virtual.Passes


@dataclass(frozen=True)
class Job:
    """What to simulate: rows of each expert, sizes, plan. `trace` is where a Perfetto trace is to be written."""

    counts: tuple[int, ...]
    hidden: int = 2048
    intermediate: int = 512
    dtype: str = "bfloat16"
    transposed: bool = False
    plan: str = "auto"
    trace: str | None = None

    def problem(self) -> tiling.Problem:
        dtype = getattr(torch, self.dtype)
        return tiling.Problem(
            len(self.counts), self.hidden, self.intermediate, sum(self.counts), dtype, self.transposed, self.transposed
        )

    def check(self) -> None:
        tiling.choose(self.problem(), self.plan)

    @property
    def weight_bytes(self) -> int:
        """Of the experts that have rows."""
        active = sum(count > 0 for count in self.counts)
        return active * 3 * self.hidden * self.intermediate * self.problem().dtype.itemsize

    def build(self) -> tuple[Any, tuple[Tensor, ...]]:
        """A kernel for the cost model and tensors of the right sizes; it looks at no values but the offsets."""
        from . import kernel

        problem = self.problem()
        plan = tiling.choose(problem, self.plan)
        # The original is simulated as published, without what orders bounds.
        order = toolchain.must_order_bounds() and self.plan != "llada2_original"
        built = kernel.build(problem, plan, kernel.SwiGLU(), order, **virtual.cost_options(plan.stitch))
        call = self.call(torch.zeros)
        return built, (*call.tensors, torch.zeros_like(call.tensors[0]))

    def call(self, make: Callable[..., Tensor], device: str = "cpu") -> launch.Call:
        """The launch, with tensors that `make(*sizes, ...)` fills: torch.zeros, torch.randn."""

        def tensor(*sizes: int) -> Tensor:
            return make(*sizes, dtype=getattr(torch, self.dtype), device=device)

        experts, hidden, columns = len(self.counts), self.hidden, 2 * self.intermediate
        if self.transposed:
            w13 = tensor(experts, columns, hidden).transpose(1, 2)
            w2 = tensor(experts, hidden, self.intermediate).transpose(1, 2)
        else:
            w13, w2 = tensor(experts, hidden, columns), tensor(experts, self.intermediate, hidden)
        offsets = torch.tensor([0, *self.counts], device=device).cumsum(0)
        return launch.prepare(tensor(sum(self.counts), hidden), w13, w2, offsets)


@dataclass(frozen=True)
class RouterJob:
    """topk_router for so many tokens, by default as in LLaDA2.0-mini. `part`: all of it, or one of its halves alone."""

    tokens: int
    hidden: int = 2048
    experts: int = 256
    top_k: int = 8
    scoring: str = "sigmoid"
    n_group: int = 8
    topk_group: int = 4
    dtype: str = "bfloat16"
    part: Literal["all", "logits", "choose"] = "all"
    trace: str | None = None

    def check(self) -> None:
        if self.part not in ROUTER_PARTS:
            raise ValueError(f"RouterJob: part must be one of {', '.join(ROUTER_PARTS)}, got {self.part!r}")
        checks.topk_router(*self._tensors(), **self._options())

    @property
    def plan(self) -> str:
        return ROUTER_PARTS[self.part]

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.tokens,)

    @property
    def weight_bytes(self) -> int:
        return self.experts * self.hidden * int(getattr(torch, self.dtype).itemsize)

    def build(self) -> tuple[Any, tuple[Tensor, ...]]:
        from . import router

        call = router_launch.prepare(*self._tensors(), **self._options(), want_logits=False)
        built = router.build(call.problem, call.tile, self.part, **virtual.cost_options())
        outputs = (
            torch.zeros(self.tokens, self.experts),
            torch.zeros(self.tokens, self.top_k),
            torch.zeros(self.tokens, self.top_k, dtype=torch.int32),
        )
        return built, (*call.tensors, *outputs)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = getattr(torch, self.dtype)
        tokens = torch.zeros(self.tokens, self.hidden, dtype=dtype)
        return tokens, torch.zeros(self.experts, self.hidden, dtype=dtype), torch.zeros(self.experts)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("top_k", "scoring", "n_group", "topk_group")}


ROUTER_PARTS: dict[Literal["all", "logits", "choose"], str] = {
    "all": "one kernel",
    "logits": "logits alone",
    "choose": "choice alone",
}


@dataclass(frozen=True)
class Cost:
    """Simulated cycles of one launch, and the limits to hold them against."""

    job: Job | RouterJob
    cycles: int
    leaf_kernels: int  # to compile on a device
    passes_s: float  # CPU time of pypto's passes
    control_flow_s: float  # CPU time of the host compiler on the control flow; a device compiles the leaf kernels too
    tasks: tuple[Task, ...]

    @property
    def ddr_floor(self) -> int:
        """Cycles to read the weights that are needed from HBM."""
        return -(-self.job.weight_bytes // DDR_BYTES)

    @property
    def load_floor(self) -> int:
        """The same at the rate of the cost model, which is about that of L2."""
        return -(-self.job.weight_bytes // int(LOAD_BYTES))

    @property
    def cube_utilisation(self) -> float:
        """Share of the cube cores' cycles in which a task ran."""
        busy = sum(task.end - task.start for task in self.tasks if task.core.startswith("cube"))
        return busy / (tiling.CUBE_CORES * self.cycles)


def _top8_of_256(tokens: int, seed: int) -> tuple[int, ...]:
    counts, draw = [0] * 256, random.Random(seed)
    for _ in range(tokens):
        for expert in draw.sample(range(256), 8):
            counts[expert] += 1
    return tuple(counts)


WORKLOADS: dict[str, tuple[int, ...]] = {
    "a 0,1,2,4,8,16,32,0": (0, 1, 2, 4, 8, 16, 32, 0),
    "b 8x64": (64,) * 8,
    "c 16x1": (1,) * 16,
    "d 64x1": (1,) * 64,
    "e 16x8": (8,) * 16,
    "f skewed": (4, 4, 4, 256, 4, 4, 4, 4),
    "g ragged": (3, 7, 13, 21, 31, 45, 63, 5),
    "h 32 tokens, top-8 of 256": _top8_of_256(32, seed=34),
}


def run(
    sorted_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_cumsum: Tensor,
    *,
    plan: str = "auto",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    passes: Sequence[str] = virtual.LAST_PASS,
) -> Run:
    """grouped_swiglu_ffn as the NPU kernel computes it, on CPU tensors.

    Arguments as grouped_swiglu_ffn's; bfloat16, float16 or float32. plan is one of tiling.PRESETS. After each compiler
    pass named in `passes` (`virtual.ALL_PASSES` for all) every task is computed again and compared. Minutes at
    sizes of real models: the interpreter is no fast path.
    """
    from . import kernel

    checks.grouped_swiglu_ffn(sorted_tokens, w13, w2, expert_cumsum, swiglu_limit, swiglu_alpha, swiglu_beta)
    checks.offsets(expert_cumsum, len(sorted_tokens))
    virtual.start()
    call = launch.prepare(sorted_tokens, w13, w2, expert_cumsum)
    tiles = tiling.choose(call.problem, plan)
    swiglu = kernel.SwiGLU(swiglu_limit, swiglu_alpha, swiglu_beta)
    built = kernel.build(
        call.problem, tiles, swiglu, toolchain.must_order_bounds(), **virtual.options(tuple(passes), tiles.stitch)
    )
    found: list[virtual.Passes] = []
    out = torch.full_like(sorted_tokens, torch.nan, memory_format=torch.contiguous_format)
    launch.launch(lambda *tensors: found.append(virtual.interpret(built, tensors)), call, out)
    return Run(out, found[0] if found else virtual.NOTHING)


def cost(job: Job | RouterJob) -> Cost:
    """Simulate one launch. Raises RuntimeError with the simulator's last words where it fails."""
    return next(costs([job]))


def costs(jobs: Iterable[Job | RouterJob], workers: int = 2) -> Iterator[Cost]:
    """Simulate launches in processes of their own (the simulator may crash), results in the order of the jobs."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(_in_a_process, jobs)


def _in_a_process(job: Job | RouterJob) -> Cost:
    job.check()  # the caller's mistakes are found here
    toolchain.require_pypto("npu simulator")
    command = [sys.executable, "-m", "npu_moe_ops.npu.worker"]
    text = json.dumps([type(job).__name__, job.__dict__])
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    lines = deque(done.stdout.splitlines(), maxlen=1)
    if done.returncode or not lines:
        words = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise RuntimeError(f"npu simulator: {job} ended with status {done.returncode}:\n{words}")
    found = json.loads(lines[0])
    tasks = tuple(Task(*task) for task in found.pop("tasks"))
    return Cost(job, tasks=tasks, **found)


def ratio(ours: Cost, theirs: Cost, floored: bool = False) -> float:
    """How many times fewer cycles ours takes; floored: ours never counted below the DDR floor."""
    return theirs.cycles / (max(ours.cycles, ours.ddr_floor) if floored else ours.cycles)
