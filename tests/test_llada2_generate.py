"""Generation by masked diffusion against a slow writing of its rules."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from llada2_oracle import EOS, MASK, VOCABULARY, generate, new_model, oracle_generate


class Dreamer:
    """Logits from what a position sees, sharp enough for thresholds, made in an instant; counts its calls."""

    def __init__(self, eos=0.0, sharpness=4.0):
        self.table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64) * sharpness
        self.place = torch.randn(200, VOCABULARY, dtype=torch.float64) * sharpness
        self.table[:, EOS] += eos
        self.calls = 0

    def __call__(self, input_ids, attention_mask):
        self.calls += 1
        assert attention_mask.shape == (1, 1, input_ids.shape[1], input_ids.shape[1])
        weights = attention_mask[0, 0].double() / (1 + attention_mask[0, 0].sum(1, keepdim=True))
        return (weights @ self.table[input_ids[0]] + self.place[: input_ids.shape[1]])[None]


GENERATIONS = {
    "published": (5, 8, 8, 16, 0.95, False),
    "prompt_fills_a_block": (8, 8, 8, 12, 0.9, False),
    "prompt_fills_two_and_some": (11, 4, 4, 9, 0.5, True),
    "short_prompt": (2, 4, 3, 7, 0.9, False),  # without one, all places of the block would be equally sure
    "fewer_steps_than_tokens": (3, 8, 3, 20, 0.99, True),
    "more_steps_than_tokens": (3, 4, 9, 12, 0.6, False),
    "everything_at_once": (2, 6, 6, 17, 0.0, False),
    "one_step": (2, 6, 1, 17, 1.0, False),
    "one_token": (3, 8, 32, 1, 0.95, True),
    "blocks_of_one": (3, 1, 5, 4, 0.5, True),
}


@pytest.mark.parametrize("case", GENERATIONS.values(), ids=GENERATIONS)
def test_generate_equals_the_oracle(case):
    prompt_length, length, steps, gen_length, threshold, early = case
    model = new_model(dtype=torch.float32)
    prompt = torch.randint(40, (1, prompt_length))
    got = generate(
        model, prompt, 0.0, length, steps, gen_length, None, None, early, 1, threshold, eos_id=EOS, mask_id=MASK
    )
    with torch.no_grad():
        expected = oracle_generate(model, prompt[0].tolist(), length, steps, gen_length, threshold, early)
    assert got.tolist() == [expected]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    prompt=st.lists(st.integers(0, 41), max_size=20),
    length=st.integers(1, 9),
    steps=st.integers(1, 12),
    gen_length=st.integers(1, 24),
    threshold=st.integers(0, 100).map(lambda n: n / 100),
    early=st.booleans(),
    eos=st.sampled_from([-50.0, 0.0, 6.0]),
    minimal_topk=st.integers(1, 3),
)
def test_generate_properties(seed, prompt, length, steps, gen_length, threshold, early, eos, minimal_topk):
    minimal_topk = min(minimal_topk, gen_length)
    torch.manual_seed(seed)
    model, shown = Dreamer(eos), []
    options = {"block_length": length, "steps": steps, "gen_length": gen_length, "threshold": threshold}
    options |= {"eos_id": EOS, "mask_id": MASK, "minimal_topk": minimal_topk, "eos_early_stop": early}
    inputs = torch.tensor([prompt], dtype=torch.int64)
    got = generate(model, inputs, **options, progress=lambda done, total: shown.append((done, total)))
    calls = model.calls
    assert inputs.tolist() == [prompt]
    assert got[0].tolist() == oracle_generate(model, prompt, length, steps, gen_length, threshold, early, minimal_topk)
    assert model.calls == 2 * calls, "as many forwards as the schedule says"
    assert len(shown) == calls
    assert shown == sorted(shown)
    assert 1 <= got.shape[1] <= gen_length
    assert EOS not in got[0, :-1].tolist()
    assert got.shape[1] == gen_length or got[0, -1] == EOS


def test_sampling():
    """top_k and top_p leave the right tokens, with the right frequencies."""
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, *[-50.0] * (VOCABULARY - 5)])

    def draw(**options):
        generator = torch.Generator().manual_seed(torch.randint(2**31, ()).item())
        out = generate(
            lambda ids, mask: logits.expand(1, ids.shape[1], -1),
            torch.tensor([[7]]),
            block_length=1001,
            gen_length=1000,
            steps=1,
            eos_id=EOS,
            mask_id=MASK,
            generator=generator,
            **options,
        )
        return out[0].bincount(minlength=5)[:5] / out.numel()

    def expected(kept, temperature):
        p = (logits[:kept] / temperature).softmax(0)
        return F.pad(p, (0, 5 - kept))

    for options, kept, temperature in (
        ({"temperature": 1.0}, 5, 1.0),
        ({"temperature": 2.0}, 5, 2.0),
        ({"temperature": 1.0, "top_k": 2}, 2, 1.0),
        ({"temperature": 2.0, "top_k": 99}, 5, 2.0),
        ({"temperature": 1.0, "top_p": 0.6}, 1, 1.0),  # 0.636 alone
        ({"temperature": 1.0, "top_p": 0.8}, 2, 1.0),  # 0.636 + 0.234
        ({"temperature": 1.0, "top_p": 1.0}, 5, 1.0),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.9}, 2, 1.0),  # of three, two have 0.910
        ({"temperature": 0.0, "top_p": 0.5}, 1, 1.0),
    ):
        assert (draw(**options) - expected(kept, temperature)).abs().max() < 0.09, options


def test_sampling_repeats_with_its_seed():
    model, prompt = Dreamer(eos=-50.0, sharpness=0.5), torch.tensor([[3, 4]])
    options = {"block_length": 8, "gen_length": 40, "eos_id": EOS, "mask_id": MASK, "temperature": 1.0}
    first, again, other = (
        generate(model, prompt, **options, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": torch.tensor([1, 2])}, r"inputs must be \[1, P\], got \[2\]"),
        ({"inputs": torch.ones(2, 3, dtype=torch.int64)}, r"inputs must be \[1, P\], got \[2, 3\]"),
        ({"inputs": torch.ones(1, 3)}, "inputs must be int64, got torch.float32"),
        ({"inputs": torch.tensor([[1, MASK]])}, "inputs must not hold mask_id 42"),
        ({"temperature": -0.1}, "temperature must be >= 0 and finite, got -0.1"),
        ({"block_length": 0}, "block_length must be >= 1, got 0"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"gen_length": 0}, "gen_length must be >= 1, got 0"),
        ({"minimal_topk": 9}, "minimal_topk must be <= gen_length 4, got 9"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\] or None, got 0.0"),
        ({"top_k": 0}, "top_k must be >= 1 or None, got 0"),
        ({"threshold": float("nan")}, "threshold must be a number, got nan"),
        ({"eos_id": MASK}, "eos_id and mask_id must differ, got 42 for both"),
        ({"model": lambda ids, mask: torch.ones(2, 43)}, r"model must give logits \[1, 4, V\], got \[2, 43\]"),
        ({"model": lambda ids, mask: torch.full((1, 4, 43), torch.nan)}, "logits that are numbers, got NaN"),
    ],
)
def test_generate_refuses(change, message):
    arguments = {"model": Dreamer(), "inputs": torch.tensor([[1, 2]]), "gen_length": 4, "block_length": 4}
    with pytest.raises((ValueError, TypeError), match=message):
        generate(**{**arguments, "eos_id": EOS, "mask_id": MASK, **change})


def test_both_kinds_generate_the_same():
    loop, prompt = new_model(experts="loop", dtype=torch.float64), torch.randint(40, (1, 6))
    packed = new_model()
    packed.load_state_dict(loop.state_dict())
    options = {"block_length": 8, "gen_length": 20, "threshold": 0.3, "eos_id": EOS, "mask_id": MASK}
    assert torch.equal(generate(loop, prompt, **options), generate(packed, prompt, **options))
