"""MMLU: the letter a model prefers, and whether a sparse method prefers the same as dense attention.

A model of 135M parameters guesses, so its accuracy says little; `compare` says how often the letters agree
and how far the probabilities of the four letters are apart. Solved questions fill the prompt up: they are
context, the question goes one token at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval import sources
from tinyserve.eval.packages import locate
from tinyserve.eval.questions import Choice, read_mmlu
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import encode, start_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Mmlu"]

_LETTERS = "ABCD"


@dataclass(frozen=True, kw_only=True)
class Mmlu:
    """Prompts of at most `num_tokens` tokens; a question that does not fit is left out.

    Attributes:
        num_shots: solved questions in front, as many as fit; None for no other limit.
        data: a file of JSON lines with `question` and `answer` in place of the package's.
    """

    name: str
    num_shots: int | None = None
    data: str | Path | None = None
    metric = "accuracy"

    def __post_init__(self) -> None:
        if self.num_shots is not None and self.num_shots < 0:
            raise UsageError(f"num_shots: expected an integer >= 0, got {self.num_shots}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        choices = read_mmlu(locate(sources.get("mmlu"))[0] if self.data is None else Path(self.data))
        letters = tuple(tuple(encode(tokenizer, f" {letter}")) for letter in _LETTERS)
        idx = 0
        for choice in random.Random(f"choices {seed}").sample(choices, len(choices)):
            if idx == num_samples:
                return
            fed = encode(tokenizer, choice.text)
            rng = random.Random(f"shots {seed} {idx}")
            others = [other for other in rng.sample(choices, len(choices)) if other != choice]
            dense = start_ids(tokenizer)
            if len(dense) + len(fed) > num_tokens:
                continue
            shots = self._shots(tokenizer, others, num_tokens - len(dense) - len(fed))
            dense += [token for shot in shots for token in shot]
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=(*dense, *fed),
                num_dense=len(dense),
                continuations=letters,
                references=(_LETTERS[choice.answer],),
                details={"num_shots": len(shots)},
            )
            idx += 1
        if num_samples > 0 and idx == 0:
            raise UsageError(f"num_tokens: none of {len(choices)} questions fits {num_tokens} tokens")

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`accuracy`; `choice`: 0 to 3; `logprob_a` to `logprob_d`: of the letters, normalised among them."""
        raw = [sum(logprobs) for logprobs in output.logprobs]
        highest = max(raw)
        total = highest + math.log(sum(math.exp(value - highest) for value in raw))
        choice = raw.index(highest)
        return {
            "accuracy": float(_LETTERS[choice] == sample.references[0]),
            "choice": float(choice),
            **{
                f"logprob_{letter.lower()}": value - total
                for letter, value in zip(_LETTERS, raw, strict=True)
            },
        }

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        if not scores:
            raise ValueError("scores: expected at least one, got none")
        return {"accuracy": sum(score["accuracy"] for score in scores) / len(scores)}

    def compare(
        self, dense: Sequence[dict[str, float]], scores: Sequence[dict[str, float]]
    ) -> dict[str, float]:
        """`agreement`: share of the samples with the letter that dense attention chose; `kl`: mean
        Kullback-Leibler divergence of the letters' probabilities from dense attention's, in nats.

        Args:
            dense: scores of the same samples, in the same order, under full attention.

        Raises:
            ValueError: none, or not as many.
        """
        if not dense or len(dense) != len(scores):
            raise ValueError(f"scores: expected as many as dense, got {len(scores)} and {len(dense)}")
        pairs = list(zip(dense, scores, strict=True))
        names = [f"logprob_{letter.lower()}" for letter in _LETTERS]
        divergence = sum(
            math.exp(full[name]) * (full[name] - sparse[name]) for full, sparse in pairs for name in names
        )
        return {
            "agreement": sum(full["choice"] == sparse["choice"] for full, sparse in pairs) / len(pairs),
            "kl": divergence / len(pairs),
        }

    def _shots(
        self, tokenizer: PreTrainedTokenizerBase, choices: Sequence[Choice], num_tokens: int
    ) -> list[list[int]]:
        shots: list[list[int]] = []
        for choice in choices:
            if self.num_shots is not None and len(shots) == self.num_shots:
                break
            shot = encode(tokenizer, f"{choice.text} {_LETTERS[choice.answer]}\n\n")
            if len(shot) > num_tokens:
                break
            num_tokens -= len(shot)
            shots.append(shot)
        return shots
