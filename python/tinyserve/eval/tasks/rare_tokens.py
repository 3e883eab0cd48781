"""Diagnostic of the TinyServe paper, rare-token recall: is a phrase found again that occurs once?

The paper names the diagnostic and does not define it. Ours: a phrase of random words from the rarest fifth of
the vocabulary, none of which occurs in the text otherwise, stands once somewhere in natural text, without any
sentence that points at it. At the end the phrase begins again; its other tokens are scored. Only attention to
the page of the phrase can tell them: a language model alone gives such tokens next to no probability.
"""

from __future__ import annotations

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
from tinyserve.eval.words import word_tokens
from tinyserve.haystack import build_haystack, encode, room, start_ids, take

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RareTokens"]

_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_RAREST = 0.2


@dataclass(frozen=True, kw_only=True)
class RareTokens:
    """A phrase at depths 0.1 to 0.9 in turn.

    Attributes:
        num_given: tokens of the phrase that the end of the prompt repeats, one at a time.
        num_scored: tokens of the phrase that follow.
        text: corpus or path of the natural text.
    """

    name: str
    num_given: int = 3
    num_scored: int = 3
    text: str | Path = "plays"
    metric = "recalled"

    def __post_init__(self) -> None:
        for option in ("num_given", "num_scored"):
            if getattr(self, option) < 1:
                raise UsageError(f"{option}: expected an integer >= 1, got {getattr(self, option)}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        documents = load(self.text)
        head, gap = start_ids(tokenizer), encode(tokenizer, "\n\n")
        for idx in range(num_samples):
            rng = random.Random(f"rare tokens {seed} {idx}")
            size = room(
                head, [], [[0] * (2 * self.num_given + self.num_scored), gap, gap], num_tokens, "num_tokens"
            )
            filler = take(natural(tokenizer, documents, rng), size)
            used = {token for piece in filler for token in piece}
            phrase = word_tokens(tokenizer, rng, self.num_given + self.num_scored, rarest=_RAREST, avoid=used)
            depth = _DEPTHS[idx % len(_DEPTHS)]
            given = phrase[: self.num_given]
            hay = build_haystack(head, gap + given, filler, [phrase + gap], [depth], num_tokens=num_tokens)
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=tuple(hay.token_ids),
                num_dense=hay.num_context,
                max_new_tokens=self.num_scored,
                continuations=(tuple(phrase[self.num_given :]),),
                details={"depth": depth, "spans": [list(span) for span in hay.spans]},
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`recalled`: all right tokens are the most probable ones; `nll`: per right token."""
        logprobs = output.logprobs[0]
        return {"recalled": float(output.greedy[0]), "nll": -sum(logprobs) / len(logprobs)}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)
