"""The op under torch.compile and torch.export: one graph for any distribution of tokens, any number of rows."""

import torch
from torch._dynamo.utils import counters

import npu_moe_ops  # noqa: F401  registers torch.ops.npu_moe

E, H, I = 8, 64, 32
torch.manual_seed(0)
w13, w2 = torch.randn(E, H, 2 * I) / H**0.5, torch.randn(E, I, H) / I**0.5


class Experts(torch.nn.Module):
    def forward(self, rows, cumsum):
        return torch.ops.npu_moe.grouped_swiglu_ffn(rows, w13, w2, cumsum)


def draw(n):
    """n rows over the experts, at random; the last of them may belong to no expert."""
    ends = torch.randint(0, n + 1, (E,)).sort().values
    return torch.randn(n, H), torch.nn.functional.pad(ends, (1, 0)).int()


experts = Experts()
compiled = torch.compile(experts, fullgraph=True)
for _ in range(20):
    rows, cumsum = draw(24)
    assert torch.equal(compiled(rows, cumsum), experts(rows, cumsum))
print(f"20 distributions of 24 rows: {counters['stats']['unique_graphs']} graph")
for n in (24, 3, 100, 7, 64):
    rows, cumsum = draw(n)
    assert torch.equal(compiled(rows, cumsum), experts(rows, cumsum))
print(f"5 numbers of rows: {counters['stats']['unique_graphs']} graphs (static, then dynamic)")

program = torch.export.export(experts, draw(5), dynamic_shapes=({0: torch.export.Dim("N", min=0)}, None))
for n in (0, 1, 7):
    rows, cumsum = draw(n)
    assert torch.equal(program.module()(rows, cumsum), experts(rows, cumsum))
print(
    "exported with dynamic N, run at N = 0, 1, 7:", *(n.target for n in program.graph.nodes if n.op == "call_function")
)
