"""LLaDA2.0: a mixture-of-experts transformer that fills in masked tokens. Names are those of its checkpoint."""

import torch
import torch.nn.functional as F
from config import Config
from torch import Tensor, nn

from npu_moe_ops import topk_router
from npu_moe_ops.integrations.packed import PackedExperts

EXPERTS = ("npu_moe", "loop")
Routing = tuple[Tensor, Tensor]  # router_logits [B, S, E], topk_idx [B, S, K]


class LLaDA2MoeMLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LLaDA2MoeGate(nn.Module):
    """Which experts a token visits, and with which weights; in fp32."""

    expert_bias: Tensor | None

    def __init__(self, config: Config, fused: bool) -> None:
        super().__init__()
        self.config, self.fused = config, fused
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> topk_idx [T, K], topk_weight [T, K], router_logits [T, E]"""
        x = hidden_states.flatten(0, -2)
        if not self.fused:
            return self.plain(x)
        c = self.config
        topk_weight, topk_idx, router_logits = topk_router(
            x,
            self.weight,
            self.expert_bias,
            c.num_experts_per_tok,
            scoring=c.score_function,
            n_group=c.n_group,
            topk_group=c.topk_group,
            renormalize=c.norm_topk_prob,
            routed_scaling_factor=c.routed_scaling_factor,
        )
        return topk_idx, topk_weight, router_logits

    def plain(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if c.score_function == "sigmoid" else logits.softmax(dim=-1)
        choice = scores.detach() if self.expert_bias is None else scores.detach() + self.expert_bias
        if c.n_group > 1:
            grouped = choice.unflatten(1, (c.n_group, -1))
            best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
            groups = best_two.sort(dim=1, descending=True, stable=True).indices[:, : c.topk_group]
            kept = torch.zeros_like(best_two, dtype=torch.bool).scatter(1, groups, True)
            choice = grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
        topk_idx = choice.sort(dim=1, descending=True, stable=True).indices[:, : c.num_experts_per_tok]
        weight = scores.gather(1, topk_idx)
        if c.norm_topk_prob and c.num_experts_per_tok > 1:
            weight = weight / (weight.sum(dim=1, keepdim=True) + 1e-20)
        return topk_idx, weight * c.routed_scaling_factor, logits


class LLaDA2MoeSparseMoeBlock(nn.Module):
    """Routed experts, with `npu_moe` ops or in a loop, and the shared expert that every token visits."""

    def __init__(self, config: Config, experts: str) -> None:
        super().__init__()
        h, i = config.hidden_size, config.moe_intermediate_size
        self.num_experts_per_tok = config.num_experts_per_tok
        self.gate = LLaDA2MoeGate(config, fused=experts == "npu_moe")
        self.experts: nn.Module
        if experts == "npu_moe":
            self.experts = PackedExperts(config.num_experts, h, i)
        else:
            self.experts = nn.ModuleList(LLaDA2MoeMLP(h, i) for _ in range(config.num_experts))
        self.shared_experts = LLaDA2MoeMLP(h, i * config.num_shared_experts) if config.num_shared_experts else None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Routing]:
        topk_idx, topk_weight, router_logits = self.gate(hidden_states)
        x = hidden_states.flatten(0, 1)
        run = self.experts if isinstance(self.experts, PackedExperts) else self.loop
        y = run(x, topk_idx, topk_weight).view_as(hidden_states)
        if self.shared_experts is not None:
            y = y + self.shared_experts(hidden_states)
        return y, (router_logits.unflatten(0, y.shape[:2]), topk_idx.unflatten(0, y.shape[:2]))

    def loop(self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
        """One expert after the other over the tokens sorted by expert: what the ops replace."""
        order = topk_idx.flatten().argsort(stable=True)
        counts = topk_idx.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = x[order // self.num_experts_per_tok].split(counts)
        done = torch.cat([expert(r) for expert, r in zip(self.experts, rows, strict=True) if len(r)] or [x])
        y = done[order.argsort()].unflatten(0, topk_idx.shape)
        return (y.to(topk_weight.dtype) * topk_weight.unsqueeze(2)).sum(dim=1).to(x.dtype)


class LLaDA2MoeAttention(nn.Module):
    """Grouped-query attention with normalised q and k; rotates the first dimensions of a head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads = [heads, kv, kv]
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.heads) * d, bias=config.use_qkv_bias)
        self.query_layernorm = nn.RMSNorm(d, config.rms_norm_eps) if config.use_qk_norm else None
        self.key_layernorm = nn.RMSNorm(d, config.rms_norm_eps) if config.use_qk_norm else None
        self.dense = nn.Linear(heads * d, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, attention_mask: Tensor | None, turn: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.query_key_value(x).unflatten(2, (-1, self.config.head_dim))
        q, k, v = (part.transpose(1, 2) for part in qkv.split(self.heads, dim=2))  # [B, heads, S, head_dim]
        if self.query_layernorm is not None and self.key_layernorm is not None:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, attention_mask, enable_gqa=True)
        return self.dense(y.transpose(1, 2).flatten(2))


