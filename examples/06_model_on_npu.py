"""A Hugging Face model on 'npu'. Nothing here knows of a virtual NPU; where there is no real one, run it as

$ python -m npu_moe_ops.virtual_npu examples/06_model_on_npu.py
"""

import torch
import torch_npu
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from npu_moe_ops import SparseMoE

config = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(config).eval()
prompt = torch.randint(0, config.vocab_size, (2, 12))
greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
on_cpu = model.generate(prompt, **greedy)
logits_cpu = model(prompt).logits

print(f"torch_npu {torch_npu.__version__} on {torch.npu.get_device_name(0)}")
model, prompt = model.to("npu"), prompt.to("npu")
on_npu = model.generate(prompt, **greedy)
print("tokens:", on_npu[0, 12:].tolist())
print("the same as on the CPU:", torch.equal(on_npu.cpu(), on_cpu))
difference = (model(prompt).logits.cpu() - logits_cpu).abs().max().item()
print(f"largest difference of a logit: {difference:.1e}")

layer = SparseMoE(64, 32, num_experts=8, top_k=2).to("npu")
compiled = torch.compile(layer, backend="npu", fullgraph=True)  # a GE graph, made by torchair
x = torch.randn(5, 64)
with torch.no_grad():
    difference = (compiled(x.to("npu")).cpu() - layer.cpu()(x)).abs().max().item()
print(f"SparseMoE compiled for the graph engine, largest difference: {difference:.1e}")
