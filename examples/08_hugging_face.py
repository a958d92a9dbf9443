"""A Hugging Face model, eager and on these ops: the same logits, tokens and training step."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from npu_moe_ops.integrations.transformers import why_not_fused

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=48,
    initializer_range=0.1,
    pad_token_id=0,
)
model, ids = Qwen3MoeForCausalLM(config).eval(), torch.randint(1, 1000, (2, 20))
losses, logits, tokens, norms = {}, {}, {}, {}
for implementation in ("eager", "npu_moe"):
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    losses[implementation], logits[implementation] = out.loss.item(), out.logits.detach()
    norms[implementation] = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    tokens[implementation] = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )[:, ids.shape[1] :]
    print(f"{implementation:8} loss {losses[implementation]:.4f}, gradient norm {norms[implementation]:.4f}")

print(f"largest difference of logits: {(logits['npu_moe'] - logits['eager']).abs().max():.1e}")
print("the same tokens generated:", torch.equal(tokens["npu_moe"], tokens["eager"]))

experts = [layer.mlp.experts for layer in model.model.layers]
print("layers in one op:", sum(why_not_fused(e) is None for e in experts), "of", len(experts))
