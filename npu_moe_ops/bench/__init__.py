"""python -m npu_moe_ops bench: an MoE layer on this machine's CPU, beside other ways and beside the limits."""
