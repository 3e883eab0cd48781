"""Sinks and a window of recent pages, whatever the query (Xiao et al., StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tinyserve_ops.arguments import check_int
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.base import SelectionPolicy, TokenRows

__all__ = ["StreamingLLM"]


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(SelectionPolicy):
    """Reads the config's sink pages and the last pages up to the token itself.

    Whole pages are read, and tokens keep the positions they have in the text (the original renumbers them
    within its window, which only matters past a model's positions).

    Args:
        window: tokens before and with the new one, in whole pages, the page being filled included; None takes
            what the config's budget leaves beside the sinks.
    """

    name: ClassVar[str] = "streaming_llm"
    scans_summaries: ClassVar[bool] = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("window", self.window, 1)

    def check(self, config: SparseConfig) -> None:
        """The window must hold the recent pages that the config forces."""
        if self.window is not None and self.window // config.page_size < config.num_recent_pages:
            raise ValueError(
                f"window: expected at least {config.num_recent_pages * config.page_size} tokens "
                f"(num_recent_pages {config.num_recent_pages} of {config.page_size}), got {self.window}"
            )

    def score(self, rows: TokenRows) -> Tensor:
        """The later a page, the better."""
        num_pages = rows.page_table.size(1)
        scores = torch.arange(num_pages, dtype=torch.float32, device=rows.q.device)
        return scores.expand(rows.q.size(0), rows.pool.num_kv_heads, num_pages)

    def select(self, rows: TokenRows, page_scores: Tensor) -> tuple[Tensor, Tensor]:
        """The sinks, then the last pages."""
        if self.window is None:
            return rows.select_pages(page_scores)
        num_pages = rows.config.num_sink_pages + self.window // rows.pool.page_size
        return rows.select_pages(page_scores, num_pages)
