"""Named inputs, each with its reason."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# N, H, I, counts. Sizes are distinct, so that no wrong axis fits by chance.
SHAPES = {
    "mixed": (23, 34, 18, (0, 5, 1, 9, 0, 8)),  # more and fewer rows than the direct bf16 product takes
    "first_empty": (7, 16, 8, (0, 3, 4)),
    "last_empty": (7, 16, 8, (3, 4, 0)),
    "all_empty": (5, 16, 8, (0, 0, 0)),
    "tail_rows": (11, 16, 8, (2, 0, 4)),
    "no_rows": (0, 16, 8, (0, 0)),
    "one_row": (1, 24, 40, (0, 1, 0)),
    "one_expert": (9, 20, 12, (9,)),
    "hidden_1": (6, 1, 5, (2, 4)),
    "intermediate_1": (6, 7, 1, (4, 2)),
    "odd": (13, 37, 29, (6, 0, 7)),
    "skewed": (300, 16, 8, (1, 297, 2)),
    "many_blocks": (2600, 8, 4, (1, 1200, 0, 1300, 99)),  # past one block of rows of the CPU path
}


def offsets(counts, dtype=torch.int32):
    return torch.tensor([0, *counts]).cumsum(0).to(dtype)


def ffn_inputs(n, hidden, intermediate, counts, dtype=torch.float32):
    """(tokens [N, H], w13 [E, H, 2I], w2 [E, I, H], offsets), scaled so that outputs are about 1."""
    experts = len(counts)
    x = torch.randn(n, hidden, dtype=torch.float64)
    w13 = torch.randn(experts, hidden, 2 * intermediate, dtype=torch.float64) / hidden**0.5
    w2 = torch.randn(experts, intermediate, hidden, dtype=torch.float64) * 2 / intermediate**0.5
    return x.to(dtype), w13.to(dtype), w2.to(dtype), offsets(counts)


def _poison(t):
    return torch.nan if t.is_floating_point() else -1


def _offset(t, by):
    """The same values behind `by` elements of NaN, so that a read outside shows."""
    store = t.new_full((t.numel() + 2 * by,), _poison(t))
    store[by : by + t.numel()] = t.flatten()
    return store[by : by + t.numel()].view(t.shape)


def _sliced(t):
    """Every other column of a wider tensor whose other columns are NaN."""
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), _poison(t))
    wide[..., ::2] = t
    return wide[..., ::2]


# How a tensor's values may lie in memory; each keeps values and shape.
MEMORY = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),  # Hugging Face's weights
    "sliced": _sliced,
    "offset": lambda t: _offset(t, 64),
    "misaligned": lambda t: _offset(t, 1),
}


def flat(weight):
    return weight.reshape(-1, weight.shape[-1])
