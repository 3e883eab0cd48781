"""Diagnostic of the TinyServe paper, attention aliasing: can pages be told apart that look alike?

The paper names the diagnostic and does not define it. Ours: the whole context is a list of records of one
form, "The registration number of the ADJECTIVE NOUN is NUMBER." Every page holds such records, so page
summaries differ in little but the words that matter, and the nearest aliases share a word with what is asked
for. The model is right when it gives the true number a higher probability than the numbers of other records.
Being led to the page of another record shows as a wrong choice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.metrics import means
from tinyserve.eval.samples import Output, Sample
from tinyserve.eval.words import NUM_THINGS, thing_names
from tinyserve.haystack import MARK, around, build_haystack, encode, room, take

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Aliasing"]

_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_INSTRUCTION = "Every line below says which registration number a thing has."


@dataclass(frozen=True, kw_only=True)
class Aliasing:
    """One record asked for, at depths 0.1 to 0.9 in turn, among as many as the prompt holds: first those of
    things that share a word with it.

    Attributes:
        num_aliases: numbers of other records that are scored beside the right one, of the nearest aliases.
    """

    name: str
    num_aliases: int = 7
    metric = "accuracy"

    def __post_init__(self) -> None:
        if self.num_aliases < 1:
            raise UsageError(f"num_aliases: expected an integer >= 1, got {self.num_aliases}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        for idx in range(num_samples):
            yield self._sample(tokenizer, random.Random(f"aliasing {seed} {idx}"), num_tokens, idx)

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`accuracy`: the right number is the most probable of all; `found`: it stands in the text;
        `aliased`: the number of another record does; `margin`: log-probability over that of the best alias.
        """
        right, *others = (sum(logprobs) for logprobs in output.logprobs)
        return {
            "accuracy": float(right > max(others)),
            "found": float(sample.references[0] in output.text),
            "aliased": float(any(number in output.text for number in sample.details["others"])),
            "margin": right - max(others),
        }

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)

    def _sample(
        self, tokenizer: PreTrainedTokenizerBase, rng: random.Random, num_tokens: int, idx: int
    ) -> Sample:
        asked, *others = thing_names(rng, NUM_THINGS)
        words = set(asked.split())
        others.sort(key=lambda thing: not words & set(thing.split()))  # stable: still random among equals
        number, *numbers = map(str, rng.sample(range(10_000, 100_000), 1 + len(others)))
        message = f"{_INSTRUCTION}\n\n{MARK}\nWhat is the registration number of the {asked}?"
        head, tail = around(tokenizer, message, f"The registration number of the {asked} is", chat=False)
        hidden = encode(tokenizer, _record(asked, number))
        size = room(head, tail, [hidden], num_tokens, "num_tokens")
        records = (
            encode(tokenizer, _record(thing, other)) for thing, other in zip(others, numbers, strict=True)
        )
        lines = take(records, size)
        whole = len(lines) - 1  # the last line may be cut in its number
        if whole < self.num_aliases:
            raise UsageError(f"num_tokens: expected room for {self.num_aliases} records, got {whole}")
        order = [*rng.sample(range(whole), whole), whole]
        depth = _DEPTHS[idx % len(_DEPTHS)]
        lines = [lines[line] for line in order]
        hay = build_haystack(head, tail, lines, [hidden], [depth], num_tokens=num_tokens)
        answers = [encode(tokenizer, f" {value}") for value in (number, *numbers[: self.num_aliases])]
        return Sample(
            sample_id=f"{self.name}-{num_tokens}-{idx}",
            prompt_ids=tuple(hay.token_ids),
            num_dense=hay.num_context,
            max_new_tokens=len(answers[0]) + 1,
            continuations=tuple(map(tuple, answers)),
            references=(number,),
            details={
                "depth": depth,
                "others": numbers[: len(lines)],
                "spans": [list(span) for span in hay.spans],
            },
        )


def _record(thing: str, number: str) -> str:
    return f"The registration number of the {thing} is {number}.\n"
