"""What a small model learns from: windows of text, blocks that repeat, and pass keys asked for at the end.

Text alone teaches a model of a few million parameters to spell. The other two kinds can only be predicted
by looking back, so they are what makes it attend to single tokens far away, which is what sparse attention
has to get right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tinyserve.eval.corpora import Document
from tinyserve.eval.filler import natural, repeated
from tinyserve.haystack import MARK, around, build_haystack, encode, encode_long
from tinyserve.needles import INSTRUCTION, make_needle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Lessons"]

SHARE_REPEATED, SHARE_PASS_KEYS = 0.1, 0.2  # of the sequences; the rest is text
_SHORTEST_BLOCK = 8
_LEAST_FILLER = 16  # tokens of a prompt with a pass key


class Lessons:
    """Training sequences without end; the same arguments give the same ones.

    Args:
        documents: the text.
        seed: of everything random.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], *, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._documents = documents
        self._rng = random.Random(f"lessons {seed}")
        end = [int(tokenizer.eos_token_id)]
        self._text = [
            token for document in documents for token in encode_long(tokenizer, document.text) + end
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def batch(self, num_sequences: int, num_tokens: int) -> torch.Tensor:
        """int64 [num_sequences, num_tokens]."""
        return torch.tensor([self._sequence(num_tokens) for _ in range(num_sequences)])

    def _sequence(self, num_tokens: int) -> list[int]:
        kind = self._rng.random()
        if kind < SHARE_REPEATED:
            return self._repeated(num_tokens)
        if kind < SHARE_REPEATED + SHARE_PASS_KEYS:
            return self._pass_keys(num_tokens)
        return self._window(num_tokens)

    def _window(self, num_tokens: int) -> list[int]:
        start = self._rng.randrange(len(self._text) - num_tokens + 1)
        return self._text[start : start + num_tokens]

    def _repeated(self, num_tokens: int) -> list[int]:
        """A block of text or of random tokens, again and again."""
        size = self._rng.randrange(_SHORTEST_BLOCK, num_tokens // 2)
        block = self._window(size)
        if self._rng.random() < 0.5:
            block = [self._rng.randrange(len(self._tokenizer)) for _ in range(size)]
        return (block * (num_tokens // size + 1))[:num_tokens]

    def _pass_keys(self, num_tokens: int) -> list[int]:
        """Prompts with their answers, as many as fit; short ones are more frequent."""
        tokens: list[int] = []
        while prompt := self._pass_key(num_tokens - len(tokens)):
            tokens += prompt
        return tokens + self._window(num_tokens - len(tokens))

    def _pass_key(self, most: int) -> list[int]:
        """A prompt with its answer, at most `most` tokens; empty where none fits."""
        rng = self._rng
        needle = make_needle(str(rng.randrange(10_000, 100_000)), rng.randrange(1 << 30))
        message = f"{INSTRUCTION}\n\n{MARK}\n\n{needle.question}"
        head, tail = around(self._tokenizer, message, f"{needle.answer_start} {needle.key}.\n\n", chat=False)
        hidden = encode(self._tokenizer, needle.sentence + "\n")
        least = len(head) + len(tail) + len(hidden) + _LEAST_FILLER
        if least > most:
            return []
        num_tokens = int(least * (most / least) ** rng.random())
        depth = rng.random()
        return build_haystack(head, tail, self._filler(), [hidden], [depth], num_tokens=num_tokens).token_ids

    def _filler(self) -> Iterator[list[int]]:
        if self._rng.random() < 0.5:
            return repeated(self._tokenizer)
        return natural(self._tokenizer, self._documents, self._rng)
