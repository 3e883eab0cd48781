"""Query rows: which token of which sequence a row of the packed batch is, and what it may see.

Token i of sequence b sits at stored position p = seq_lens[b] + i and sees the positions (p - window, p], or
0..p without a window. A negative position is a padding slot: nothing is stored there and it sees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One new token."""

    token: int  # index into the packed batch
    sequence: int  # index into the batch
    position: int  # stored position; negative in a padding slot
    window: int = -1

    @property
    def first_position(self) -> int:
        return max(0, self.position - self.window + 1) if self.window > 0 else 0

    def visible_pages(self, page_size: int) -> range:
        """Logical pages that hold a visible token."""
        if self.position < 0:
            return range(0)
        return range(self.first_position // page_size, self.position // page_size + 1)

    def sees(self, positions: Tensor) -> Tensor:
        """Which of `positions` (any shape) this row may attend to."""
        return (positions >= self.first_position) & (positions <= self.position)

    def sealed(self, page: int, page_size: int) -> bool:
        """Whether `page` is full of tokens up to this row's own, and so has a summary."""
        return (page + 1) * page_size <= self.position + 1


def rows_of(cu_query_lens: Tensor, seq_lens: Tensor, window: int = -1) -> Iterator[Row]:
    """Yields the rows of the packed batch in order."""
    starts = cu_query_lens.tolist()
    for sequence, stored_len in enumerate(seq_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        for token in range(first, last):
            yield Row(token, sequence, stored_len + token - first, window)


def page_positions(pages: Tensor, page_size: int) -> Tensor:
    """Stored positions of the slots of logical `pages`: [len(pages), page_size]."""
    return pages[:, None] * page_size + torch.arange(page_size)
