"""What decoding read, counted from the page lists that the kernels returned.

The hot path only appends a reference to what a step produced; sums are taken in batches, and on CUDA nothing
is read back before somebody asks. Unit of all page and token counts: one page or token of one kv head of one
layer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tinyserve_ops.layer_pool import LayerPool

__all__ = ["CacheStats", "SelectionStep", "StatsRecorder", "hidden_by_window"]

# Steps kept before they are summed: enough to make the sums cheap per step, few enough that the tensors kept
# stay small.
_MAX_PENDING = 256


@dataclass(frozen=True)
class CacheStats:
    """Counters of one cache since its creation, `reset()` or `reset_stats()`.

    Attributes:
        sparse_steps: attention calls that went through page selection, one per layer, sequence and token
            (of forwards of several tokens only where a policy selects pages for each of them).
        dense_steps: single-token attention calls over all pages, one per layer and sequence.
        prefill_tokens: tokens appended by forwards of several tokens per sequence, counted once, not per
            layer.
        pages_visible: pages that the sparse steps could have read.
        pages_scanned: page summaries that the sparse steps ranked.
        pages_read: pages that the sparse steps attended to.
        tokens_attended: tokens attended to by all single-token steps, sparse and dense.
        kv_bytes_read: bytes of K and V (scales included) behind `tokens_attended`.
        summary_bytes_read: bytes of the summaries behind `pages_scanned`.
        kv_bytes_held: bytes of the pages in use now, over the whole pool (K, V, scales, summaries).
        kv_bytes_reserved: bytes of the pool in virtual memory.
        pool_growths: times a layer group was reallocated to hold more pages.
        tokens_evicted: tokens that a policy or `keep_tokens` has removed, each counted for every layer and kv
            head that lost it.
        reuse_rate: fraction of the pages read in the last sparse step that the step before had read, mean
            over layers; None before two steps of the same sequences.
        selection_engaged: a sparse step left at least one visible page out.
    """

    sparse_steps: int
    dense_steps: int
    prefill_tokens: int
    pages_visible: int
    pages_scanned: int
    pages_read: int
    tokens_attended: int
    kv_bytes_read: int
    summary_bytes_read: int
    kv_bytes_held: int
    kv_bytes_reserved: int
    pool_growths: int
    tokens_evicted: int
    reuse_rate: float | None
    selection_engaged: bool

    def to_dict(self) -> dict[str, Any]:
        """The counters by name."""
        return asdict(self)


@dataclass(frozen=True)
class SelectionStep:
    """The pages selected in one decode step, kept with `record_selection=True`.

    Attributes:
        sequences: handles of the rows.
        lengths: stored tokens of each row before the step.
        selected_pages: layer index -> int32 [rows, num_kv_heads, max_page_budget], ascending, -1 padded.
    """

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    selected_pages: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Visible:
    """Host-side counts of one step's rows: sums over rows, for one kv head."""

    pages: int
    sealed_pages: int
    tokens: int
    missing_in_last: int  # slots of the last page beyond the newest token


