"""The LLaDA2 of examples/llada2 against plain loops in fp64; its configuration and checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from llada2_oracle import (
    CONFIGS,
    SMALL,
    Config,
    LLaDA2MoeModelLM,
    block_mask,
    checkpoint,
    new_model,
    oracle_block,
    oracle_model,
    oracle_route,
    under,
)
from safetensors.torch import load_file, save_file
from torch import nn

from npu_moe_ops import load_balancing_loss
from npu_moe_ops.integrations.llada2 import patch


@pytest.mark.parametrize("experts", ["loop", "npu_moe"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_model_equals_the_oracle(config, experts):
    model = new_model(config, experts)
    ids = torch.randint(config.vocab_size, (1, 7))
    mask = block_mask(7, 3)
    expected = oracle_model(model.state_dict(), ids[0], lambda t, s: s // 3 <= t // 3, config)
    # The router of the loop works in fp32.
    torch.testing.assert_close(model(ids, mask)[0], expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(ids)[0], expected, rtol=1e-3, atol=1e-3), "the mask does nothing"


def test_batches_masks_and_positions():
    model = new_model()
    ids, positions = torch.randint(43, (2, 6)), torch.tensor([0, 1, 2, 0, 1, 2])
    masks = (torch.rand(2, 1, 6, 6) < 0.5) | torch.eye(6, dtype=torch.bool)
    logits = model(ids, masks, positions)
    for b in range(2):
        expected = oracle_model(
            model.state_dict(), ids[b], lambda t, s, b=b: masks[b, 0, t, s], SMALL, positions.tolist()
        )
        torch.testing.assert_close(logits[b], expected, rtol=1e-5, atol=1e-5)
    full = oracle_model(model.state_dict(), ids[1], lambda t, s: True, SMALL)
    torch.testing.assert_close(model(ids)[1], full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", ["loop", "npu_moe"])
def test_block_and_routing_equal_the_oracle(experts):
    model = new_model(experts=experts)
    block, x = model.model.layers[1].mlp, torch.randn(2, 5, 24, dtype=torch.float64)
    y, (logits, ids) = block(x)
    w = under(block.state_dict(), "")
    torch.testing.assert_close(y.flatten(0, 1), oracle_block(w, x.flatten(0, 1), SMALL), rtol=1e-5, atol=1e-5)
    for row, row_logits, row_ids in zip(x.flatten(0, 1), logits.flatten(0, 1), ids.flatten(0, 1), strict=True):
        weights, expected = oracle_route(w, row, SMALL)
        assert row_ids.tolist() == list(weights)
        torch.testing.assert_close(row_logits.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loop_equals_npu_moe(dtype):
    loop = new_model(experts="loop", dtype=dtype)
    packed = new_model(dtype=dtype)
    packed.load_state_dict(loop.state_dict())
    assert list(packed.state_dict()) == list(loop.state_dict())
    assert sum("experts.w" in name for name, _ in packed.named_parameters()) == 2 * 2
    ids, mask = torch.randint(43, (2, 12)), block_mask(12, 4)
    gradients = []
    for model in (loop, packed):
        logits, routing = model.forward_with_routing(ids, mask)
        balance = sum(load_balancing_loss(router_logits, chosen, 12) for router_logits, chosen in routing)
        (F.cross_entropy(logits.float().transpose(1, 2), ids) + 0.1 * balance).backward()
        gradients.append((logits, routing, model))
    if dtype == torch.bfloat16:  # a rounding may send a token to another expert
        assert (gradients[0][0] - gradients[1][0]).norm() < 0.3 * gradients[0][0].norm()
    else:
        torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-4, atol=1e-5)
        assert all(torch.equal(a[1], b[1]) for a, b in zip(gradients[0][1], gradients[1][1], strict=True))
        for (name, p), (_, q) in zip(loop.named_parameters(), _unpacked(packed), strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad  # an expert without a token
            torch.testing.assert_close(grad, q, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def _unpacked(model):
    """(name, gradient) in the order of a list of experts."""
    for name, parameter in model.named_parameters():
        if not name.endswith((".w13", ".w2")):
            yield name, parameter.grad
        elif name.endswith(".w13"):
            experts = model.get_submodule(name.rpartition(".")[0])
            for e in range(len(experts)):
                yield from (("gate", experts.w13.grad[e, :10]), ("up", experts.w13.grad[e, 10:]))
                yield "down", experts.w2.grad[e]


def test_routing_of_equal_scores_is_the_same():
    """A router of zeros: everything ties."""
    models = [new_model(experts=experts) for experts in ("loop", "npu_moe")]
    for model in models:
        for layer in model.model.layers[1:]:
            nn.init.zeros_(layer.mlp.gate.weight)
            layer.mlp.gate.expert_bias.zero_()
    x = torch.randn(1, 4, 24, dtype=torch.float64)
    for model in models:
        assert model.model.layers[1].mlp(x)[1][1].tolist() == [[[0, 1, 2]] * 4]


def test_training_lowers_the_loss():
    model = new_model(dtype=torch.float32)
    ids = torch.randint(43, (4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(ids, block_mask(8, 4)).transpose(1, 2), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# Configuration and checkpoint.


def test_config_round_trip(tmp_path):
    for config in (*CONFIGS.values(), Config()):
        config.to_json(tmp_path / "config.json")
        assert Config.from_json(tmp_path / "config.json") == config
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("llada2_moe", ["LLaDA2MoeModelLM"])
    del values["use_qk_norm"]
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "auto_map": {}, "sliding_window": 4096, "rope_theta": 6})
    )
    assert Config.from_json(tmp_path / "config.json") == replace(Config(), rope_theta=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be >= 1, got 0"),
        ({"hidden_size": 2.5}, "hidden_size must be of type int, got 2.5"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be of type bool, got 1"),
        ({"rope_theta": -1.0}, "rope_theta must be > 0 and finite, got -1"),
        ({"num_key_value_heads": 4}, "num_attention_heads must be a multiple of num_key_value_heads 4, got 6"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor must be .* of the 12 dimensions .* got 0.25"),
        ({"score_function": "relu"}, "score_function must be sigmoid or softmax, got 'relu'"),
        ({"n_group": 5}, "n_group must divide num_experts 12, got 5"),
        ({"topk_group": 5}, "topk_group must be <= n_group 4, got 5"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be <= 6, .* got 7"),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu", got "gelu"'),
        ({"rope_scaling": {"factor": 2}}, 'rope_scaling must be null, got {"factor": 2}'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false, got true"),
        ({"model_type": "qwen3_moe"}, 'model_type must be "llada2_moe", got "qwen3_moe"'),
        ({"head_dim": ...}, "head_dim must be there, but is not"),
    ],
)
def test_config_refuses(tmp_path, change, message):
    SMALL.to_json(tmp_path / "config.json")
    values = {**json.loads((tmp_path / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    with pytest.raises((ValueError, TypeError), match=message):
        Config.from_json(tmp_path / "config.json")


@pytest.mark.parametrize("experts", ["loop", "npu_moe"])
def test_checkpoint_round_trip(tmp_path, experts):
    model = new_model(experts=experts, dtype=torch.bfloat16)
    checkpoint.save(model, tmp_path, max_shard_size=9000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    assert len(shards) > 3
    assert {path.name for path in shards} == set(index["weight_map"].values())
    total = 0
    for path in shards:
        tensors = load_file(path)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 9000 or len(tensors) == 1
        total += size
        assert all(index["weight_map"][key] == path.name for key in tensors)
    assert index["metadata"]["total_size"] == total
    for kind in ("loop", "npu_moe"):
        again = checkpoint.load(tmp_path, experts=kind)
        assert not again.training
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value.to(again.state_dict()[key].dtype)), key
        assert again.lm_head.weight.dtype == torch.bfloat16
        assert again.model.layers[1].mlp.gate.expert_bias.dtype == torch.float32
    assert checkpoint.load(tmp_path, dtype=torch.float64).lm_head.weight.dtype == torch.float64


def test_checkpoint_is_replaced(tmp_path):
    model = new_model(dtype=torch.float32)
    checkpoint.save(model, tmp_path, max_shard_size=5000)
    nn.init.ones_(model.lm_head.weight)
    checkpoint.save(model, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")].count("model-00001-of-00001.safetensors") == 1
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert torch.equal(checkpoint.load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_checkpoint_of_one_file(tmp_path):
    model = new_model(experts="loop", dtype=torch.float32)
    SMALL.to_json(tmp_path / "config.json")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    ids = torch.randint(43, (1, 5))
    torch.testing.assert_close(checkpoint.load(tmp_path)(ids), model(ids), rtol=1e-4, atol=1e-5)


def test_checkpoint_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        checkpoint.load(tmp_path)
    model = new_model(dtype=torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    SMALL.to_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"index\.json or model\.safetensors must be there, but neither is"):
        checkpoint.load(tmp_path)
    lost = "model.layers.1.mlp.experts.7.up_proj.weight"
    faults = {
        rf"must hold every weight of the model, but lacks {lost}": {k: v for k, v in state.items() if k != lost},
        r"must hold weights of the model only, but has model\.surprise": {**state, "model.surprise": torch.ones(2)},
        rf"{lost} must be \[10, 24\], as config\.json says, got \[11, 24\]": {**state, lost: torch.ones(11, 24)},
    }
    for message, tensors in faults.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path)
    checkpoint.save(model, tmp_path, max_shard_size=9000)
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name}: .* names it, but it is not there"):
        checkpoint.load(tmp_path)
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(ValueError, match=f"{shard.name}: must hold what .* says, but lacks model"):
        checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match="max_shard_size must be >= 1 byte, got 0"):
        checkpoint.save(model, tmp_path, max_shard_size=0)


def test_model_refuses():
    with pytest.raises(ValueError, match="experts must be one of npu_moe, loop, got 'fast'"):
        LLaDA2MoeModelLM(SMALL, "fast")
    model, ids = new_model(), torch.randint(43, (2, 5))
    for arguments, message in (
        ((ids[0],), r"input_ids must be \[B, S\], got \[5\]"),
        ((ids.float(),), "input_ids must be int32 or int64, got torch.float32"),
        ((torch.zeros(1, 65, dtype=torch.int64),), "input_ids must have at most 64 places, got 65"),
        ((ids, torch.ones(5, 5, dtype=torch.bool)), r"attention_mask must be \[2 or 1, 1, 5, 5\], got \[5, 5\]"),
        ((ids, torch.ones(1, 1, 5, 5)), "attention_mask must be bool, got torch.float32"),
        ((ids, None, torch.arange(4)), r"position_ids must be \[5\], got \[4\]"),
        ((ids, None, torch.arange(5.0)), "position_ids must be int32 or int64, got torch.float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model(*arguments)


def test_patch_of_the_example_model():
    model = new_model(experts="loop", dtype=torch.float32)
    ids = torch.randint(43, (2, 9))
    expected = model(ids)
    assert patch(model) == 2
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)