def rotation(position_ids: Tensor, config: Config, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [S, rotary_dim / 2] of position * rope_theta^(-2i / rotary_dim), made in fp32."""
    exponent = torch.arange(0, config.rotary_dim, 2, device=like.device, dtype=torch.float32) / config.rotary_dim
    angle = position_ids.float().unsqueeze(1) * config.rope_theta**-exponent
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + rotary_dim / 2]); dimensions from rotary_dim on stay."""
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class LLaDA2MoeDecoderLayer(nn.Module):
    def __init__(self, config: Config, experts: str, dense: bool) -> None:
        super().__init__()
        self.attention = LLaDA2MoeAttention(config)
        self.mlp: nn.Module
        if dense:
            self.mlp = LLaDA2MoeMLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = LLaDA2MoeSparseMoeBlock(config, experts)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Routing | None]:
        x = x + self.attention(self.input_layernorm(x), attention_mask, turn)
        y = self.mlp(self.post_attention_layernorm(x))
        y, routing = y if isinstance(y, tuple) else (y, None)
        return x + y, routing


class LLaDA2MoeModel(nn.Module):
    def __init__(self, config: Config, experts: str) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LLaDA2MoeDecoderLayer(config, experts, dense=i < config.first_k_dense_replace)
            for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class LLaDA2MoeModelLM(nn.Module):
    """The model with its head.

    Both kinds of experts have the same state_dict: that of the published checkpoint.

    Args:
        config: sizes and options.
        experts: "npu_moe", all experts of a layer in one call, or "loop", one after the other in plain torch.

    Raises:
        ValueError: experts is neither.
    """

    def __init__(self, config: Config, experts: str = "npu_moe") -> None:
        super().__init__()
        if experts not in EXPERTS:
            raise ValueError(f"LLaDA2MoeModelLM: experts must be one of {', '.join(EXPERTS)}, got {experts!r}")
        self.config = config
        self.model = LLaDA2MoeModel(config, experts)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Matrices normal with this standard deviation, norms 1, biases 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, std)
            else:
                parameter.fill_(0 if name.endswith(".bias") else 1)
        for buffer in self.buffers():
            buffer.zero_()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits of each position for its own token (not the next).

        Args:
            input_ids: [B, S].
            attention_mask: bool [B or 1, 1, S, S], True where position i may look at j; None: everywhere.
            position_ids: [S], where each token stands, below max_position_embeddings; None: 0, 1, 2, ...

        Returns:
            [B, S, V]

        Raises:
            ValueError: a shape is wrong. TypeError: a dtype is wrong.
        """
        return self.forward_with_routing(input_ids, attention_mask, position_ids)[0]

    def forward_with_routing(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Routing]]:
        """logits [B, S, V], and of each MoE layer router_logits [B, S, E] and topk_idx [B, S, K]."""
        self._check(input_ids, attention_mask, position_ids)
        x = self.model.word_embeddings(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=x.device)
        turn = rotation(position_ids, self.config, x)
        routings = []
        for layer in self.model.layers:
            x, routing = layer(x, attention_mask, turn)
            if routing is not None:
                routings.append(routing)
        return self.lm_head(self.model.norm(x)), routings

    def _check(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"forward: input_ids must be int32 or int64, got {input_ids.dtype}")
        if input_ids.dim() != 2:
            raise ValueError(f"forward: input_ids must be [B, S], got {list(input_ids.shape)}")
        batch, length = input_ids.shape
        most = self.config.max_position_embeddings
        if position_ids is None:
            if length > most:
                raise ValueError(f"forward: input_ids must have at most {most} places, got {length}")
        elif position_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"forward: position_ids must be int32 or int64, got {position_ids.dtype}")
        elif position_ids.shape != (length,):
            raise ValueError(f"forward: position_ids must be [{length}], got {list(position_ids.shape)}")
        if attention_mask is None:
            return
        if attention_mask.dtype != torch.bool:
            raise TypeError(f"forward: attention_mask must be bool, got {attention_mask.dtype}")
        if attention_mask.shape not in ((batch, 1, length, length), (1, 1, length, length)):
            wanted = f"[{batch} or 1, 1, {length}, {length}]"
            raise ValueError(f"forward: attention_mask must be {wanted}, got {list(attention_mask.shape)}")