class StatsRecorder:
    """Collects while a cache runs; `summary` turns it into `CacheStats`."""

    def __init__(self, num_layers: int, *, record_selection: bool = False) -> None:
        self._num_layers = num_layers
        self._record_selection = record_selection
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.sparse_steps = self.dense_steps = self.prefill_tokens = self.tokens_evicted = 0
        self._counts = dict.fromkeys(("visible", "scanned", "tokens", "kv_bytes", "summary_bytes"), 0)
        # (pool, lengths, window, selected_pages or None, num_selected or None, summaries read): None, None is
        # a dense step.
        self._pending: list[
            tuple[LayerPool, tuple[int, ...], int, torch.Tensor | None, torch.Tensor | None, bool]
        ] = []
        # Running sums on their device, by bytes per token: pages read, and tokens in them before a window.
        self._sums: dict[tuple[int, torch.device], tuple[LayerPool, torch.Tensor, torch.Tensor]] = {}
        self._pages_read = 0
        self._last: list[Any] = [None] * self._num_layers
        self._before: list[Any] = [None] * self._num_layers
        self.history: list[SelectionStep] = []
        self._history_key: object = None

    def record_sparse(
        self,
        layer_idx: int,
        pool: LayerPool,
        sequences: tuple[int, ...],
        lengths: tuple[int, ...],
        window: int,
        selected_pages: torch.Tensor,
        num_selected: torch.Tensor,
        *,
        scans_summaries: bool = True,
    ) -> None:
        """One sparse call: `selected_pages` [rows, heads, budget], `num_selected` [rows, heads]."""
        self.sparse_steps += len(lengths)
        pending = self._pending
        masked = selected_pages if window > 0 else None
        pending.append((pool, lengths, window, masked, num_selected, scans_summaries))
        last = self._last
        self._before[layer_idx] = last[layer_idx]
        last[layer_idx] = (sequences, selected_pages)
        if self._record_selection:
            self._record_history(layer_idx, sequences, lengths, selected_pages)
        if len(pending) >= _MAX_PENDING:
            self._fold()

    def record_dense(self, pool: LayerPool, lengths: tuple[int, ...], window: int) -> None:
        """One single-token call over all pages."""
        self.dense_steps += len(lengths)
        self._pending.append((pool, lengths, window, None, None, False))
        if len(self._pending) >= _MAX_PENDING:
            self._fold()

    def add_counts(
        self,
        *,
        pool: LayerPool,
        lengths: tuple[int, ...],
        window: int,
        pages_read: int | None,
        tokens_hidden: int = 0,
    ) -> None:
        """Steps in a graph: `lengths` of all rows and steps, and pages read in total (None: dense), with the
        tokens in them that lie before the window.
        """
        visible = _count_visible(lengths, pool.page_size, window)
        heads = pool.num_kv_heads
        if pages_read is None:
            self.dense_steps += len(lengths)
            tokens = visible.tokens * heads
        else:
            self.sparse_steps += len(lengths)
            self._count_scan(pool, visible)
            self._pages_read += pages_read
            tokens = pages_read * pool.page_size - visible.missing_in_last * heads - tokens_hidden
        self._count_tokens(pool, tokens)

    def summary(self, *, kv_bytes_held: int, kv_bytes_reserved: int, pool_growths: int) -> CacheStats:
        """The counters so far. Reads sums back from the device."""
        self._fold()
        for pool, pages, hidden in self._sums.values():
            num_pages = int(pages)
            self._pages_read += num_pages
            self._count_tokens(pool, num_pages * pool.page_size - int(hidden))
        self._sums.clear()
        counts = self._counts
        return CacheStats(
            sparse_steps=self.sparse_steps,
            dense_steps=self.dense_steps,
            prefill_tokens=self.prefill_tokens,
            pages_visible=counts["visible"],
            pages_scanned=counts["scanned"],
            pages_read=self._pages_read,
            tokens_attended=counts["tokens"],
            kv_bytes_read=counts["kv_bytes"],
            summary_bytes_read=counts["summary_bytes"],
            kv_bytes_held=kv_bytes_held,
            kv_bytes_reserved=kv_bytes_reserved,
            pool_growths=pool_growths,
            tokens_evicted=self.tokens_evicted,
            reuse_rate=self._reuse_rate(),
            selection_engaged=self._pages_read < counts["visible"],
        )

    def _fold(self) -> None:
        """Turns pending steps into sums: host arithmetic for lengths, one device sum for the lists."""
        memo: dict[tuple[int, int, int], _Visible] = {}
        lists: dict[tuple[int, torch.device], tuple[LayerPool, list[torch.Tensor], list[torch.Tensor]]] = {}
        for pool, lengths, window, selected_pages, num_selected, scans_summaries in self._pending:
            key = (id(lengths), pool.page_size, window)  # all layers of a step hand in the same tuple
            visible = memo.get(key)
            if visible is None:
                visible = memo[key] = _count_visible(lengths, pool.page_size, window)
            if num_selected is None:
                self._count_tokens(pool, visible.tokens * pool.num_kv_heads)
                continue
            self._count_scan(pool, visible, scans_summaries)
            self._count_tokens(pool, -visible.missing_in_last * pool.num_kv_heads)
            same = lists.setdefault((pool.kv_bytes_per_token, num_selected.device), (pool, [], []))
            same[1].append(num_selected.reshape(-1))
            if selected_pages is not None:
                positions = torch.tensor(lengths, device=selected_pages.device)
                same[2].append(hidden_by_window(selected_pages, positions, pool.page_size, window))
        self._pending.clear()
        for kind, (pool, counts, masked) in lists.items():
            pages = torch.cat(counts).sum()
            hidden = torch.stack(masked).sum() if masked else torch.zeros_like(pages)
            if kind in self._sums:
                _, pages_before, hidden_before = self._sums[kind]
                pages, hidden = pages + pages_before, hidden + hidden_before
            self._sums[kind] = (pool, pages, hidden)

    def _count_scan(self, pool: LayerPool, visible: _Visible, scans_summaries: bool = True) -> None:
        self._counts["visible"] += visible.pages * pool.num_kv_heads
        if not scans_summaries:
            return
        self._counts["scanned"] += visible.sealed_pages * pool.num_kv_heads
        self._counts["summary_bytes"] += visible.sealed_pages * pool.num_kv_heads * pool.summary_bytes

    def _count_tokens(self, pool: LayerPool, tokens: int) -> None:
        self._counts["tokens"] += tokens
        self._counts["kv_bytes"] += tokens * pool.kv_bytes_per_token

    def _record_history(
        self,
        layer_idx: int,
        sequences: tuple[int, ...],
        lengths: tuple[int, ...],
        selected_pages: torch.Tensor,
    ) -> None:
        if self._history_key is not sequences:  # a new tuple per forward, the same one for all its layers
            self._history_key = sequences
            self.history.append(SelectionStep(sequences, lengths))
        self.history[-1].selected_pages[layer_idx] = selected_pages

    def _reuse_rate(self) -> float | None:
        rates = []
        for before, last in zip(self._before, self._last, strict=True):
            if before is None or last is None or before[0] != last[0]:
                continue
            current, previous = last[1].to(torch.int64), before[1].to(torch.int64)
            # One flag per page and head, linear in pages and lists; flag 0 is the padding's.
            num_pages = 1 + int(max(current.max(), previous.max()))
            was_read = torch.zeros(
                (*previous.shape[:2], num_pages + 1), dtype=torch.bool, device=previous.device
            )
            was_read.scatter_(-1, previous + 1, True)
            reused = was_read.gather(-1, current + 1) & (current >= 0)
            rates.append(reused.sum() / (current >= 0).sum())
        return float(torch.stack(rates).mean()) if rates else None


def _count_visible(lengths: tuple[int, ...], page_size: int, window: int) -> _Visible:
    pages = sealed = tokens = missing = 0
    for position in lengths:  # the new token of a row sits at its stored length
        first_token = max(0, position - window + 1) if window > 0 else 0
        first_page = first_token // page_size
        last_page = position // page_size
        pages += last_page + 1 - first_page
        sealed += max(0, (position + 1) // page_size - first_page)
        tokens += position + 1 - first_token
        missing += (last_page + 1) * page_size - (position + 1)
    return _Visible(pages, sealed, tokens, missing)


def hidden_by_window(
    selected_pages: torch.Tensor, positions: torch.Tensor, page_size: int, window: int
) -> torch.Tensor:
    """Tokens of selected pages that lie before the window: only the first visible page can hold any.

    Args:
        selected_pages: [rows, heads, width].
        positions: [rows], of the tokens that the rows decode.

    Returns:
        Their sum over rows and heads; traceable.
    """
    first_tokens = (positions - (window - 1)).clamp(min=0)
    has_first_page = selected_pages[:, :, 0] == (first_tokens // page_size)[:, None]
    return ((first_tokens % page_size)[:, None] * has_first_page).sum()
