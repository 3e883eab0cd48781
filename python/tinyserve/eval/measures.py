"""What a method read in its single-token steps, against what it should have read.

All shares are of softmax mass, computed from the step's own queries and from every key that is stored, then
averaged over the query heads of a kv head, the kv heads, and the layers that select pages. Costs a pass over
all keys per layer and step, so only the first steps of a sample are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tinyserve_ops import PagedKVCache, ops
from tinyserve_ops.forward import ForwardBatch

__all__ = ["SelectionProbe", "StepMeasures", "mass_of_best", "mean_measures"]


@dataclass(frozen=True)
class StepMeasures:
    """One step. None where no layer selects pages, or where there is no step before to compare with.

    Attributes:
        recall: share of the attention mass on the selected pages.
        oracle_recall: share on the best pages, as many per kv head as were selected: no choice of pages keeps
            more.
        hit_rate: share of those best pages that were selected.
        reuse_rate: share of the selected pages that the step before had selected.
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


class SelectionProbe:
    """Measures the steps of one sequence whose cache keeps every token; a `LayerProbe`.

    Args:
        kv: the cache of the sequence, with `record_selection`.
    """

    def __init__(self, kv: PagedKVCache) -> None:
        self._kv = kv
        self._layers: list[tuple[float, float, float, float | None]] = []
        self._selected: dict[int, torch.Tensor] = {}  # layer -> bool [num_kv_heads, pages], the step before
        self._counted = self._counters()

    def start_sequence(self) -> None:
        """The next step is of another sequence: there is no step before it."""
        self._selected.clear()

    def observe(
        self,
        forward: ForwardBatch,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float,
        window: int,
    ) -> None:
        """See `LayerProbe`."""
        selected = self._selection(layer_idx)
        if selected is None:
            return
        mass = self._mass(forward, layer_idx, q, sm_scale, window)
        num_pages = (selected >= 0).sum(dim=1)
        # One column more, for the padding -1.
        is_selected = torch.zeros(mass.size(0), mass.size(1) + 1, dtype=torch.bool, device=mass.device)
        is_selected = is_selected.scatter_(1, selected.long() % is_selected.size(1), True)[:, :-1]
        ceiling, is_best = mass_of_best(mass, num_pages)
        kept = (mass * is_selected).sum(dim=1)
        hits = (is_best & is_selected).sum(dim=1) / num_pages
        before = self._selected.get(layer_idx)
        reuse = None
        if before is not None:
            same = before[:, : is_selected.size(1)] & is_selected[:, : before.size(1)]
            reuse = float((same.sum(dim=1) / num_pages).mean())
        self._selected[layer_idx] = is_selected
        self._layers.append((float(kept.mean()), float(ceiling.mean()), float(hits.mean()), reuse))

    def finish_step(self) -> StepMeasures:
        """The measures of the step whose layers were observed since the last call."""
        layers, self._layers = self._layers, []
        before, self._counted = self._counted, self._counters()
        tokens, kv_bytes, summary_bytes = (
            now - then for now, then in zip(self._counted, before, strict=True)
        )
        recall, oracle_recall, hit_rate, reuse_rate = list(zip(*layers, strict=True)) or [()] * 4
        return StepMeasures(
            recall=_mean(recall),
            oracle_recall=_mean(oracle_recall),
            hit_rate=_mean(hit_rate),
            reuse_rate=_mean(reuse_rate),
            tokens_attended=tokens / (self._kv.num_layers * self._kv.num_kv_heads),
            kv_bytes=kv_bytes,
            summary_bytes=summary_bytes,
        )

    def _counters(self) -> tuple[int, int, int]:
        stats = self._kv.stats()
        return stats.tokens_attended, stats.kv_bytes_read, stats.summary_bytes_read

    def _selection(self, layer_idx: int) -> torch.Tensor | None:
        """Pages selected in this layer of the step under way, [num_kv_heads, width]; None of a dense
        layer.
        """
        history = self._kv.recorder.history
        selected = history[-1].selected_pages.get(layer_idx) if history else None
        return None if selected is None else selected[0]

    def _mass(
        self, forward: ForwardBatch, layer_idx: int, q: torch.Tensor, sm_scale: float, window: int
    ) -> torch.Tensor:
        """Attention mass of every page, mean over the group: [num_kv_heads, pages], each row sums to 1."""
        group = self._kv.group_of_layer[layer_idx]
        pool = self._kv.pool.layers[layer_idx]
        _, lse, page_lse = ops.attend_pages(
            q,
            forward.cu_query_lens,
            forward.seq_lens(group),
            forward.page_table(group),
            *pool.parts[:-1],
            None,
            None,
            sm_scale,
            window,
            return_page_lse=True,
        )
        mass = (page_lse[0] - lse[0][:, None]).exp()  # [num_heads, pages]
        return mass.unflatten(0, (self._kv.num_kv_heads, -1)).mean(dim=1)


def _mean(values: Sequence[float | None]) -> float | None:
    there: list[Any] = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
