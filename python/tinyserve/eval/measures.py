"""What a method read in a single-token step, against what it should have read.

All shares are of softmax mass, computed from the step's own queries and from the keys of every token before
it, then averaged over the query heads of a kv head, the kv heads, and the layers that leave something out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["StepMeasures", "mass_of_best", "mean", "mean_measures"]


@dataclass(frozen=True)
class StepMeasures:
    """One step. None where no layer leaves anything out, where tokens and not pages are chosen (rates), or
    where there is no step before to compare with.

    Attributes:
        recall: share of the attention mass on what was read.
        oracle_recall: share on the best pages, as many per kv head as were read: no choice of pages keeps
            more.
        hit_rate: share of those best pages that were read.
        reuse_rate: share of the pages read that the step before had read.
        tokens_attended: tokens attended to, mean over all layers and kv heads, dense ones included.
        kv_bytes: K and V read, all layers.
        summary_bytes: page summaries read, all layers.
    """

    recall: float | None
    oracle_recall: float | None
    hit_rate: float | None
    reuse_rate: float | None
    tokens_attended: float
    kv_bytes: int
    summary_bytes: int


def mean_measures(steps: Sequence[StepMeasures]) -> dict[str, float | None]:
    """The mean of each measure over the steps that have it, and `recall_of_oracle`, the ratio of two
    means.
    """
    means: dict[str, float | None] = {}
    rows = [asdict(step) for step in steps]
    for name in StepMeasures.__dataclass_fields__:
        values = [row[name] for row in rows if row[name] is not None]
        means[name] = sum(values) / len(values) if values else None
    recall, ceiling = means["recall"], means["oracle_recall"]
    means["recall_of_oracle"] = recall / ceiling if recall is not None and ceiling else None
    return means


def mass_of_best(mass: torch.Tensor, num_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most mass that a number of pages can hold.

    Args:
        mass: [num_kv_heads, pages], 0 where there is no page.
        num_pages: int64 [num_kv_heads], at least 1.

    Returns:
        The mass [num_kv_heads], and which pages hold it, bool like `mass`.
    """
    ordered, order = mass.sort(dim=1, descending=True, stable=True)
    taken = torch.arange(mass.size(1), device=mass.device)[None] < num_pages[:, None]
    is_best = torch.zeros_like(taken).scatter_(1, order, taken)
    return (ordered * taken).sum(dim=1), is_best


def mean(values: Sequence[float | None]) -> float | None:
    """Of the values that are there; None without any."""
    there: list[Any] = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
