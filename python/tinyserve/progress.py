"""Progress bars on stderr that look right in a terminal and stay short in a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(
    description: str,
    *,
    total: int,
    unit: str,
    scale: bool = False,
    items: Iterable[Any] | None = None,
    delay: float = 0.0,
) -> tqdm:
    """A bar that redraws in place; where stderr is not a terminal, at most every five seconds.

    Args:
        total: steps to go. unit: what a step is called. scale: print large counts as k, M, G.
        items: what to iterate over, if the bar is to advance by itself.
        delay: seconds before it shows, for work that is mostly quick.
    """
    interval = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(
        items,
        desc=description,
        total=total,
        unit=unit,
        unit_scale=scale,
        leave=False,
        mininterval=interval,
        delay=delay,
    )
