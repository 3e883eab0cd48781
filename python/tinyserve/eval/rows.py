"""Records become rows: one per task, length and method, with intervals and with what it lost against dense
and against the oracle.

Two methods are compared on the samples that both finished, and only on those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tinyserve.eval.results import Record, is_failure
from tinyserve.eval.samples import Task
from tinyserve.eval.statistics import Interval, Scores, bootstrap, paired_bootstrap
from tinyserve_ops.policies import FullCache, Oracle

__all__ = ["LOWER_IS_BETTER", "Row", "make_rows"]

# Headline metrics that get better as they fall.
LOWER_IS_BETTER = frozenset({"perplexity", "nll", "bits_per_token", "bits_per_byte", "bits_per_character"})
# What an oracle must have in common with a method to be its ceiling.
_BUDGET = ("token_budget", "keep_ratio", "page_size", "dense_layers", "kv_dtype")


@dataclass(frozen=True)
class Row:
    """One method on one task and length.

    Attributes:
        method: `Method.facts`.
        num_samples, num_failed: that count, and that did not get through.
        metric, value: the headline metric; `value` None where nothing got through.
        against_dense: value minus that of the full cache, on the same samples.
        summary: all that the task sums up, `metric` among it.
        compared: what the task says about the method beside the full cache (`Task.compare`).
        regret: how much worse than the oracle of the same budget and page size, on the same samples; above 0
            is worse, whichever way the metric goes.
        measures: means over the samples, of `mean_measures`, `kv_bytes_held` and `attention_ms`.
        machines, commits: all that the records were made on and with.
    """

    task: str
    num_tokens: int
    label: str
    policy: str
    method: dict[str, Any]
    budget_tokens: int | None
    num_samples: int
    num_failed: int
    metric: str
    value: Interval | None
    against_dense: Interval | None
    regret: Interval | None
    summary: dict[str, float]
    compared: dict[str, float]
    measures: dict[str, float | None]
    machines: tuple[str, ...]
    commits: tuple[str, ...]

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER


def make_rows(
    records: Iterable[Record], tasks: Mapping[str, Task], *, only_solved: bool = False
) -> list[Row]:
    """Rows of all tasks in `tasks`, in the order of the records.

    Args:
        only_solved: only samples on which the full cache reaches the best score, 1 (for retrieval from text
            in which the model itself gets lost).
    """
    groups: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for record in records:
        if record["task"] in tasks:
            of_task = groups.setdefault((record["task"], record["num_tokens"]), {})
            of_task.setdefault(json.dumps(record["method"], sort_keys=True), []).append(record)
    rows = []
    for (name, _), by_method in groups.items():
        columns = [_Column(of_method) for of_method in by_method.values()]
        rows += _rows_of_task(tasks[name], columns, only_solved)
    return rows


class _Column:
    """All records of one method on one task and length."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.first = records[0]
        self.method: dict[str, Any] = self.first["method"]
        self.failed = [record for record in records if is_failure(record)]
        self.finished = {
            (record["sample_id"], record["sample_sha256"]): record
            for record in records
            if not is_failure(record)
        }

    def keep(self, samples: set[tuple[str, str]]) -> None:
        self.finished = {key: record for key, record in self.finished.items() if key in samples}

    def scores(self, keys: Iterable[tuple[str, str]]) -> list[Scores]:
        return [self.finished[key]["scores"] for key in keys]


def _rows_of_task(task: Task, columns: list[_Column], only_solved: bool) -> list[Row]:
    def statistic(scores: Sequence[Scores]) -> float:
        return task.summary(scores)[task.metric]

    dense = next((column for column in columns if column.method["policy"] == FullCache.name), None)
    if only_solved:
        solved = set() if dense is None else {k for k in dense.finished if statistic(dense.scores([k])) >= 1}
        for column in columns:
            column.keep(solved)
    rows = []
    for column in columns:
        oracle = next((other for other in columns if _is_oracle_of(other.method, column.method)), None)
        sign = 1.0 if task.metric in LOWER_IS_BETTER else -1.0
        rows.append(
            Row(
                task=task.name,
                num_tokens=column.first["num_tokens"],
                label=column.first["label"],
                policy=column.method["policy"],
                method=column.method,
                budget_tokens=_largest(column, "budget_tokens"),
                num_samples=len(column.finished),
                num_failed=len(column.failed),
                metric=task.metric,
                value=bootstrap(column.scores(column.finished), statistic) if column.finished else None,
                against_dense=_difference(column, dense, statistic),
                regret=_scaled(_difference(column, oracle, statistic), sign),
                summary=task.summary(column.scores(column.finished)) if column.finished else {},
                compared=_compared(task, column, dense),
                measures=_mean_measures(list(column.finished.values())),
                machines=_distinct(column, "machine"),
                commits=_distinct(column, "commit"),
            )
        )
    return rows


def _is_oracle_of(other: dict[str, Any], method: dict[str, Any]) -> bool:
    if other["policy"] != Oracle.name or method["policy"] in (Oracle.name, FullCache.name):
        return False
    return all(other[name] == method[name] for name in _BUDGET)


def _difference(
    column: _Column, other: _Column | None, statistic: Callable[[Sequence[Scores]], float]
) -> Interval | None:
    if other is None or other is column:
        return None
    keys = [key for key in column.finished if key in other.finished]
    return paired_bootstrap(column.scores(keys), other.scores(keys), statistic) if keys else None


def _compared(task: Task, column: _Column, dense: _Column | None) -> dict[str, float]:
    compare = getattr(task, "compare", None)
    if compare is None or dense is None or dense is column:
        return {}
    keys = [key for key in column.finished if key in dense.finished]
    found: dict[str, float] = compare(dense.scores(keys), column.scores(keys)) if keys else {}
    return found


def _scaled(interval: Interval | None, sign: float) -> Interval | None:
    if interval is None or sign > 0:
        return interval
    return Interval(0.0 - interval.value, 0.0 - interval.high, 0.0 - interval.low)  # no -0.0


def _mean_measures(records: Sequence[Record]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    beside = ("kv_bytes_held", "attention_ms")
    rows = [{**record["measures"], **{name: record[name] for name in beside}} for record in records]
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows if row[name] is not None]
        means[name] = fmean(values) if values else None
    return means


def _largest(column: _Column, name: str) -> int | None:
    return max((record[name] for record in column.finished.values()), default=None)


def _distinct(column: _Column, name: str) -> tuple[str, ...]:
    records = [*column.finished.values(), *column.failed]
    return tuple(dict.fromkeys(str(record[name]) for record in records))
