"""Questions over many paragraphs: those with the answer among others that distract, shuffled, up to the asked
length.

The paragraphs are prefilled densely; the question goes one token at a time. Scores are LongBench's for
question answering (F1 over words, best reference), with exact match and containment beside it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval import sources
from tinyserve.eval.metrics import best, contained, exact_match, means, word_f1
from tinyserve.eval.packages import locate
from tinyserve.eval.questions import Question
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import MARK, around, encode, take

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DocumentQA"]

_INSTRUCTION = "Answer the question from the passages. Give the answer alone, in as few words as it takes."


@dataclass(frozen=True, kw_only=True)
class DocumentQA:
    """Prompts of exactly `num_tokens` tokens. A question whose own paragraphs do not fit is left out.

    Attributes:
        read: reads the questions of a file.
        source: the registry package's text, unless `data` is given.
        data: a file in the set's own format.
        max_new_tokens: as LongBench for these sets.
    """

    name: str
    read: Callable[[Path], list[Question]]
    source: str
    data: str | Path | None = None
    max_new_tokens: int = 32
    metric = "f1"

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        path = locate(sources.get(self.source))[0] if self.data is None else Path(self.data)
        questions = self.read(path)
        idx = 0
        for question in random.Random(f"questions {seed}").sample(questions, len(questions)):
            if idx == num_samples:
                return
            rng = random.Random(f"{question.question_id} {seed}")
            strangers = (rng.choice(questions) for _ in itertools.count())
            sample = self._sample(tokenizer, question, strangers, rng, num_tokens, idx)
            if sample is not None:
                yield sample
                idx += 1
        if num_samples > 0 and idx == 0:
            raise UsageError(f"num_tokens: none of {len(questions)} questions fits {num_tokens} tokens")

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`f1` and `exact_match` of the text against the best reference; `contained`: one of them is in it;
        `answer_logprob`: per token of the first reference.
        """
        answer, references = output.text.strip(), sample.references
        return {
            "f1": best(word_f1, answer, references),
            "exact_match": best(exact_match, answer, references),
            "contained": max(contained(answer, [reference]) for reference in references),
            # A small model rarely words the answer as asked; the probability of the right one tells more.
            "answer_logprob": sum(output.logprobs[0]) / len(output.logprobs[0]),
        }

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)

    def _sample(
        self,
        tokenizer: PreTrainedTokenizerBase,
        question: Question,
        strangers: Iterator[Question],
        rng: random.Random,
        num_tokens: int,
        idx: int,
    ) -> Sample | None:
        message = f"{_INSTRUCTION}\n\n{MARK}Question: {question.question}"
        head, tail = around(tokenizer, message, "Answer:", joint="\n")
        gold = [encode(tokenizer, f"{text}\n\n") for text in question.gold]
        size = num_tokens - len(head) - len(tail) - sum(map(len, gold))
        if size < 0 or not gold:
            return None
        # Paragraphs of other questions fill up, each once.
        known = {*question.gold, *question.others}
        texts = itertools.chain(rng.sample(question.others, len(question.others)), _fresh(strangers, known))
        filler = take((encode(tokenizer, f"{text}\n\n") for text in texts), size)
        order = rng.sample(range(len(gold) + len(filler)), len(gold) + len(filler))
        tokens: list[int] = list(head)
        spans = [[0, 0]] * len(gold)
        for piece in order:
            if piece < len(gold):
                spans[piece] = [len(tokens), len(tokens) + len(gold[piece])]
            tokens += (gold + filler)[piece]
        return Sample(
            sample_id=f"{self.name}-{num_tokens}-{idx}",
            prompt_ids=(*tokens, *tail),
            num_dense=len(tokens),
            max_new_tokens=self.max_new_tokens,
            continuations=(tuple(encode(tokenizer, f" {question.answers[0]}")),),
            references=question.answers,
            details={
                "question_id": question.question_id,
                "num_paragraphs": len(gold) + len(filler),
                "spans": spans,
            },
        )


def _fresh(questions: Iterator[Question], known: set[str]) -> Iterator[str]:
    """Paragraphs of other questions, none twice; ends when a thousand in a row bring nothing new."""
    idle = 0
    for question in questions:
        fresh = [text for text in (*question.gold, *question.others) if text not in known]
        known.update(fresh)
        yield from fresh
        idle = 0 if fresh else idle + 1
        if idle == 1000:
            return
