"""GE operators of Mixture-of-Experts blocks, over the same arithmetic as torch.ops.npu."""

import torch
from torch import Tensor

from .. import operators
from ..operators.common import describe
from ..operators.matmul import SPLIT_K, SPLIT_M
from .call import Call, op

ABSENT = {  # optional inputs that are left out are empty tensors, of dtypes that the operator registers
    "bias": (torch.float16, torch.float32, torch.int32),
    "scale": (torch.uint64, torch.bfloat16, torch.float32),
    "offset": (torch.float32,),
    "antiquant_scale": (torch.float16, torch.bfloat16),
    "antiquant_offset": (torch.float16, torch.bfloat16),
}


@op("GroupedMatmul")
def _grouped_matmul(call: Call) -> Tensor:
    """One x, one weight, one result; quantisation comes as optional inputs, which torchair fills with empty tensors."""
    for name, dtypes in ABSENT.items():
        for value in call.many(name):
            call.check(not value.numel(), f"{name} is not implemented")
            call.check(value.dtype in dtypes, f"{name} is left out as {describe(value)}, wanted one of {dtypes}")
    for x, bias in zip(call.many("x"), call.many("bias"), strict=False):
        wanted = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        call.check(bias.dtype == wanted, f"bias is left out as {describe(bias)} beside x of {x.dtype}, wanted {wanted}")
    call.check(call.get("per_token_scale") is None, "per_token_scale is not implemented")
    call.without("act_type")
    call.check(call.attr("split_item", 0) in (2, 3), f"split_item {call.attr('split_item', 0)}, wanted 2 or 3")
    # dtype chooses the result of quantised inputs; its default 0 would ask for float16.
    call.check(call.attr("dtype", 0) == -1, f"dtype {call.attr('dtype', 0)}, wanted -1")
    xs, weights = call.many("x"), call.many("weight")
    call.check(len(xs) == len(weights) == 1, f"{len(xs)} x and {len(weights)} weights, wanted one each")
    group_type = call.attr("group_type", -1)
    call.check(group_type in (SPLIT_M, SPLIT_K), f"group_type {group_type}, wanted 0 or 2")
    x = xs[0]
    if call.attr("transpose_x"):
        call.check(group_type == SPLIT_K and x.dim() == 2, f"transpose_x of {describe(x)} and group_type {group_type}")
        x = x.t()
    return operators.grouped_matmul(
        x,
        weights[0],
        call["group_list"],
        group_type=group_type,
        group_list_type=call.attr("group_list_type", 0),
        transpose_weight=bool(call.attr("transpose_weight")),
        name="GroupedMatmul",
    )


@op("MoeGatingTopK")
def _gating(call: Call) -> tuple[Tensor, ...]:
    return operators.moe_gating_top_k(
        call["x"],
        call.attr("k"),
        bias=call.get("bias"),
        input_ids=call.get("input_ids"),
        tid2eid=call.get("tid2eid"),
        k_group=call.attr("k_group", 1),
        group_count=call.attr("group_count", 1),
        group_select_mode=call.attr("group_select_mode", 0),
        renorm=call.attr("renorm", 0),
        norm_type=call.attr("norm_type", 0),
        out_flag=bool(call.attr("out_flag")),
        routed_scaling_factor=call.attr("routed_scaling_factor", 1.0),
        eps=call.attr("eps", 1e-20),
        name="MoeGatingTopK",
    )


@op("MoeInitRoutingV3")
def _init_routing(call: Call) -> tuple[Tensor, ...]:
    return operators.moe_init_routing_v2(
        call["x"],
        call["expert_idx"],
        scale=call.get("scale"),
        offset=call.get("offset"),
        active_num=call.attr("active_num", -1),
        expert_capacity=call.attr("expert_capacity", -1),
        expert_num=call.attr("expert_num", -1),
        drop_pad_mode=call.attr("drop_pad_mode", 0),
        expert_tokens_num_type=call.attr("expert_tokens_num_type", 0),
        expert_tokens_num_flag=bool(call.attr("expert_tokens_num_flag")),
        quant_mode=call.attr("quant_mode", -1),
        active_expert_range=call.attr("active_expert_range", []),
        row_idx_type=call.attr("row_idx_type", 0),
        name="MoeInitRoutingV3",
    )


@op("MoeFinalizeRouting")
def _finalize_routing(call: Call) -> Tensor:
    return operators.moe_finalize_routing(
        call["expanded_x"],
        call["x1"],
        call.get("x2"),
        call["bias"],
        call["scales"],
        call["expanded_row_idx"],
        call["expanded_expert_idx"],
        name="MoeFinalizeRouting",
    )


@op("MoeFinalizeRoutingV2")
def _finalize_routing_v2(call: Call) -> Tensor:
    return operators.moe_finalize_routing(
        call["expanded_x"],
        call.get("x1"),
        call.get("x2"),
        call.get("bias"),
        call.get("scales"),
        call["expanded_row_idx"],
        call.get("expert_idx"),
        call.attr("drop_pad_mode", 0),
        call.attr("K", call.attr("k", 1)),
        name="MoeFinalizeRoutingV2",
    )
