"""Readers of question sets: HotpotQA, SQuAD, MMLU, and files in LongBench's layout.

They check what they read, so that a damaged file is named and not scored.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyserve.errors import SetupError
from tinyserve.eval.corpora import read_json_lines, read_text

__all__ = [
    "Choice",
    "LongBenchItem",
    "Question",
    "read_hotpotqa",
    "read_longbench",
    "read_mmlu",
    "read_squad",
]

_CHOICES = re.compile(r"\A(.+?)\nA\. (.*)\nB\. (.*)\nC\. (.*)\nD\. (.*)\nAnswer:\Z", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question over paragraphs.

    Attributes:
        gold: the paragraphs that hold the answer.
        others: paragraphs that belong to the question and do not.
    """

    question_id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """A question with four options; `text` ends in "Answer:"."""

    text: str
    answer: int


@dataclass(frozen=True)
class LongBenchItem:
    """`question` is empty where the task is to sum up."""

    item_id: str
    context: str
    question: str
    answers: tuple[str, ...]


def read_hotpotqa(path: Path) -> list[Question]:
    """HotpotQA's own format (distractor setting).

    Raises:
        SetupError: the file is missing, damaged, or of another format.
    """
    questions = []
    for number, row in enumerate(_json(path, list)):
        with _named(path, f"question {number}"):
            titles = {title for title, _ in row["supporting_facts"]}
            paragraphs = [(title, f"{title}: {''.join(sentences)}") for title, sentences in row["context"]]
            questions.append(
                Question(
                    question_id=str(row["_id"]),
                    question=_string(row["question"]),
                    answers=(_string(row["answer"]),),
                    gold=tuple(text for title, text in paragraphs if title in titles),
                    others=tuple(text for title, text in paragraphs if title not in titles),
                )
            )
    return questions


def read_squad(path: Path) -> list[Question]:
    """SQuAD's format; questions without an answer are left out. The others of a question are the other
    paragraphs of its article.

    Raises:
        SetupError: the file is missing, damaged, or of another format.
    """
    questions = []
    for number, article in enumerate(_json(path, dict).get("data", ())):
        with _named(path, f"article {number}"):
            texts = [_string(paragraph["context"]) for paragraph in article["paragraphs"]]
            for place, paragraph in enumerate(article["paragraphs"]):
                others = tuple(texts[:place] + texts[place + 1 :])
                for row in paragraph["qas"]:
                    answers = dict.fromkeys(_string(answer["text"]) for answer in row["answers"])
                    if answers:
                        asked = _string(row["question"]).strip()
                        questions.append(
                            Question(str(row["id"]), asked, tuple(answers), (texts[place],), others)
                        )
    if not questions:
        raise SetupError(f"{path}: expected SQuAD's 'data' with answered questions, found none")
    return questions


def read_mmlu(path: Path) -> list[Choice]:
    """JSON lines of `question`, which lists the options A to D and ends in "Answer:", and `answer`, a letter.

    Raises:
        SetupError: the file is missing, damaged, or of another format.
    """
    choices = []
    for number, row in enumerate(read_json_lines(path, {"question": str, "answer": str}), 1):
        answer = "ABCD".find(row["answer"])
        if len(row["answer"]) != 1 or answer < 0 or _CHOICES.match(row["question"]) is None:
            raise SetupError(
                f"{path}, question {number}: expected options A to D, 'Answer:' at the end and a letter as "
                f"answer, got {row['question'][-40:]!r} and {row['answer']!r}"
            )
        choices.append(Choice(row["question"], answer))
    return choices


def read_longbench(data: Path, name: str) -> list[LongBenchItem]:
    """LongBench's format: JSON lines of `input`, `context`, `answers`.

    Args:
        data: the file, or a folder with `<name>.jsonl` in it.

    Raises:
        SetupError: the file is missing, damaged, empty, or of another format.
    """
    path = data / f"{name}.jsonl" if data.is_dir() else data
    rows = read_json_lines(path, {"input": str, "context": str, "answers": list})
    items = []
    for number, row in enumerate(rows):
        with _named(path, f"item {number}"):
            answers = tuple(_string(answer) for answer in row["answers"])
            if not answers or not row["context"].strip():
                raise ValueError("no answers or no context")
            items.append(LongBenchItem(str(row.get("_id", number)), row["context"], row["input"], answers))
    if not items:
        raise SetupError(f"{path}: expected at least one item, found none")
    return items


def _json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise SetupError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, kind):
        raise SetupError(f"{path}: expected a JSON {kind.__name__}, got {type(content).__name__}")
    return content


def _string(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a text, got {value!r}")
    return value


@contextlib.contextmanager
def _named(path: Path, place: str) -> Iterator[None]:
    """Turns what goes wrong inside into a SetupError that names the file and the place."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SetupError(f"{path}, {place}: {type(error).__name__}: {error}") from error
