"""Pass key retrieval: a number hidden once in a long filler, asked for at the end.

After Mohtashami and Jaggi, arXiv 2305.16300. Dense attention of a model that can do it at all finds every
key in the repeated filler; if it does not, the harness is wrong. The question, and with it the choice of
pages, goes one token at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.corpora import load
from tinyserve.eval.filler import natural, repeated
from tinyserve.eval.metrics import means
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import MARK, around, build_haystack, encode
from tinyserve.needles import INSTRUCTION, Needle, found, make_needle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Passkey"]


@dataclass(frozen=True, kw_only=True)
class Passkey:
    """Every key at every depth, key after key.

    Attributes:
        filler: "repeated" sentences or "natural" text.
        text: corpus or path of the natural text.
        depths: where in the filler the key hides, 0 to 1.
        chat: ask through the tokenizer's chat template; otherwise the prompt is plain text.
    """

    name: str
    filler: str = "repeated"
    text: str | Path = "plays"
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    chat: bool = False
    metric = "accuracy"

    def __post_init__(self) -> None:
        if self.filler not in ("repeated", "natural"):
            raise UsageError(f"filler: expected 'repeated' or 'natural', got {self.filler!r}")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        documents = load(self.text) if self.filler == "natural" else []
        for idx in range(num_samples):
            key_idx, depth_idx = divmod(idx, len(self.depths))
            # One generator per key: the same text at every depth, and a prefix of a longer run is the same.
            rng = random.Random(f"passkey {seed} {key_idx}")
            needle = make_needle(str(rng.randrange(10_000, 100_000)), rng.randrange(1 << 30))
            pieces = natural(tokenizer, documents, rng) if documents else repeated(tokenizer)
            message = f"{INSTRUCTION}\n\n{MARK}\n\n{needle.question}"
            head, tail = around(tokenizer, message, needle.answer_start, chat=self.chat)
            gap = "\n\n" if documents else "\n"
            hidden = encode(tokenizer, needle.sentence + gap)
            depth = self.depths[depth_idx]
            hay = build_haystack(head, tail, pieces, [hidden], [depth], num_tokens=num_tokens)
            answer = encode(tokenizer, f" {needle.key}")
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=tuple(hay.token_ids),
                num_dense=hay.num_context,
                max_new_tokens=len(answer) + 1,
                continuations=(tuple(answer),),
                references=(needle.key,),
                details={
                    "depth": depth,
                    "filler": self.filler,
                    "thing": needle.thing,
                    "spans": [list(span) for span in hay.spans],
                },
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`accuracy`: the key stands in the text; `answer_logprob`: of the whole key as the next words."""
        needle = Needle(sample.references[0], sample.details["thing"])
        return {
            "accuracy": float(found(needle, output.text)),
            "answer_logprob": sum(output.logprobs[0]),
        }

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)
