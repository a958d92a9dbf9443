"""The GE graph that torchair makes of an MoE layer, listed and drawn, without an NPU.

$ python examples/07_ge_graph.py graph.svg
"""

import sys

import torch

from npu_moe_ops import moe, virtual_npu
from npu_moe_ops.virtual_npu.ge.draw import svg

virtual_npu.start()  # before torch_npu is imported

T, H, I, E, K = 5, 2048, 512, 256, 8  # LLaDA2.0-mini, 5 tokens


def layer(tokens, router_weight, bias, gate_up_proj, down_proj):
    """Weights as Hugging Face keeps them, which GroupedMatmul takes as they lie."""
    return moe(
        tokens,
        router_weight,
        gate_up_proj.transpose(1, 2),
        down_proj.transpose(1, 2),
        K,
        correction_bias=bias,
        scoring="sigmoid",
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    )


half = {"device": "npu", "dtype": torch.bfloat16}
tokens, bias = torch.randn(T, H, **half), torch.zeros(E, device="npu")
router_weight = torch.randn(E, H, device="npu")
gate_up_proj, down_proj = torch.zeros(E, 2 * I, H, **half), torch.zeros(E, H, I, **half)
torch._dynamo.mark_dynamic(tokens, 0)
out = torch.compile(layer, backend="npu", fullgraph=True)(tokens, router_weight, bias, gate_up_proj, down_proj)

(graph,) = virtual_npu.graphs()
feeding = {"Const", "Cast", "Fill", "Reshape", "Slice", "Data", "NetOutput"}
print(" -> ".join(node.type for node in graph.nodes if node.type not in feeding))
for matmul in graph.find("GroupedMatmul"):
    print(f"{matmul.name} reads {matmul.inputs['weight0'].size} as it lies: {matmul.attrs['transpose_weight']}")
if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as file:
        file.write(svg(graph))
