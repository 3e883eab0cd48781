"""LongBench's English tasks from a local folder of its JSON lines; no registry package ships them.

After Bai et al., arXiv 2308.14508. Generation lengths, cut-off and scores are LongBench's. The prompts are
worded here, so compare policies with each other, not with published tables; for these there is the lm-eval
adapter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.metrics import best, means, rouge_l, word_f1
from tinyserve.eval.questions import LongBenchItem, read_longbench
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import MARK, around, encode_long

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LONGBENCH", "Format", "LongBench"]


@dataclass(frozen=True)
class Format:
    """How one of LongBench's sets is asked and scored.

    Attributes:
        message: the prompt, with the mark for the context and `{question}`.
        answer_start: what stands at the end of the prompt.
        chat: asked through the chat template, if there is one. A set with solved examples is plain text.
        first_line: only the first line of the answer counts.
        metric: name and measure against one reference.
    """

    message: str
    answer_start: str
    max_new_tokens: int
    chat: bool = True
    first_line: bool = False
    metric: tuple[str, Callable[[str, str], float]] = ("f1", word_f1)


_BRIEF = "Give the answer alone, as briefly as possible, without an explanation."

LONGBENCH: dict[str, Format] = {
    "hotpotqa": Format(
        f"Answer the question from the passages. {_BRIEF}\n\n{MARK}\n\n{_BRIEF}\n\nQuestion: {{question}}",
        "Answer:",
        32,
    ),
    "narrativeqa": Format(
        f"Answer a question about a story. {_BRIEF}\n\nStory: {MARK}\n\n{_BRIEF}\n\nQuestion: {{question}}",
        "Answer:",
        128,
    ),
    "qasper": Format(
        f"Answer a question about a scientific article. {_BRIEF} Answer yes or no where the question allows "
        f'it, and "unanswerable" where the article does not tell.\n\nArticle: {MARK}\n\n{_BRIEF}\n\n'
        "Question: {question}",
        "Answer:",
        128,
    ),
    "triviaqa": Format(
        f"Answer the question from the passage. {_BRIEF} Some examples come first.\n\n{MARK}\n\n{{question}}",
        "",
        32,
        chat=False,
        first_line=True,
    ),
    "gov_report": Format(
        f"Sum up a report of a government agency on one page.\n\nReport:\n{MARK}\n\nNow sum the report up.",
        "Summary:",
        512,
        metric=("rouge_l", rouge_l),
    ),
}


@dataclass(frozen=True, kw_only=True)
class LongBench:
    """Items in random order. A context that is too long loses its middle, so prompts have at most
    `num_tokens` tokens.

    Attributes:
        dataset: a key of `LONGBENCH`.
        data: a folder with `<dataset>.jsonl`, or that file.
    """

    name: str
    dataset: str
    data: str | Path | None = None

    def __post_init__(self) -> None:
        if self.dataset not in LONGBENCH:
            raise UsageError(f"dataset: expected one of {', '.join(LONGBENCH)}, got {self.dataset!r}")
        if self.data is None:
            raise UsageError(
                f"{self.name}: expected data, a folder with LongBench's {self.dataset}.jsonl (in no package)"
            )

    @property
    def metric(self) -> str:
        return LONGBENCH[self.dataset].metric[0]

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        assert self.data is not None
        items = read_longbench(Path(self.data), self.dataset)
        chosen = random.Random(f"items {seed}").sample(items, len(items))[:num_samples]
        for idx, item in enumerate(chosen):
            yield self._sample(tokenizer, item, num_tokens, idx)

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """The set's measure against the reference that suits best."""
        form = LONGBENCH[self.dataset]
        answer = output.text.lstrip("\n").split("\n")[0] if form.first_line else output.text
        name, measure = form.metric
        return {name: best(measure, answer, sample.references)}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return means(scores)

    def _sample(
        self, tokenizer: PreTrainedTokenizerBase, item: LongBenchItem, num_tokens: int, idx: int
    ) -> Sample:
        form = LONGBENCH[self.dataset]
        message = form.message.replace("{question}", item.question)
        joint = "\n\n" if form.answer_start else ""
        head, tail = around(tokenizer, message, form.answer_start, chat=form.chat, joint=joint)
        context = encode_long(tokenizer, item.context)
        size = num_tokens - len(head) - len(tail)
        if size < 2:
            raise UsageError(
                f"num_tokens: expected at least {len(head) + len(tail) + 2} for instruction and question, "
                f"got {num_tokens}"
            )
        if len(context) > size:
            context = context[: size // 2] + context[len(context) - (size - size // 2) :]
        return Sample(
            sample_id=f"{self.name}-{num_tokens}-{item.item_id}",
            prompt_ids=(*head, *context, *tail),
            num_dense=len(head) + len(context),
            max_new_tokens=form.max_new_tokens,
            references=item.answers,
            details={"item_id": item.item_id},
        )
