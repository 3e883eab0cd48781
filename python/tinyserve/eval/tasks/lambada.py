"""LAMBADA-style: the last word of a passage, which takes more than the last sentence to guess.

After Paperno et al., arXiv 1606.06031. No registry package ships LAMBADA, so passages are picked from long
texts by a rule; the text before a passage goes in front of it, up to the asked length. A file of the
original works as well (JSON lines with "text"). Other than LAMBADA's, picked passages were not checked by
people.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.eval.corpora import Document, load, read_json_lines
from tinyserve.eval.samples import Output, Sample
from tinyserve.haystack import encode, encode_long, start_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Lambada", "Passage", "find_passages"]

_SENTENCE = re.compile(r"\S.*?[.!?][\"')\]]*(?=\s|$)", re.DOTALL)
_LAST_WORD = re.compile(r"[A-Za-z]{4,}(?=[.!?]$)")
_FUNCTION = """
about above after again against also although among another because been before behind being below beneath
beside between beyond both cannot could does doing done down during each either else even ever every from
further have having here hers herself himself however into itself just less like made make many might mine
more most much must myself neither never none only onto other others ought ours ourselves over perhaps quite
rather same shall should since some still such than that their theirs them themselves then there these they
this those though through thus together toward towards under until unto upon very were what whatever when
where whether which while whom whose will with within without would your yours yourself
"""
_FUNCTION_WORDS = frozenset(_FUNCTION.split())
_WORDS = (50, 110)
_SENTENCES = (2, 7)
_DISTANCE = 12


@dataclass(frozen=True)
class Passage:
    """`before` + `last_sentence` + " " + `word` is the passage; `context` is the text in front of it."""

    context: str
    before: str
    last_sentence: str
    word: str


@dataclass(frozen=True, kw_only=True)
class Lambada:
    """Passages in random order; the last sentence goes one token at a time, and so does the word.

    Attributes:
        text: corpus or path to pick passages from.
        data: a file of LAMBADA passages instead; they stand alone, so prompts are shorter than asked.
    """

    name: str
    text: str | Path = "wikipedia"
    data: str | Path | None = None
    metric = "accuracy"

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, num_tokens: int, seed: int
    ) -> Iterator[Sample]:
        if self.data is None:
            passages = [passage for document in load(self.text) for passage in find_passages(document)]
        else:
            rows = read_json_lines(Path(self.data), {"text": str})
            passages = [split_passage("", row["text"].strip()) for row in rows]
        idx = 0
        for passage in random.Random(f"passages {seed}").sample(passages, len(passages)):
            if idx == num_samples:
                return
            prompt = self._prompt(tokenizer, passage, num_tokens)
            if prompt is None:
                continue
            dense, fed = prompt
            yield Sample(
                sample_id=f"{self.name}-{num_tokens}-{idx}",
                prompt_ids=(*dense, *fed),
                num_dense=len(dense),
                continuations=(tuple(encode(tokenizer, f" {passage.word}")),),
                references=(passage.word,),
            )
            idx += 1
        if num_samples > 0 and idx == 0:
            raise UsageError(f"num_tokens: none of {len(passages)} passages fits {num_tokens} tokens")

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """`accuracy`: the word is the most probable continuation; `logprob`: of the whole word."""
        return {"accuracy": float(output.greedy[0]), "logprob": sum(output.logprobs[0])}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        """Means, and `perplexity` per word."""
        if not scores:
            raise ValueError("scores: expected at least one, got none")
        logprob = sum(score["logprob"] for score in scores) / len(scores)
        accuracy = sum(score["accuracy"] for score in scores) / len(scores)
        return {"accuracy": accuracy, "logprob": logprob, "perplexity": math.exp(-logprob)}

    def _prompt(
        self, tokenizer: PreTrainedTokenizerBase, passage: Passage, num_tokens: int
    ) -> tuple[list[int], list[int]] | None:
        """Tokens before the last sentence and of it; None where the text is too long or too short."""
        start = start_ids(tokenizer)
        fed = encode(tokenizer, passage.last_sentence)
        before = encode(tokenizer, passage.before)
        missing = num_tokens - len(start) - len(before) - len(fed)
        if missing < 0 or not fed:
            return None
        if self.data is not None:
            return start + before, fed
        context = encode_long(tokenizer, passage.context)
        if len(context) < missing:
            return None
        return start + context[len(context) - missing :] + before, fed


def find_passages(document: Document) -> list[Passage]:
    """The passages of a text: 2 to 7 sentences of one paragraph, 50 to 110 words, whose last word has at
    least four letters, is no function word, and stands in the passage before, 12 or more words earlier. At
    most one passage ends at a sentence, the shortest.
    """
    passages = []
    for paragraph in re.finditer(r"\S.*?(?=\n\s*\n|\s*$)", document.text, re.DOTALL):
        sentences = [match.span() for match in _SENTENCE.finditer(paragraph[0])]
        for last, (_, end) in enumerate(sentences):
            for first in range(last - _SENTENCES[0] + 1, max(-1, last - _SENTENCES[1]), -1):
                if first < 0:
                    break
                begin = sentences[first][0]
                passage = " ".join(paragraph[0][begin:end].split())
                if _is_passage(passage):
                    context = document.text[: paragraph.start() + begin]
                    passages.append(split_passage(context, passage))
                    break
    return passages


def split_passage(context: str, passage: str) -> Passage:
    """Cuts off the last word, with the punctuation behind it, and the sentence it stands in."""
    bare = re.sub(r"[^\w]+$", "", passage)
    body, _, word = bare.rpartition(" ")
    starts = [match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+", body)]
    cut = len(body[: starts[-1]].rstrip()) if starts else 0
    return Passage(context, body[:cut], body[cut:], word)


def _is_passage(text: str) -> bool:
    last = _LAST_WORD.search(text)
    if last is None or last[0].lower() in _FUNCTION_WORDS:
        return False
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", text)]
    if not _WORDS[0] <= len(words) <= _WORDS[1]:
        return False
    return last[0].lower() in words[: len(words) - _DISTANCE]
