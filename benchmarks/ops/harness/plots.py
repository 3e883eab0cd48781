"""Plots of a run's records, PNG and SVG: time against length, speed-up against budget, roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = dict[str, Any]

# Distinguishable with the common kinds of colour blindness (Okabe and Ito).
_BLACK, _ORANGE, _BLUE, _GREEN, _VERMILION, _PURPLE = (
    "#000000",
    "#e69f00",
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#cc79a7",
)
_DEFAULT_SCORER = "bounds"


def plot_all(records: list[Record], folder: Path) -> list[Path]:
    """Writes every plot that the records allow; returns the files."""
    written: list[Path] = []
    for shape in sorted({_shape(record) for record in records if "num_heads" in record}):
        of_shape = [record for record in records if _shape(record) == shape]
        name = shape.replace("/", "-")
        written += _save(_time_against_length(of_shape, shape), folder / f"time_against_length_{name}")
        written += _save(
            _speed_up_against_budget(of_shape, shape), folder / f"speed_up_against_budget_{name}"
        )
    written += _save(_roofline(records), folder / "roofline")
    return written


def _save(figure: Figure | None, stem: Path) -> list[Path]:
    if figure is None:
        return []
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return paths


def _shape(record: Record) -> str:
    return f"{record['num_heads']}/{record['num_kv_heads']}/{record['head_dim']}"


def _new_axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _is_cold_decode(record: Record) -> bool:
    return (
        record.get("point") == "sparse_decode, decode"
        and record["dtype"] == "bfloat16"
        and record["batch"] == 1
    )


def _default_sparse(record: Record) -> bool:
    return record["op"] == "sparse_decode" and record["scorer"] == _DEFAULT_SCORER


_LINES: tuple[tuple[str, str, str, Callable[[Record], bool]], ...] = (
    ("torch sdpa, best dtype", _PURPLE, "s", lambda r: r["op"] == "torch_sdpa"),
    ("torch bmm, best dtype", _ORANGE, "D", lambda r: r["op"] == "torch_bmm"),
    ("torch page selection, 0.3", _GREEN, "v", lambda r: r["op"] == "torch_selection"),
    ("ours, dense", _BLACK, "o", lambda r: r["op"] == "attend_pages"),
    ("ours, ratio 0.3", _VERMILION, "o", lambda r: _default_sparse(r) and r["budget"] == 0.3),
    ("ours, 2048 tokens", _BLUE, "o", lambda r: _default_sparse(r) and r["budget"] == 2048),
)


def _time_against_length(records: list[Record], shape: str) -> Figure | None:
    decode = [record for record in records if _is_cold_decode(record)]
    if len({record["length"] for record in decode}) < 2:
        return None
    figure, axes = _new_axes(
        f"One layer, one token, {shape}, bf16 pages, cold caches", "tokens cached", "milliseconds (median)"
    )
    for label, color, marker, belongs in _LINES:
        best: dict[int, float] = {}
        for record in filter(belongs, decode):
            best[record["length"]] = min(best.get(record["length"], float("inf")), record["median_us"] / 1e3)
        lengths = sorted(best)
        axes.plot(lengths, [best[n] for n in lengths], color=color, marker=marker, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({record["length"] for record in decode})
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.legend(fontsize=8, frameon=False)
    return figure


def _speed_up_against_budget(records: list[Record], shape: str) -> Figure | None:
    rows = [r for r in records if r.get("point") == "sparse_decode, budgets" and r["op"] == "sparse_decode"]
    rows = sorted(rows, key=lambda record: record["budget_pages"])
    if len(rows) < 2:
        return None
    first = rows[0]
    scoring = f"{first['scorer']} {first['group_reduction']}"
    figure, axes = _new_axes(
        f"Sparse over dense, {shape}, {first['length'] // 1024}K tokens, {scoring}",
        "token budget",
        "times faster than our dense kernel",
    )
    tokens = [record["budget_pages"] * record["page_size"] for record in rows]
    axes.plot(tokens, [r["byte_ratio"] for r in rows], color=_BLACK, linestyle="--", label="byte ratio")
    axes.plot(tokens, [r["speed_up"] for r in rows], color=_BLUE, marker="o", label="speed-up, medians")
    minima = [r["speed_up_minima"] for r in rows]
    axes.plot(tokens, minima, color=_BLUE, marker="o", alpha=0.4, linestyle=":", label="speed-up, minima")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.set_ylim(bottom=0.5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(fontsize=8, frameon=False)
    return figure


_ROOFS = (
    ("read probe, same pages and order", _BLACK, "_", "read_probe"),
    ("whole pools end to end", "#999999", "_", "read_stream"),
    ("dense", _ORANGE, "o", "attend_pages"),
    ("sparse", _BLUE, "o", "sparse_decode"),
    ("score_pages", _GREEN, "^", "score_pages"),
    ("torch bmm", _PURPLE, "s", "torch_bmm"),
    ("torch sdpa", _VERMILION, "s", "torch_sdpa"),
)


def _roofline(records: Iterable[Record]) -> Figure | None:
    rows = [r for r in records if r.get("benchmark") in ("attend_pages", "sparse_decode", "score_pages")]
    if not rows:
        return None
    figure, axes = _new_axes("Bytes read over time against what a reader reaches", "MB read per call", "GB/s")
    for label, color, marker, op in _ROOFS:
        found = [record for record in rows if record["op"] == op]
        sizes, speeds = [r["bytes"] / 1e6 for r in found], [r["gbps"] for r in found]
        size = 120 if marker == "_" else 16
        axes.scatter(sizes, speeds, color=color, marker=marker, s=size, label=label, alpha=0.8)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return figure
