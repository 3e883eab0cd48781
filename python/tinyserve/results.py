"""What a demo run leaves behind: the page-selection map as PNG, and every number with its options as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyserve.comparison import ModeResult
from tinyserve.needles import Prompt
from tinyserve.selection_map import count_selection, draw_selection_map


@dataclass(frozen=True)
class Answer:
    """What one side answered: its token ids and text up to the end of its turn, and whether the hidden key is
    in it."""

    token_ids: list[int]
    text: str
    found: bool


def save_picture(
    path: Path,
    result: ModeResult,
    answer: Answer,
    prompt: Prompt,
    *,
    model_name: str,
    num_layers: int,
    page_size: int,
    tokens: Sequence[str],
) -> None:
    """Draws the steps that produced the answer (the ones after it were decoded for timing only).

    Args:
        tokens: text of each token decoded.
    """
    # Step i reads the context to choose token i + 1, up to the one that ends the answer.
    num_steps = max(1, min(len(answer.token_ids), len(result.selection_history)))
    counts = count_selection(result.selection_history[:num_steps], num_layers)
    outcome = "found" if answer.found else "NOT found"
    subtitle = (
        f"{model_name}  ·  {len(prompt.token_ids)} tokens of context in {result.cache}  ·  {result.attention}"
        f"  ·  hidden fact {outcome}"
    )
    needle_pages = range(prompt.needle_start // page_size, (prompt.needle_end - 1) // page_size + 1)
    labels = list(tokens[1 : num_steps + 1])
    draw_selection_map(counts, path, subtitle=subtitle, needle_pages=needle_pages, step_labels=labels)


def save_numbers(
    path: Path,
    options: dict[str, Any],
    prompt: Prompt,
    results: Sequence[ModeResult],
    answers: Sequence[Answer],
    environment: dict[str, Any],
) -> None:
    """One JSON object: the options, the environment, where the fact was hidden, and both sides."""
    sides = {
        result.title: {
            "attention": result.attention,
            "cache": result.cache,
            "text": answer.text,
            "found": answer.found,
            "prefill_seconds": result.prefill_seconds,
            "median_ms": result.median_ms,
            "minimum_ms": result.minimum_ms,
            "step_ms": [round(1e3 * seconds, 3) for seconds in result.step_seconds],
            "kv_bytes_per_step": result.kv_bytes_per_step,
            "summary_bytes_per_step": result.summary_bytes_per_step,
            "kv_bytes_held": result.kv_bytes_held,
            "sparse_engaged": result.sparse_engaged,
        }
        for result, answer in zip(results, answers, strict=True)
    }
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    needle = {"sentence": prompt.needle.sentence, "tokens": [prompt.needle_start, prompt.needle_end]}
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"options": chosen, "environment": environment, "needle": needle, **sides}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
