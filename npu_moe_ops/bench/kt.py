"""kt-kernel, KTransformers' experts for CPUs, in processes of its own: its workers spin, and would slow the others."""

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .clock import seconds, settled
from .peers import Sizes, batch, weights

ANSWER = "seconds: "


class LeftOut(Exception):
    pass


def times(sizes: Sizes, tokens: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Tokens -> median seconds, the better of one thread and all.

    Raises:
        LeftOut: it is not installed, or does not run here.
    """
    best: dict[int, float] = {}
    for threads in sorted({1, torch.get_num_threads()}):
        job = json.dumps({"sizes": asdict(sizes), "tokens": tokens, "rounds": rounds, "threads": threads})
        run = subprocess.run([sys.executable, "-m", __name__, job], capture_output=True, text=True, check=False)
        if run.returncode:
            last = (run.stderr.strip().splitlines() or [f"its process ended with {run.returncode}"])[-1]
            raise LeftOut(last)
        answer = next(line for line in run.stdout.splitlines() if line.startswith(ANSWER))  # it prints a lot itself
        for count, found in json.loads(answer.removeprefix(ANSWER)).items():
            best[int(count)] = min(found, best.get(int(count), found))
    return best


def _layer(sizes: Sizes, w13: Tensor, w2: Tensor) -> Any:
    from kt_kernel import kt_kernel_ext as kt

    workers = kt.WorkerPoolConfig()
    workers.subpool_count, workers.subpool_numa_map = 1, [0]
    workers.subpool_thread_count = [torch.get_num_threads()]
    pool = kt.CPUInfer(workers)
    gate, up = (w.contiguous() for w in w13.chunk(2, dim=1))
    none_on_gpu, order = torch.zeros(sizes.experts, dtype=torch.bool), torch.arange(sizes.experts)
    config = kt.moe.MOEConfig(sizes.experts, sizes.top_k, sizes.hidden, sizes.intermediate, none_on_gpu.data_ptr())
    config.layer_idx, config.pool, config.max_len = 0, pool.backend_, 4096
    for name, w in (("gate", gate), ("up", up), ("down", w2)):
        setattr(config, f"{name}_projs", [[expert.data_ptr() for expert in w]])
        setattr(config, f"{name}_scales", [[0] * sizes.experts])
    moe = kt.moe.AMXBF16_MOE(config)  # its name; it takes AVX512 where there is no AMX
    pool.submit(moe.load_weights_task(order.data_ptr()))
    pool.sync()

    def layer(tokens: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        out, count = torch.empty_like(tokens), torch.tensor([len(tokens)], dtype=torch.int32)
        pointers = (ids.data_ptr(), scores.data_ptr(), tokens.data_ptr(), out.data_ptr())
        pool.submit(moe.forward_task(count.data_ptr(), sizes.top_k, *pointers, False))
        pool.sync()
        return out

    layer.kept = (none_on_gpu, order, gate, up, w2)  # type: ignore[attr-defined]
    return layer


def _main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    sizes = Sizes(**job["sizes"])
    layer = _layer(sizes, *weights(sizes))
    found = {}
    for tokens in job["tokens"]:
        found[tokens] = settled([seconds(layer, *batch(sizes, tokens, seed)) for seed in range(job["rounds"] + 1)])
    print(f"\n{ANSWER}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
