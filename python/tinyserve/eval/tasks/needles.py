"""Needles in natural text after RULER (Hsieh et al., arXiv 2404.06654): one, one among many, or many at once.

- single: one fact, asked for.
- multi-key: several facts of the same form about different things; one is asked for, the others distract.
- multi-value: several values of one thing, all asked for.
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
from tinyserve.eval.metrics import contained, means
from tinyserve.eval.samples import Output, Sample
from tinyserve.eval.words import thing_names
from tinyserve.haystack import MARK, around, build_haystack, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Needles"]

_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, kw_only=True)
class Needles:
    """Facts "the registration number of THING is NUMBER" in an excerpt of natural text.

    The first value asked for hides at depths 0.1 to 0.9 in turn, all others anywhere.

    Attributes:
        num_keys: things with a number; the first is asked for.
        num_values: numbers of each thing.
        text: corpus or path of the filler.
        chat: ask through the tokenizer's chat template.
    """

    name: str
    num_keys: int = 1
    num_values: int = 1
    text: str | Path = "plays"
    chat: bool = False
    metric = "found"

    def __post_init__(self) -> None:
        if self.num_keys < 1 or self.num_values < 1:
            raise UsageError(
                f"num_keys, num_values: expected at least 1, got {self.num_keys} and {self.num_values}"
            )

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        documents = load(self.text)
        for idx in range(num_samples):
            rng = random.Random(f"needles {seed} {idx}")
            things = thing_names(rng, self.num_keys)
            numbers = [
                str(number) for number in rng.sample(range(10_000, 100_000), self.num_keys * self.num_values)
            ]
            facts = [
                f"{self._opening(thing)} {numbers[key * self.num_values + which]}.\n\n"
                for key, thing in enumerate(things)
                for which in range(self.num_values)
            ]
            depths = [_DEPTHS[idx % len(_DEPTHS)], *(rng.random() for _ in facts[1:])]
            head, tail = self._frame(tokenizer, things[0])
            hidden = [encode(tokenizer, fact) for fact in facts]
            pieces = natural(tokenizer, documents, rng)
            hay = build_haystack(head, tail, pieces, hidden, depths, num_tokens=num_tokens)
            asked = numbers[: self.num_values]
            answers = [encode(tokenizer, f" {number}") for number in asked]
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=tuple(hay.token_ids),
                num_dense=hay.num_context,
                # Separators, and a word or two around a list.
                max_new_tokens=sum(map(len, answers)) + (1 if len(answers) == 1 else 2 * len(answers) + 4),
                # Several values may come in any order, so none is the right continuation.
                continuations=(tuple(answers[0]),) if len(answers) == 1 else (),
                references=tuple(asked),
                details={
                    "depth": depths[0],
                    "num_keys": self.num_keys,
                    "num_values": self.num_values,
                    "spans": [list(span) for span in hay.spans[: self.num_values]],
                },
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`found`: share of the asked numbers in the text; `answer_logprob` where there is one."""
        scores = {"found": contained(output.text, sample.references)}
        if output.logprobs:
            scores["answer_logprob"] = sum(output.logprobs[0])
        return scores

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)

    def _opening(self, thing: str) -> str:
        if self.num_values == 1:
            return f"The registration number of the {thing} is"
        return f"One of the registration numbers of the {thing} is"

    def _frame(self, tokenizer: PreTrainedTokenizerBase, thing: str) -> tuple[list[int], list[int]]:
        if self.num_values == 1:
            question, answer = f"What is the registration number of the {thing}?", self._opening(thing)
        else:
            question = f"What are all {self.num_values} registration numbers of the {thing}?"
            answer = f"The {self.num_values} registration numbers of the {thing} are"
        instruction = "The text below hides registration numbers of things. Remember them for a question."
        return around(tokenizer, f"{instruction}\n\n{MARK}\n\n{question}", answer, chat=self.chat)
