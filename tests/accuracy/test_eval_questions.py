"""Readers of question sets, on whole and on damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up_texts as made
import pytest

from tinyserve.errors import SetupError
from tinyserve.eval.questions import read_hotpotqa, read_longbench, read_mmlu, read_squad


def test_paragraphs_of_supporting_facts_are_gold(tmp_path: Path) -> None:
    questions = read_hotpotqa(made.write_hotpotqa(tmp_path / "hotpotqa.json"))
    assert len(questions) == 12
    third = questions[3]
    assert (third.question_id, third.question) == ("id3", f"Which {made.words()[3]} is it?")
    assert third.answers == (made.words()[103],)
    assert third.gold == tuple(
        f"Title 3 {place}:  Sentence one of Title 3 {place}. Another." for place in (2, 7)
    )
    assert len(third.others) == 8
    assert not set(third.gold) & set(third.others)


def test_unanswerable_questions_of_squad_are_left_out(tmp_path: Path) -> None:
    questions = read_squad(made.write_squad(tmp_path / "squad.json"))
    assert len(questions) == 20
    first = questions[0]
    assert first.question == f"What is {made.words()[0]}?"
    assert first.answers == ("one two", "two")
    assert first.gold == (made.text(1000, 1).strip(),)
    assert first.others == tuple(made.text(1000 + place, 1).strip() for place in range(1, 5))


def test_multiple_choice_knows_its_letter(tmp_path: Path) -> None:
    choices = read_mmlu(made.write_mmlu(tmp_path / "mmlu.jsonl"))
    assert [choice.answer for choice in choices[:5]] == [0, 1, 2, 3, 0]
    assert choices[1].text.endswith("\nD. four\nAnswer:")


def test_longbench_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = made.write_longbench(tmp_path, "qasper")
    items = read_longbench(folder, "qasper")
    assert items == read_longbench(folder / "qasper.jsonl", "qasper")
    assert [item.item_id for item in items] == [f"qasper{idx}" for idx in range(6)]
    assert items[2].context == made.text(2002, 1)
    assert items[2].question == f"What about {made.words()[2]}?"
    with pytest.raises(SetupError, match=r"cannot read .*gov_report\.jsonl"):
        read_longbench(folder, "gov_report")


Reader = Callable[[Path], Any]
GOOD_MMLU = {"question": "Q\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", "answer": "A"}
GOOD_ITEM = {"input": "", "context": "text", "answers": ["yes"]}


def longbench(path: Path) -> Any:
    return read_longbench(path, "qasper")


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_hotpotqa, "[{", "expected JSON"),
        (read_hotpotqa, '{"data": []}', "expected a JSON list, got dict"),
        (read_hotpotqa, '[{"_id": 1}]', r"question 0: KeyError: 'supporting_facts'"),
        (
            read_hotpotqa,
            json.dumps([{"_id": 1, "question": "q", "answer": 7, "supporting_facts": [], "context": []}]),
            "question 0: ValueError: expected a text, got 7",
        ),
        (read_squad, "[]", "expected a JSON dict, got list"),
        (read_squad, '{"version": 2}', "expected SQuAD's 'data' with answered questions, found none"),
        (read_squad, '{"data": [{"paragraphs": [{"context": "x"}]}]}', "article 0: KeyError: 'qas'"),
        (read_squad, '{"data": [{"paragraphs": 3}]}', "article 0: TypeError"),
        (read_mmlu, '{"question": "Q"}', r"line 1: expected an object with 'answer'"),
        (read_mmlu, json.dumps(GOOD_MMLU) + "\nnot json", r"line 2: expected a JSON object, got 'not json'"),
        (read_mmlu, "[1, 2]", "line 1: expected an object with 'question'"),
        (read_mmlu, json.dumps({**GOOD_MMLU, "answer": "E"}), "question 1: expected options A to D"),
        (read_mmlu, json.dumps({**GOOD_MMLU, "answer": ""}), "question 1: expected options A to D"),
        (
            read_mmlu,
            json.dumps({**GOOD_MMLU, "question": "Q\nA. 1\nAnswer:"}),
            "question 1: expected options A to D",
        ),
        (longbench, "", "expected at least one item, found none"),
        (longbench, json.dumps({**GOOD_ITEM, "answers": "yes"}), "expected an object with 'answers'"),
        (longbench, json.dumps({**GOOD_ITEM, "answers": []}), "item 0: ValueError: no answers"),
        (longbench, json.dumps({**GOOD_ITEM, "answers": [None]}), "item 0: ValueError: expected a text"),
        (
            longbench,
            json.dumps({**GOOD_ITEM, "context": " "}),
            "item 0: ValueError: no answers or no context",
        ),
    ],
)
def test_a_damaged_file_is_named_with_the_place(
    read: Reader, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(content)
    with pytest.raises(SetupError, match=rf"damaged\.json.*{message}"):
        read(path)


@pytest.mark.parametrize("read", [read_hotpotqa, read_squad, read_mmlu, longbench])
def test_a_missing_or_binary_file_is_named(read: Reader, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read .*nothing\.json"):
        read(tmp_path / "nothing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SetupError, match=r"cannot read .*binary\.json"):
        read(tmp_path / "binary.json")
