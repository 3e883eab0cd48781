"""Plain-text output of the demo: two texts side by side, and the summary table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tinyserve.comparison import ModeResult


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def side_by_side(titles: Sequence[str], texts: Sequence[str], width: int = 100) -> str:
    """Wraps each text into its own column of equal width."""
    column = max(20, (width - 3 * (len(texts) - 1)) // len(texts))
    wrapped = [
        [
            title,
            "-" * len(title),
            *(line for part in text.splitlines() for line in textwrap.wrap(part, column) or [""]),
        ]
        for title, text in zip(titles, texts, strict=True)
    ]
    height = max(len(lines) for lines in wrapped)
    rows = zip(*(lines + [""] * (height - len(lines)) for lines in wrapped), strict=True)
    return "\n".join(" | ".join(cell.ljust(column) for cell in row).rstrip() for row in rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a rule under the header; the first column is left aligned, the others right."""
    widths = [max(len(row[idx]) for row in (header, *rows)) for idx in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.lstrip().ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *(line(row) for row in rows)])


def summary(full: ModeResult, sparse: ModeResult, keys_found: tuple[bool, bool], peak_bytes: int) -> str:
    """The table at the end of the demo; the last column says how many times less the sparse side needs.

    Args:
        peak_bytes: most resident memory of the process, which held both sides at once.
    """

    def numbers(label: str, left: float, right: float, form: str) -> list[str]:
        gain = f"{left / right:.2f}x" if right > 0 else ""
        return [label, form.format(left), form.format(right), gain]

    def sizes(label: str, left: float, right: float) -> list[str]:
        return [label, megabytes(left), megabytes(right), f"{left / right:.2f}x" if right > 0 else ""]

    needle = ["found" if found else "NOT FOUND" for found in keys_found]
    rows = [
        ["attention", full.attention, sparse.attention, ""],
        ["cache", full.cache, sparse.cache, ""],
        ["hidden key", *needle, ""],
        numbers("prefill", full.prefill_seconds, sparse.prefill_seconds, "{:.1f} s"),
        numbers("decode, median per token", full.median_ms, sparse.median_ms, "{:.1f} ms"),
        numbers("decode, fastest token", full.minimum_ms, sparse.minimum_ms, "{:.1f} ms"),
        sizes("K and V read per token", full.kv_bytes_per_step, sparse.kv_bytes_per_step),
        ["page summaries read per token", "-", megabytes(sparse.summary_bytes_per_step), ""],
        sizes("read per token, in all", _read(full), _read(sparse)),
        sizes("KV memory held", full.kv_bytes_held, sparse.kv_bytes_held),
    ]
    text = table(["", full.title, sparse.title, "full / sparse"], rows)
    return f"{text}\n\npeak memory of the process, weights and both sides: {megabytes(peak_bytes)}"


def _read(side: ModeResult) -> float:
    return side.kv_bytes_per_step + side.summary_bytes_per_step
