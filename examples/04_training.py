"""Training steps: next-byte prediction with one MoE layer, our ops forward and backward, and a balanced router."""

import sys
from pathlib import Path

import torch
from torch import nn

from npu_moe_ops import SparseMoE, load_balancing_loss

text = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md"
data = torch.tensor(list(text.read_bytes()), dtype=torch.int64)
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self, hidden=64, experts=8, top_k=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, hidden), nn.Linear(hidden, 256)
        self.moe = SparseMoE(hidden, 64, experts, top_k)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y, router_logits, topk_ids = self.moe.forward_with_routing(x)
        return self.head(x + y), load_balancing_loss(router_logits, topk_ids, self.moe.num_experts)


model = Model()
step = torch.compile(model, fullgraph=True, backend="aot_eager")  # "npu" on an NPU, "inductor" on a CPU
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for i in range(61):
    at = torch.randint(0, len(data) - 65, (16, 1)) + torch.arange(65)
    tokens, following = data[at[:, :-1]], data[at[:, 1:]]
    logits, balance = step(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
    (loss + 0.01 * balance).backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 20 == 0:
        print(f"step {i:2}: loss {loss.item():.3f} nats a byte, load balance {balance.item():.3f} (1 is even)")
