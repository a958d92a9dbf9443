"""Text in and out of token ids: bytes for a model of our own, the model's tokenizer for a published one."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

BYTES = 256
EOS, MASK, VOCABULARY = BYTES, BYTES + 1, BYTES + 2  # of the byte model


class ByteTokenizer:
    eos_id, mask_id = EOS, MASK

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < BYTES).decode(errors="replace")


class PublishedTokenizer:
    """Of a folder with tokenizer files; needs transformers."""

    mask_id = 156895

    def __init__(self, folder: Path, eos_id: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        if self._tokenizer.chat_template:
            return list(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        return list(self._tokenizer.encode(text))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def tokenizer_of(folder: Path, vocab_size: int, eos_id: int) -> ByteTokenizer | PublishedTokenizer:
    return ByteTokenizer() if vocab_size == VOCABULARY else PublishedTokenizer(folder, eos_id)


def english() -> str:
    """The text that every Python ships: the topics of its help(), their prose, a paragraph a line.

    Code, tables and indentation would teach a small model to answer with blanks.
    """
    from pydoc_data.topics import topics

    paragraphs = (" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n"))
    return "\n".join(text for text in paragraphs if text[-1:] in (".", ":") and len(text) > 80)


def batches(tokens: Tensor, sequences: int, length: int, seed: int) -> Iterator[Tensor]:
    """[sequences, length] at random places, without end; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (sequences, 1), generator=generator)
        yield tokens[starts + torch.arange(length)]
