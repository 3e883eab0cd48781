"""Checks of constructor arguments that configs and policies share: name, what was expected, what came."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["check_choice", "check_int", "check_number"]


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises TypeError or ValueError unless `value` is an integer from `low` to `high` (None: no limit)."""
    expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {expected}, got {value}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises TypeError or ValueError unless `value` is a finite number from `low` to `high`."""
    expected = f"a number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises TypeError or ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
