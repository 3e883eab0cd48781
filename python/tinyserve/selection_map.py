"""The page-selection map: which pages of the context each layer reads while it decodes.

Above, one row per layer: how often (over steps and kv heads) each page was read. Below, one row per decode
step: how many of the sparse layers' heads read the page. The page with the hidden fact is marked. One blue
ramp from white (never) to dark (always) keeps the map readable for every kind of colour vision and in print.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Vermilion of the Okabe-Ito palette, which every kind of colour vision tells from blue.
_NEEDLE_COLOR = "#D55E00"
_INK = "#1F2933"
_MAX_STEP_LABELS = 32


@dataclass(frozen=True)
class SelectionCounts:
    """How often each page was read, 0 (never) to 1 (always); a page that does not exist yet is not read.

    Attributes:
        by_layer: [num_layers, num_pages], mean over steps and kv heads; nan where nothing was recorded, which
            is what a dense layer leaves.
        by_step: [num_steps, num_pages], mean over the recorded layers and their kv heads.
    """

    by_layer: np.ndarray
    by_step: np.ndarray


def count_selection(history: list[dict[int, Any]], num_layers: int) -> SelectionCounts:
    """Counts the selected pages of a run.

    Args:
        history: per decode step, layer index -> selected pages, int32 [batch, num_kv_heads, max_page_budget],
            -1 padded.
        num_layers: of the model, dense ones included.

    Raises:
        ValueError: nothing was recorded.
    """
    if not any(history):
        raise ValueError("history: expected at least one recorded decode step, got none")
    num_pages = 1 + max(int(pages.max()) for step in history for pages in step.values())
    by_layer = np.full((num_layers, num_pages), np.nan)
    by_step = np.zeros((len(history), num_pages))
    for step_idx, step in enumerate(history):
        for layer_idx, selected in step.items():
            pages = np.asarray(selected)
            rows = pages.reshape(-1, pages.shape[-1])
            share = np.bincount(rows[rows >= 0], minlength=num_pages) / len(rows)
            by_layer[layer_idx] = np.nan_to_num(by_layer[layer_idx]) + share / len(history)
            by_step[step_idx] += share / len(step)
    return SelectionCounts(by_layer, by_step)


def draw_selection_map(
    counts: SelectionCounts, path: Path, *, subtitle: str, needle_pages: range, step_labels: list[str]
) -> None:
    """Writes the picture, in the format that the path's suffix names.

    Args:
        subtitle: one line on the run: model, context, budget, outcome.
        needle_pages: logical pages that hold the hidden fact; empty where nothing is hidden.
        step_labels: the token each step produced, shown beside its row; empty for none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface: no global state, no display, whatever backend a notebook has chosen.
    figure = Figure(figsize=(11, 8), facecolor="white")
    FigureCanvasAgg(figure)
    grid = {
        "left": 0.105,
        "right": 0.915,
        "top": 0.86,
        "bottom": 0.065,
        "hspace": 0.13,
        "height_ratios": [1.35, 1],
    }
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw=grid)
    figure.text(
        0.015,
        0.963,
        "Which pages of the context each layer reads while it decodes",
        fontsize=14,
        color=_INK,
        weight="bold",
    )
    figure.text(0.015, 0.934, subtitle, fontsize=9.5, color="#52606D")
    image = _draw_layers(upper, counts.by_layer)
    _draw_steps(lower, counts.by_step, step_labels)
    for axes in (upper, lower):
        if needle_pages:
            _mark_needle(axes, needle_pages, label=axes is upper)
        axes.tick_params(colors=_INK, labelsize=8, length=2)
        for spine in axes.spines.values():
            spine.set_color("#9AA5B1")
    _label_steps(lower, counts.by_step.shape[0], step_labels)
    bar = figure.colorbar(image, cax=figure.add_axes((0.936, 0.3, 0.013, 0.4)))
    bar.set_ticks([0, 0.5, 1], labels=["never", "half", "always"])
    bar.ax.set_title("page read", fontsize=8.5, color=_INK, pad=8)
    bar.ax.tick_params(labelsize=8, colors=_INK)
    bar.outline.set_color("#9AA5B1")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_layers(axes: Axes, shares: np.ndarray) -> Any:
    dense = np.isnan(shares).all(axis=1)
    image = _heat_map(axes, np.nan_to_num(shares))
    for layer_idx in np.flatnonzero(dense):
        # Hatched, not filled: these layers read everything by choice, which is not a selection.
        axes.axhspan(
            layer_idx - 0.5, layer_idx + 0.5, facecolor="#E4E7EB", hatch="////", edgecolor="#9AA5B1", lw=0
        )
    if dense.any():
        axes.text(
            shares.shape[1] / 2,
            float(np.flatnonzero(dense).mean()),
            "dense layers: every page",
            ha="center",
            va="center",
            fontsize=8,
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9},
        )
    axes.set_ylabel("layer", color=_INK, fontsize=9)
    axes.set_title(
        "each layer, mean over the steps and kv heads", loc="left", fontsize=9.5, color=_INK, pad=21
    )
    return image


def _draw_steps(axes: Axes, shares: np.ndarray, step_labels: list[str]) -> None:
    _heat_map(axes, shares)
    axes.set_title(
        "each decode step, mean over the sparse layers and kv heads", loc="left", fontsize=9.5, color=_INK
    )
    axes.set_xlabel(
        "page of the context (left: start of the prompt, right: newest tokens)", color=_INK, fontsize=9
    )


def _label_steps(axes: Axes, num_steps: int, step_labels: list[str]) -> None:
    """Names the rows by the token they produced, where there is room for that."""
    if len(step_labels) != num_steps or num_steps > _MAX_STEP_LABELS:
        axes.set_ylabel("decode step", color=_INK, fontsize=9)
        return
    size = min(8.0, 165 / num_steps)
    axes.set_yticks(
        range(num_steps), labels=[_one_line(text) for text in step_labels], family="monospace", fontsize=size
    )
    axes.set_ylabel("token produced", color=_INK, fontsize=9)


def _heat_map(axes: Axes, shares: np.ndarray) -> Any:
    return axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0.0, vmax=1.0)


def _mark_needle(axes: Axes, pages: range, *, label: bool) -> None:
    for edge in (pages.start - 0.5, pages.stop - 0.5):
        axes.axvline(edge, color=_NEEDLE_COLOR, lw=0.9)
    if label:
        axes.annotate(
            "hidden fact",
            xy=((pages.start + pages.stop - 1) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
            color=_NEEDLE_COLOR,
            fontweight="bold",
            arrowprops={"arrowstyle": "-|>", "color": _NEEDLE_COLOR, "shrinkA": 0, "shrinkB": 0},
        )


def _one_line(token: str) -> str:
    """A token as a tick label: line breaks shown, no `$`, which matplotlib reads as mathematics."""
    return token.replace("\n", "\u21b5").replace("$", r"\$").strip(" ")[:14] or "\u2423"
