"""Variable tracking: a chain of assignments hidden in a long text; which variables have the first value?

After RULER (Hsieh et al., arXiv 2404.06654). Every link has to be read to find the next one. A short solved
example comes first, without which a small model does not see what is asked.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.corpora import load
from tinyserve.eval.filler import natural, repeated
from tinyserve.eval.metrics import contained, means
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import MARK, around, build_haystack, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["VariableTracking"]

_TITLE = "The lines that begin with VAR give values to variables. Follow them."


@dataclass(frozen=True, kw_only=True)
class VariableTracking:
    """One chain "VAR A = NUMBER", "VAR B = VAR A", ... in order, at random places of the filler.

    Attributes:
        num_hops: links behind the first; `num_hops + 1` variables have the value.
        filler: "repeated" sentences (as in RULER) or "natural" text.
        text: corpus or path of the natural text.
        example: put a short solved example in front.
    """

    name: str
    num_hops: int = 4
    filler: str = "repeated"
    text: str | Path = "plays"
    example: bool = True
    metric = "found"

    def __post_init__(self) -> None:
        if self.num_hops < 0:
            raise UsageError(f"num_hops: expected an integer >= 0, got {self.num_hops}")
        if self.filler not in ("repeated", "natural"):
            raise UsageError(f"filler: expected 'repeated' or 'natural', got {self.filler!r}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        documents = load(self.text) if self.filler == "natural" else []
        for idx in range(num_samples):
            rng = random.Random(f"variables {seed} {idx}")
            names, value, lines = _chain(rng, self.num_hops)
            depths = sorted(rng.random() for _ in lines)
            question, answer_start = _question(names, value)
            message = f"{_TITLE}\n\n{MARK}\n{question}"
            if self.example:
                message = f"{_example(rng, self.num_hops)}\n\n{message}"
            head, tail = around(tokenizer, message, answer_start, chat=False, joint="\n")
            hidden = [encode(tokenizer, line) for line in lines]
            pieces = natural(tokenizer, documents, rng) if documents else repeated(tokenizer)
            hay = build_haystack(head, tail, pieces, hidden, depths, num_tokens=num_tokens)
            answer = encode(tokenizer, f" {_listed(names)}")
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=tuple(hay.token_ids),
                num_dense=hay.num_context,
                max_new_tokens=len(answer) + 4,
                continuations=(tuple(answer),),
                references=tuple(names),
                details={
                    "num_hops": self.num_hops,
                    "filler": self.filler,
                    "spans": [list(span) for span in hay.spans],
                },
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`found`: share of the variables in the text; `answer_logprob`: of all, in the chain's order."""
        return {
            "found": contained(output.text, sample.references),
            "answer_logprob": sum(output.logprobs[0]),
        }

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)


def _chain(rng: random.Random, num_hops: int) -> tuple[list[str], str, list[str]]:
    """Names, the value, and the lines."""
    names: list[str] = []
    while len(names) <= num_hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}\n"]
    lines += [f"VAR {name} = VAR {before}\n" for before, name in itertools.pairwise(names)]
    return names, value, lines


def _question(names: Sequence[str], value: str) -> tuple[str, str]:
    return (
        f"Question: Which {len(names)} variables have the value {value}?",
        f"Answer: The {len(names)} variables with the value {value} are",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"VAR {name}" for name in names)


def _example(rng: random.Random, num_hops: int) -> str:
    names, value, lines = _chain(rng, num_hops)
    question, answer_start = _question(names, value)
    return f"{_TITLE}\n\n{''.join(lines)}\n{question}\n{answer_start} {_listed(names)}."
