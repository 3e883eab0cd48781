"""Rows, tables and CSV from records whose numbers are known beforehand."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab import SMALL, ScoreTask

from tinyserve.eval.methods import Method, full_cache
from tinyserve.eval.results import Record
from tinyserve.eval.rows import Row, make_rows
from tinyserve.eval.tables import markdown, write_csv, write_markdown

DENSE, SPARSE = full_cache(SMALL), Method(config=SMALL)
ORACLE_FACTS = {**SPARSE.facts, "policy": "oracle"}


class Found:
    """1 where the sample was solved; compares by equality."""

    name, metric = "found", "accuracy"

    def score(self, sample: Any, output: Any) -> dict[str, float]:
        raise NotImplementedError

    def samples(self, tokenizer: Any, **sizes: Any) -> Any:
        raise NotImplementedError

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return {"accuracy": sum(score["found"] for score in scores) / len(scores), "n": float(len(scores))}

    def compare(
        self, dense: Sequence[dict[str, float]], scores: Sequence[dict[str, float]]
    ) -> dict[str, float]:
        return {"agreement": sum(a == b for a, b in zip(dense, scores, strict=True)) / len(scores)}


def record(
    task: str, sample: int, method: dict[str, Any], scores: dict[str, float] | None, **changes: Any
) -> Record:
    facts = {
        "model_sha256": "m",
        "task": task,
        "sample_id": str(sample),
        "sample_sha256": f"s{sample}",
        "method": method,
        "label": f"{method['policy']} x",
        "num_tokens": 100,
        "machine": "a machine",
        "commit": "abc",
    }
    if scores is None:
        return {**facts, "error": "ValueError: no", **changes}
    measures = {"recall": 0.5, "recall_of_oracle": 0.9, "kv_bytes": 2e6, "summary_bytes": 5e5}
    names = ("oracle_recall", "hit_rate", "reuse_rate", "tokens_attended")
    return {
        **facts,
        "budget_tokens": 48,
        "scores": scores,
        "measures": {**measures, **dict.fromkeys(names)},
        "kv_bytes_held": 7_000_000,
        "attention_ms": 3.0,
        **changes,
    }


def rows_of(records: list[Record], task: Any, **options: Any) -> dict[str, Row]:
    return {row.policy: row for row in make_rows(records, {task.name: task}, **options)}


def found_records(values: dict[str, list[int]]) -> list[Record]:
    methods = {"full_cache": DENSE.facts, "query_aware": SPARSE.facts, "oracle": ORACLE_FACTS}
    return [
        record("found", index, methods[policy], {"found": float(value)})
        for policy, column in values.items()
        for index, value in enumerate(column)
    ]


DENSE_FOUND = [1, 1, 1, 1, 0, 1, 1, 1, 0, 1]
SPARSE_FOUND = [1, 0, 0, 1, 0, 1, 1, 0, 1, 1]
ORACLE_FOUND = [1, 1, 1, 1, 0, 1, 1, 0, 0, 1]
ALL = {"full_cache": DENSE_FOUND, "query_aware": SPARSE_FOUND, "oracle": ORACLE_FOUND}


def test_differences_are_paired_by_sample() -> None:
    row = rows_of(found_records(ALL), Found())["query_aware"]
    assert (row.num_samples, row.num_failed) == (10, 0)
    assert row.value is not None
    assert row.against_dense is not None
    assert row.regret is not None
    assert row.value.value == pytest.approx(0.6)
    assert row.against_dense.value == pytest.approx(-0.2)
    assert row.regret.value == pytest.approx(0.1)
    assert row.regret.low <= 0.1 <= row.regret.high
    assert row.compared == {"agreement": 0.6}
    assert row.summary == {"accuracy": pytest.approx(0.6), "n": 10}
    dense = rows_of(found_records(ALL), Found())["full_cache"]
    assert (dense.against_dense, dense.regret, dense.compared) == (None, None, {})


def test_only_samples_that_both_finished_are_compared() -> None:
    records = found_records({"full_cache": DENSE_FOUND, "query_aware": SPARSE_FOUND[:5]})
    records.append(record("found", 7, SPARSE.facts, None))
    row = rows_of(records, Found())["query_aware"]
    assert (row.num_samples, row.num_failed) == (5, 1)
    assert row.against_dense is not None
    assert row.against_dense.value == pytest.approx((2 - 4) / 5)


def test_samples_that_dense_does_not_solve_can_be_left_out() -> None:
    rows = rows_of(found_records(ALL), Found(), only_solved=True)
    assert {row.num_samples for row in rows.values()} == {8}
    assert [row.value.value for row in rows.values() if row.value] == pytest.approx([1.0, 5 / 8, 7 / 8])


def test_regret_is_positive_where_a_perplexity_is_higher_than_the_oracles() -> None:
    nll = {"full_cache": [1.0, 2.0], "query_aware": [1.5, 2.5], "oracle": [1.1, 2.1]}
    methods = {"full_cache": DENSE.facts, "query_aware": SPARSE.facts, "oracle": ORACLE_FACTS}
    records = [
        record("score", index, methods[policy], {"nll": value})
        for policy, column in nll.items()
        for index, value in enumerate(column)
    ]
    row = rows_of(records, ScoreTask())["query_aware"]
    assert row.lower_is_better
    assert row.regret is not None
    assert row.regret.value == pytest.approx(math.exp(2.0) - math.exp(1.6))
    assert row.regret.low > 0


@pytest.mark.parametrize("change", [{"token_budget": 56}, {"page_size": 4}, {"dense_layers": 2}])
def test_an_oracle_of_another_budget_is_no_ceiling(change: dict[str, int]) -> None:
    records = [
        record("found", 0, SPARSE.facts, {"found": 0.0}),
        record("found", 0, {**ORACLE_FACTS, **change}, {"found": 1.0}),
    ]
    assert rows_of(records, Found())["query_aware"].regret is None


def test_a_method_of_failures_only_has_a_row_without_numbers() -> None:
    row = rows_of([record("found", 0, SPARSE.facts, None)], Found())["query_aware"]
    assert (row.value, row.num_samples, row.num_failed, row.measures) == (None, 0, 1, {})
    assert "| query_aware x | 0 (1 failed) |  |" in markdown([row])


def test_the_markdown_names_command_machine_and_commit(tmp_path: Path) -> None:
    rows = make_rows(found_records(ALL), {"found": Found()})
    write_markdown(rows, tmp_path / "new" / "table.md", title="Some title", command="tinyserve eval found")
    text = (tmp_path / "new" / "table.md").read_text()
    assert text.startswith("# Some title\n\n```\ntinyserve eval found\n```\n\n## found, 100 tokens\n")
    assert "Commit abc. a machine." in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0].startswith("| method | n | accuracy | vs dense | regret | agreement | recall |")
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3].startswith("| query_aware x | 10 | 0.600 [0.300, 0.900] | -0.200 [")
    assert lines[3].endswith("| 0.600 | 0.500 | 0.900 |  |  |  | 2.50 | 7.00 | 3.0 |")


def test_the_csv_has_a_plain_number_in_every_cell(tmp_path: Path) -> None:
    write_csv(make_rows(found_records(ALL), {"found": Found()}), tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [row["policy"] for row in cells] == ["full_cache", "query_aware", "oracle"]
    sparse = cells[1]
    assert (float(sparse["value"]), float(sparse["against_dense"])) == pytest.approx((0.6, -0.2))
    assert float(sparse["value_low"]) < 0.6 < float(sparse["value_high"])
    assert (sparse["page_size"], sparse["token_budget"], sparse["keep_ratio"]) == ("8", "48", "")
    assert json.loads(sparse["method"]) == SPARSE.facts
    assert json.loads(sparse["compared"]) == {"agreement": 0.6}
    assert cells[0]["regret"] == ""
