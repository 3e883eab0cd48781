"""Rows as Markdown for people and as CSV for programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyserve.eval.rows import Row
from tinyserve.eval.statistics import Interval

__all__ = ["markdown", "write_csv", "write_markdown"]

_MEASURES = (
    "recall",
    "oracle_recall",
    "recall_of_oracle",
    "hit_rate",
    "reuse_rate",
    "tokens_attended",
    "kv_bytes",
    "summary_bytes",
    "kv_bytes_held",
    "attention_ms",
)
_NOTES = " ".join(
    (
        "Brackets: 95 % bootstrap interval over the samples (paired for differences).",
        "vs dense: value minus that of the full cache on the same samples.",
        "regret: how much worse than the oracle of the same budget and page size.",
        "recall: share of the attention mass on what was read; of oracle: the same over what as many of the",
        "best pages hold. hit: share of those best pages that were read.",
        "reuse: share of the pages of a step that the step before read.",
        "tokens: attended per step, layer and kv head, dense layers included.",
        "MB read: K, V and summaries of a step; MB held: pages at the end of the prompt.",
    )
)


def write_markdown(rows: Sequence[Row], path: Path, *, title: str, command: str) -> None:
    """One table per task and length, with notes and where the numbers come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n```\n{command}\n```\n\n{markdown(rows)}\n", encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """Tables of all tasks and lengths, as text."""
    parts = []
    for task, num_tokens in dict.fromkeys((row.task, row.num_tokens) for row in rows):
        own = [row for row in rows if (row.task, row.num_tokens) == (task, num_tokens)]
        parts.append(f"## {task}, {num_tokens} tokens\n\n{_table(own)}")
    commits = dict.fromkeys(commit for row in rows for commit in row.commits)
    machines = dict.fromkeys(machine for row in rows for machine in row.machines)
    source = f"Commit {', '.join(commits)}. {'; '.join(machines)}."
    return "\n\n".join([*parts, _NOTES, source]) if parts else "No results."


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows with plain numbers; an empty cell where there is none."""
    header = ["task", "num_tokens", "label", "policy", "page_size", "token_budget", "keep_ratio", "scorer"]
    header += ["group_reduction", "dense_layers", "kv_dtype", "staged", "budget_tokens", "num_samples"]
    header += ["num_failed", "metric"]
    for name in ("value", "against_dense", "regret"):
        header += [name, f"{name}_low", f"{name}_high"]
    header += [*_MEASURES, "summary", "compared", "method", "machines", "commits"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows({name: cell for name, cell in _cells(row).items() if name in header} for row in rows)


def _cells(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {**row.method, **row.measures, **vars(row)}
    for name in ("value", "against_dense", "regret"):
        interval: Interval | None = getattr(row, name)
        if interval is None:
            cells[name] = None
        else:
            values = interval.value, interval.low, interval.high
            cells |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
    for name in ("summary", "compared", "method"):
        cells[name] = json.dumps(getattr(row, name))
    cells["machines"], cells["commits"] = "; ".join(row.machines), " ".join(row.commits)
    return cells


def _table(rows: Sequence[Row]) -> str:
    compared = list(dict.fromkeys(name for row in rows for name in row.compared))
    titles = ["method", "n", rows[0].metric, "vs dense", "regret", *compared, "recall", "of oracle", "hit"]
    titles += ["reuse", "tokens", "MB read", "MB held", "attention ms"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "--:|" * (len(titles) - 1)]
    lines += [f"| {' | '.join(_line(row, compared))} |" for row in rows]
    return "\n".join(lines)


def _line(row: Row, compared: Sequence[str]) -> list[str]:
    measures = row.measures
    counts = f"{row.num_samples}" + (f" ({row.num_failed} failed)" if row.num_failed else "")
    kv_bytes, summary_bytes = measures.get("kv_bytes"), measures.get("summary_bytes")
    read = None if kv_bytes is None or summary_bytes is None else kv_bytes + summary_bytes
    return [
        row.label,
        counts,
        _interval(row.value),
        _interval(row.against_dense, signed=True),
        _interval(row.regret, signed=True),
        *(_number(row.compared.get(name), ".3f") for name in compared),
        _number(measures.get("recall"), ".3f"),
        _number(measures.get("recall_of_oracle"), ".3f"),
        _number(measures.get("hit_rate"), ".2f"),
        _number(measures.get("reuse_rate"), ".2f"),
        _number(measures.get("tokens_attended"), ".0f"),
        _megabytes(read),
        _megabytes(measures.get("kv_bytes_held")),
        _number(measures.get("attention_ms"), ".1f"),
    ]


def _interval(interval: Interval | None, *, signed: bool = False) -> str:
    if interval is None:
        return ""
    form = "+.3f" if signed else ".3f"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.2f}"
