"""Perplexity of long text, scored over the last part of each window.

Everything before the scored part is prefilled densely; the scored tokens go one at a time, so every one of
them is predicted by a sparse step. With `overlap` the windows slide over the text as the TinyServe paper does
it for models with short positions (1024 tokens of overlap): each token behind the first `overlap` of a text
is scored once, up to its last whole window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.corpora import load
from tinyserve.eval.samples import Output, Sample
from tinyserve.eval.windows import disjoint_windows, sliding_windows
from tinyserve.haystack import start_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Perplexity"]


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Windows of `num_tokens` tokens, the scored ones among them.

    Attributes:
        text: corpus or path.
        num_scored: tokens at the end of a window that are scored; windows are disjoint and in random order.
        overlap: instead, tokens that a window shares with the one before and does not score; windows follow
            each other.
    """

    name: str
    text: str | Path
    num_scored: int = 256
    overlap: int | None = None
    metric = "perplexity"

    def __post_init__(self) -> None:
        for option, value in (("num_scored", self.num_scored), ("overlap", self.overlap)):
            if value is not None and value < 1:
                raise UsageError(f"{option}: expected an integer >= 1, got {value}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        start = start_ids(tokenizer)
        size = num_tokens - len(start)
        num_scored = self.num_scored if self.overlap is None else size - self.overlap
        if not 0 < num_scored < size:
            option, value = (
                ("num_scored", self.num_scored) if self.overlap is None else ("overlap", self.overlap)
            )
            raise UsageError(f"{option}: expected less than the window of {size} tokens, got {value}")
        documents = load(self.text)
        windows = (
            disjoint_windows(tokenizer, documents, size, seed)
            if self.overlap is None
            else sliding_windows(tokenizer, documents, size, self.overlap, seed)
        )
        idx = -1
        for idx, (title, first, tokens) in zip(range(num_samples), windows, strict=False):
            prompt = (*start, *tokens[:-num_scored])
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=prompt,
                num_dense=len(prompt) - 1,
                continuations=(tuple(tokens[-num_scored:]),),
                details={"begins_in": title, "first_token": first},
            )
        if num_samples > 0 and idx < 0:
            raise UsageError(f"num_tokens: the text {str(self.text)!r} has fewer than {size} tokens")

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`nll`: sum over the scored tokens; `num_scored`."""
        return {"nll": -sum(output.logprobs[0]), "num_scored": float(len(output.logprobs[0]))}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        """`perplexity` over all scored tokens, and their mean `nll`."""
        total = sum(score["num_scored"] for score in scores)
        if not total:
            raise ValueError("scores: expected at least one scored token, got none")
        nll = sum(score["nll"] for score in scores) / total
        return {"perplexity": math.exp(nll), "nll": nll, "num_scored": total}
