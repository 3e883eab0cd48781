"""Which pages a sparse variant keeps: scorer, group reduction and budget, as far as this build has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinyserve_ops import SparseConfig, scorers

Budget = int | float  # tokens, or the fraction of pages kept

SINK_PAGES = SparseConfig().num_sink_pages
RECENT_PAGES = SparseConfig().num_recent_pages


@dataclass(frozen=True)
class Scoring:
    """A scorer and how the query heads of a kv head share its scores."""

    scorer: str
    group_reduction: str

    @property
    def label(self) -> str:
        return f"{self.scorer} {self.group_reduction}"


SCORINGS = (
    Scoring("bounds", "mean"),
    Scoring("bounds_full", "mean"),
    Scoring("bounds_full", "max"),
    Scoring("low_rank", "softmax"),
)


def supported_scorings(dtype: torch.dtype, wanted: Sequence[Scoring] = SCORINGS) -> tuple[Scoring, ...]:
    """Those of `wanted` that this build of the library has for pages of `dtype`."""
    return tuple(scoring for scoring in wanted if _is_supported(scoring, dtype))


def _is_supported(scoring: Scoring, dtype: torch.dtype) -> bool:
    if scoring.scorer not in scorers.SCORERS or scoring.group_reduction not in scorers.GROUP_REDUCTIONS:
        return False
    try:
        scorers.resolve(scoring.scorer, 16, dtype)  # whatever the page size: ranks are not in question
    except ValueError:  # full-precision summaries of int8 pages
        return False
    return True
