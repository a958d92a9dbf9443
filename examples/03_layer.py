"""The layer: from a model's list of experts to w13 and w2, one call, and a module with a shared expert."""

import torch
from torch import nn

from npu_moe_ops import SparseMoE, moe, pack_experts, topk_router

E, H, I, K = 16, 64, 32, 4
torch.manual_seed(0)


class Expert(nn.Module):  # as Mixtral, Qwen or LLaDA2 keep it
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False)
        self.down_proj = nn.Linear(I, H, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


experts, router_weight = nn.ModuleList(Expert() for _ in range(E)), torch.randn(E, H) / H**0.5
x = torch.randn(2, 9, H)
router = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}  # LLaDA2's way

w13, w2 = pack_experts(experts)
print("packed:", tuple(w13.shape), tuple(w2.shape), "in the Linears' memory order:", w13.stride()[1] == 1)
with torch.no_grad():
    out = moe(x, router_weight, w13, w2, K, **router)
    weights, ids, _ = topk_router(x.flatten(0, 1), router_weight, None, K, **router)
    by_hand = torch.stack(
        [
            sum(w * experts[e](t) for w, e in zip(ws, es, strict=True))
            for t, ws, es in zip(x.flatten(0, 1), weights, ids.tolist(), strict=True)
        ]
    )
print("moe() equals the experts one by one:", torch.allclose(out.flatten(0, 1), by_hand, atol=1e-5))

layer = SparseMoE(H, I, E, K, shared_intermediate_size=I, correction_bias=True, **router)
print(layer)
print("output:", tuple(layer(x).shape), "parameters:", sum(p.numel() for p in layer.parameters()))
