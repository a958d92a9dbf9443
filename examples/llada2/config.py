"""The configuration of a LLaDA2.0 model, as its config.json has it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MODEL_TYPE = "llada2_moe"
# Keys of a config.json that change what the model computes, and the only value that this model knows.
ONLY = {
    "model_type": MODEL_TYPE,
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "attention_dropout": 0,
    "embedding_dropout": 0,
    "output_dropout": 0,
}
OPTIONAL = {"use_qk_norm", "use_qkv_bias", "use_bias", "moe_router_enable_expert_bias", "pad_token_id"}


@dataclass(frozen=True)
class Config:
    """Sizes and options; the defaults are LLaDA2.0-mini's.

    Raises:
        ValueError: a size or an option is impossible. TypeError: it has the wrong type.
    """

    vocab_size: int = 157184
    hidden_size: int = 2048
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    intermediate_size: int = 5120
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    score_function: str = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    moe_router_enable_expert_bias: bool = True
    max_position_embeddings: int = 32768
    rope_theta: float = 600000.0
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-6
    use_qk_norm: bool = True
    use_qkv_bias: bool = False
    use_bias: bool = False
    pad_token_id: int = 156892

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = (int, float) if field.type is float else field.type
            if not isinstance(value, wanted) or (field.type is not bool and isinstance(value, bool)):
                raise TypeError(f"Config: {field.name} must be of type {field.type.__name__}, got {value!r}")
        zero_is_fine = {"num_shared_experts", "first_k_dense_replace", "pad_token_id"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (field.name not in zero_is_fine):
                raise ValueError(f"Config: {field.name} must be >= {int(field.name not in zero_is_fine)}, got {value}")
            if field.type is float and not 0 < value < float("inf"):
                raise ValueError(f"Config: {field.name} must be > 0 and finite, got {value}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"Config: num_attention_heads must be a multiple of num_key_value_heads {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.partial_rotary_factor > 1 or self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                "Config: partial_rotary_factor must be <= 1 and leave an even number of the "
                f"{self.head_dim} dimensions of a head to rotate, got {self.partial_rotary_factor}"
            )
        if self.score_function not in ("sigmoid", "softmax"):
            raise ValueError(f"Config: score_function must be sigmoid or softmax, got {self.score_function!r}")
        if self.num_experts % self.n_group:
            raise ValueError(f"Config: n_group must divide num_experts {self.num_experts}, got {self.n_group}")
        if self.topk_group > self.n_group:
            raise ValueError(f"Config: topk_group must be <= n_group {self.n_group}, got {self.topk_group}")
        eligible = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > eligible:
            raise ValueError(
                f"Config: num_experts_per_tok must be <= {eligible}, the experts of topk_group groups, "
                f"got {self.num_experts_per_tok}"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_json(cls, path: Path | str) -> "Config":
        """Read a config.json; keys that do not concern the model's maths are ignored.

        Raises:
            ValueError: a key is missing, or asks for what this model does not do. TypeError: a wrong type.
        """
        values: dict[str, Any] = json.loads(Path(path).read_text())
        for key, only in ONLY.items():
            if values.get(key, only) != only:
                raise ValueError(f"{path}: {key} must be {json.dumps(only)}, got {json.dumps(values[key])}")
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values and name not in OPTIONAL]
        if missing:
            raise ValueError(f"{path}: {', '.join(missing)} must be there, but {'are' if missing[1:] else 'is'} not")
        return cls(**{name: values[name] for name in names if name in values})

    def to_json(self, path: Path | str) -> None:
        """Write a config.json that `from_json` reads."""
        values = {"architectures": ["LLaDA2MoeModelLM"], **ONLY, **asdict(self)}
        Path(path).write_text(json.dumps(values, indent=2) + "\n")
