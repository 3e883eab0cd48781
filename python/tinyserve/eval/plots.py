"""Plots of sweeps, each as PNG and SVG: the score along the axis with the oracle and the dense line, recall,
bytes read per step, and hit rate step by step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyserve.eval.results import Record, is_failure
from tinyserve.eval.rows import Row
from tinyserve.eval.sweeps import Sweep
from tinyserve_ops.policies import FullCache, Oracle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_sweep"]

# Distinguishable with the common kinds of colour blindness (Okabe and Ito, and a brown); the dense line is
# black, the oracle grey. Markers repeat after another number, so that no two of the first series look alike.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a")
_MARKERS = "osD^vP*X<>"
_BLACK, _GRAY = "#000000", "#777777"


@dataclass(frozen=True)
class _Quantity:
    """What a curve shows: its name in the file, its axis, and the value with its error bars of a row."""

    stem: str
    label: str
    of: Callable[[Row], tuple[float, float, float] | None]


def plot_sweep(sweep: Sweep, rows: Sequence[Row], records: Iterable[Record], folder: Path) -> list[Path]:
    """Writes every plot that the results allow; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    finished = [record for record in records if not is_failure(record)]
    written: list[Path] = []
    for task, num_tokens in dict.fromkeys((row.task, row.num_tokens) for row in rows):
        own = {_key(row.method): row for row in rows if (row.task, row.num_tokens) == (task, num_tokens)}
        title = f"{task}, {num_tokens} tokens"
        stem = f"{sweep.name}_{task}_{num_tokens}"
        for quantity in (_score(next(iter(own.values()))), _RECALL, _BYTES):
            figure = _curves(sweep, own, quantity, title)
            written += _save(figure, folder / f"{stem}_{quantity.stem}")
        of_task = [r for r in finished if (r["task"], r["num_tokens"]) == (task, num_tokens)]
        for name, label in (("hit_rate", "share of the best pages that were read"), ("kv_bytes", "MB read")):
            figure = _over_time(sweep, of_task, name, label, title)
            written += _save(figure, folder / f"{stem}_{name}_over_time")
    return written


def _score(row: Row) -> _Quantity:
    def value(row: Row) -> tuple[float, float, float] | None:
        return None if row.value is None else (row.value.value, row.value.low, row.value.high)

    return _Quantity("score", row.metric, value)


def _recall(row: Row) -> tuple[float, float, float] | None:
    value = row.measures.get("recall")
    return None if value is None else (value, value, value)


def _bytes(row: Row) -> tuple[float, float, float] | None:
    kv_bytes, summary_bytes = row.measures.get("kv_bytes"), row.measures.get("summary_bytes")
    if kv_bytes is None or summary_bytes is None:
        return None
    value = (kv_bytes + summary_bytes) / 1e6
    return value, value, value


_RECALL = _Quantity("recall", "share of the attention mass that was read", _recall)
_BYTES = _Quantity("bytes", "MB of keys, values and summaries read per step", _bytes)


def _curves(sweep: Sweep, rows: Mapping[str, Row], quantity: _Quantity, title: str) -> Figure | None:
    """One curve per series, with bars of the bootstrap interval; levels of points without a place."""
    figure, axes = _new_axes(title, sweep.axis, quantity.label)
    ticks = list(dict.fromkeys(point.x for point in sweep.points if point.x is not None))
    by_name = any(isinstance(x, str) for x in ticks)
    curves: dict[str, list[tuple[float, tuple[float, float, float]]]] = {}
    levels: dict[str, float] = {}
    for point in sweep.points:
        row = rows.get(_key(point.method.facts))
        value = None if row is None else quantity.of(row)
        if value is None:
            continue
        if point.x is None:
            levels[point.series] = value[0]
        else:
            place = ticks.index(point.x) if by_name else float(point.x)
            curves.setdefault(point.series, []).append((place, value))
    if not curves:
        return None
    for series, points in curves.items():
        color, marker = _style(sweep, series)
        x, y = [place for place, _ in points], [value for _, (value, _, _) in points]
        bars = [[v - low for _, (v, low, _) in points], [high - v for _, (v, _, high) in points]]
        axes.errorbar(
            x,
            y,
            yerr=bars if any(bars[0]) or any(bars[1]) else None,
            color=color,
            marker=marker,
            linestyle="none" if by_name else "--" if series == Oracle.name else "-",
            markersize=4,
            linewidth=1.3,
            elinewidth=0.7,
            capsize=2,
            label=series,
        )
    for series, level in levels.items():
        style = "--" if series == FullCache.name else ":"
        axes.axhline(level, color=_style(sweep, series)[0], linestyle=style, linewidth=1.0, label=series)
    _label_axis(axes, ticks, by_name, sweep.logarithmic)
    _add_legend(axes)
    return figure


def _style(sweep: Sweep, series: str) -> tuple[str, str]:
    """Colour and marker of a series, the same in every plot of the sweep."""
    others = dict.fromkeys(
        point.series for point in sweep.points if point.series not in (Oracle.name, FullCache.name)
    )
    if series not in others:
        return (_GRAY if series == Oracle.name else _BLACK), "d"
    index = list(others).index(series)
    return _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]


def _add_legend(axes: Axes) -> None:
    """Beside the plot: inside, it would lie on curves."""
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _label_axis(axes: Axes, ticks: Sequence[Any], by_name: bool, logarithmic: bool) -> None:
    if by_name:
        axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks], rotation=25, ha="right", fontsize=8)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        return
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _over_time(sweep: Sweep, records: Sequence[Record], name: str, label: str, title: str) -> Figure | None:
    """A measure step by step, mean over the samples that have that many steps."""
    figure, axes = _new_axes(title, "step after the context", label)
    scale = 1e-6 if name == "kv_bytes" else 1.0
    places = list(dict.fromkeys(point.x for point in sweep.points if point.x is not None))
    is_empty = True
    for point in sweep.points:
        if isinstance(point.method.policy, FullCache):
            continue
        key = _key(point.method.facts)
        means = _mean_series([r["series"][name] for r in records if _key(r["method"]) == key])
        steps = [step for step, mean in enumerate(means) if mean is not None]
        if not steps:
            continue
        is_empty = False
        color, marker = _style(sweep, point.series)
        place, shade = "", 1.0
        if point.x is not None:  # one colour per series, stronger along the axis
            place, shade = f", {point.x}", (1 + places.index(point.x)) / len(places)
        axes.plot(
            steps,
            [scale * (means[step] or 0.0) for step in steps],
            color=color,
            alpha=0.25 + 0.75 * shade,
            marker=marker,
            markersize=3,
            linewidth=1.1,
            label=f"{point.series}{place}",
        )
    if is_empty:
        return None
    _add_legend(axes)
    return figure


def _mean_series(series: Sequence[Sequence[float | None]]) -> list[float | None]:
    means: list[float | None] = []
    for step in range(max(map(len, series), default=0)):
        values = [one[step] for one in series if step < len(one) and one[step] is not None]
        means.append(sum(v for v in values if v is not None) / len(values) if values else None)
    return means


def _new_axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface: no global state, no display.
    figure = Figure(figsize=(7, 4.5), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure | None, stem: Path) -> list[Path]:
    if figure is None:
        return []
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    return paths


def _key(method: dict[str, Any]) -> str:
    return json.dumps(method, sort_keys=True)
