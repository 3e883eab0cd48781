"""Diagnostic of the TinyServe paper, repetition: does the model go on with a block that repeats?

The paper names the diagnostic and does not define it. Ours: a block of natural text is repeated until the
prompt is full. A model with induction heads continues it nearly without error. What comes next stands one,
two, three, ... periods back, in none of the pages that are forced: the selection has to find the right
phase of the block again at every token. Without it the model falls back to what it thinks of the text, at
many times the loss.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.corpora import load
from tinyserve.eval.filler import natural
from tinyserve.eval.metrics import means
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import start_ids, take

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Repetition"]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Periodic prompts.

    Attributes:
        period: tokens of the block; more than the recent pages hold, or they answer by themselves, and prime,
            so that repetitions do not lie in the same places of pages.
        num_fed: last tokens of the prompt that go one at a time.
        num_scored: tokens to continue.
        text: corpus or path of the block.
    """

    name: str
    period: int = 127
    num_fed: int = 16
    num_scored: int = 32
    text: str | Path = "plays"
    metric = "copied"

    def __post_init__(self) -> None:
        for option in ("period", "num_fed", "num_scored"):
            if getattr(self, option) < 1:
                raise UsageError(f"{option}: expected an integer >= 1, got {getattr(self, option)}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        start = start_ids(tokenizer)
        smallest = len(start) + max(2 * self.period, self.num_fed + 1)
        if num_tokens < smallest:
            raise UsageError(f"num_tokens: expected at least {smallest}, two periods, got {num_tokens}")
        documents = load(self.text)
        for idx in range(num_samples):
            pieces = natural(tokenizer, documents, random.Random(f"repetition {seed} {idx}"))
            block = [token for piece in take(pieces, self.period) for token in piece]
            if len(block) < self.period:
                raise UsageError(f"period: the text has only {len(block)} tokens, got {self.period}")
            size = num_tokens - len(start)
            tokens = list(itertools.islice(itertools.cycle(block), size + self.num_scored))
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=(*start, *tokens[:size]),
                num_dense=num_tokens - self.num_fed,
                max_new_tokens=self.num_scored,
                continuations=(tuple(tokens[size:]),),
                details={"period": self.period},
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`copied`: share of the greedy tokens that are right in their places; `nll`: per right token."""
        right = sample.continuations[0]
        same = sum(ours == theirs for ours, theirs in zip(output.token_ids, right, strict=False))
        return {"copied": same / len(right), "nll": -sum(output.logprobs[0]) / len(right)}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)
