"""The NPU kernel without an NPU: its numbers from pypto's interpreter, its cycles from pypto's simulator.

Needs `pip install 'npu-moe-ops[sim]'`, cmake and g++; the first run builds pypto's calculator (20 s).
"""

import torch
import torch.nn.functional as F

import npu_moe_ops
from npu_moe_ops.npu.simulate import Job, cost, run

torch.manual_seed(0)
counts = torch.tensor([0, 1, 5, 0, 40, 3])  # rows of each expert
experts, hidden, intermediate = len(counts), 128, 64
x = torch.randn(int(counts.sum()), hidden).bfloat16()
w13 = (torch.randn(experts, hidden, 2 * intermediate) / hidden**0.5).bfloat16()
w2 = (torch.randn(experts, intermediate, hidden) / intermediate**0.5).bfloat16()
expert_cumsum = F.pad(counts.cumsum(0), (1, 0)).int()

# Numbers: every task of the kernel is computed after the last compiler pass and compared with the kernel as written.
numbers = run(x, w13, w2, expert_cumsum)
expected = npu_moe_ops.grouped_swiglu_ffn(x, w13, w2, expert_cumsum)
error = (numbers.out.float() - expected.float()).abs().max() / expected.float().abs().max()
print(f"largest difference from the CPU: {error:.4f} of the largest output")
print(f"compiler checks: {sum(numbers.passes.passed.values())} passed, {sum(numbers.passes.failed.values())} failed")

# Cycles, simulated, of a layer of LLaDA2.0-mini's width.
ours, original = (cost(Job((0, 1, 2, 4, 8, 16, 32, 0), plan=plan)) for plan in ("auto", "llada2_original"))
print(f"simulated: {ours.cycles:,} cycles, published settings {original.cycles:,}, DDR floor {ours.ddr_floor:,}")
