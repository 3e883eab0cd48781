"""Probes: they look at the layers of a method's forwards and sum up `StepMeasures`.

A probe costs a pass over all keys per layer and step, so only the first steps of a sample are measured. It
changes nothing of what the method computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from tinyserve.eval.measures import StepMeasures, mass_of_best, mean
from tinyserve_ops import PagedKVCache, ops
from tinyserve_ops.forward import ForwardBatch, append_tokens

__all__ = ["EvictionProbe", "SelectionProbe", "StepProbe"]


class StepProbe(Protocol):
    """A `LayerProbe` that sums up steps. Sequences that are forked while it looks are made known to it."""

    def observe(
        self,
        forward: ForwardBatch,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float,
        window: int,
    ) -> None: ...

    def fork(self, seq: int, fork: int) -> None:
        """`fork` goes on where `seq` stands."""
        ...

    def free(self, seq: int) -> None:
        """The sequence is gone."""
        ...

    def finish_step(self) -> StepMeasures:
        """The measures of the single-token step whose layers were observed since the last call."""
        ...


class _Counters:
    """What the cache counted since the last look."""

    def __init__(self, kv: PagedKVCache) -> None:
        self._kv = kv
        self._before = self._now()

    def restart(self) -> None:
        self._before = self._now()

    def measures(self, layers: Sequence[tuple[float, float, float | None, float | None]]) -> StepMeasures:
        """The measures of a step, to which each layer gives recall, oracle's recall, hit and reuse rate."""
        now = self._now()
        tokens, kv_bytes, summary_bytes = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        recall, oracle_recall, hit_rate, reuse_rate = list(zip(*layers, strict=True)) or [()] * 4
        return StepMeasures(
            recall=mean(recall),
            oracle_recall=mean(oracle_recall),
            hit_rate=mean(hit_rate),
            reuse_rate=mean(reuse_rate),
            tokens_attended=tokens / (self._kv.num_layers * self._kv.num_kv_heads),
            kv_bytes=kv_bytes,
            summary_bytes=summary_bytes,
        )

    def _now(self) -> tuple[int, int, int]:
        stats = self._kv.stats()
        return stats.tokens_attended, stats.kv_bytes_read, stats.summary_bytes_read


class SelectionProbe:
    """Measures steps whose cache keeps every token, and reads the pages that it recorded.

    Args:
        kv: the cache, with `record_selection`.
    """

    def __init__(self, kv: PagedKVCache) -> None:
        self._kv = kv
        self._counters = _Counters(kv)
        self._layers: list[tuple[float, float, float | None, float | None]] = []
        # Sequence -> layer -> which pages its last step selected, bool [num_kv_heads, pages].
        self._selected: dict[int, dict[int, torch.Tensor]] = {}

    def fork(self, seq: int, fork: int) -> None:
        """See `StepProbe`."""
        self._selected[fork] = dict(self._selected.get(seq, {}))

    def free(self, seq: int) -> None:
        """See `StepProbe`."""
        self._selected.pop(seq, None)

    def finish_step(self) -> StepMeasures:
        """See `StepProbe`."""
        layers, self._layers = self._layers, []
        return self._counters.measures(layers)

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
        selected = selected_pages(self._kv, layer_idx)
        if selected is None:  # a dense layer
            return
        mass = mass_by_group(*attention_by_page(self._kv, forward, layer_idx, q, sm_scale, window), self._kv)
        num_pages = (selected >= 0).sum(dim=1)
        # One column more, for the padding -1.
        is_selected = torch.zeros(mass.size(0), mass.size(1) + 1, dtype=torch.bool, device=mass.device)
        is_selected = is_selected.scatter_(1, selected.long() % is_selected.size(1), True)[:, :-1]
        ceiling, is_best = mass_of_best(mass, num_pages)
        kept = (mass * is_selected).sum(dim=1)
        hits = (is_best & is_selected).sum(dim=1) / num_pages
        before = self._selected.setdefault(forward.sequences[0], {})
        reuse = None
        if layer_idx in before:
            width = min(before[layer_idx].size(1), mass.size(1))
            same = before[layer_idx][:, :width] & is_selected[:, :width]
            reuse = float((same.sum(dim=1) / num_pages).mean())
        before[layer_idx] = is_selected
        self._layers.append((float(kept.mean()), float(ceiling.mean()), float(hits.mean()), reuse))


class EvictionProbe:
    """Measures steps whose cache has lost tokens, against a full cache that is given the same keys.

    Observes from the moment on at which both hold the same tokens. What is kept are tokens, not pages, so the
    ceiling, which takes as many whole pages as hold that many tokens, may be passed.

    Args:
        kv: the cache of the policy.
        seq: its sequence.
        full: a cache without policy, and its sequence that holds the same tokens.
    """

    def __init__(self, kv: PagedKVCache, seq: int, full: tuple[PagedKVCache, int]) -> None:
        self._kv = kv
        self._full = full[0]
        self._twin = {seq: full[1]}
        self._counters = _Counters(kv)
        self._layers: list[tuple[float, float, float | None, float | None]] = []

    def fork(self, seq: int, fork: int) -> None:
        """See `StepProbe`."""
        self._twin[fork] = self._full.fork(self._twin[seq])

    def free(self, seq: int) -> None:
        """See `StepProbe`."""
        self._full.free(self._twin.pop(seq))

    def finish_step(self) -> StepMeasures:
        """See `StepProbe`."""
        layers, self._layers = self._layers, []
        return self._counters.measures(layers)

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
        """See `LayerProbe`. A forward of several tokens is part of the prompt: only its keys are taken."""
        full = self._full
        twin = full.open_forward
        if layer_idx == 0 or twin is None:
            twin = full.begin([(self._twin[forward.sequences[0]], forward.num_tokens)])
        group = full.group_of_layer[layer_idx]
        tables = twin.cu_query_lens, twin.seq_lens(group), twin.page_table(group)
        append_tokens(full.pool.layers[layer_idx], k, v, *tables)
        if forward.is_decode and layer_idx >= self._kv.config.dense_layers:
            lse, page_lse = attention_by_page(full, twin, layer_idx, q, sm_scale, window)
            own_lse, own_page_lse = attention_by_page(self._kv, forward, layer_idx, q, sm_scale, window)
            mass = mass_by_group(lse, page_lse, full)
            selected = selected_pages(self._kv, layer_idx)
            if selected is None:
                num_stored = int(forward.seq_lens(self._kv.group_of_layer[layer_idx])[0]) + 1
                num_pages = torch.full((mass.size(0),), -(-num_stored // full.config.page_size))
            else:  # a plugin evicts, and the policy selects among what is left
                num_pages = (selected >= 0).sum(dim=1)
                index = selected.clamp(min=0).long().repeat_interleave(q.size(1) // selected.size(0), dim=0)
                read = own_page_lse.gather(1, index).masked_fill(
                    selected.repeat_interleave(q.size(1) // selected.size(0), dim=0) < 0, -torch.inf
                )
                own_lse = read.logsumexp(dim=1)
            kept = (own_lse - lse).exp().mean()
            ceiling, _ = mass_of_best(mass, num_pages.to(mass.device))
            self._layers.append((float(kept), float(ceiling.mean()), None, None))
        if layer_idx == full.num_layers - 1:
            twin.commit(allow_missing_layers=True)
            if not forward.is_decode:
                self._counters.restart()


def selected_pages(kv: PagedKVCache, layer_idx: int) -> torch.Tensor | None:
    """What the step under way has selected in a layer, [num_kv_heads, width], -1 padded; None of a dense
    layer.

    Args:
        kv: with `record_selection`.
    """
    history = kv.recorder.history
    recorded = history[-1].selected_pages.get(layer_idx) if history else None
    return None if recorded is None else recorded[0]


def attention_by_page(
    kv: PagedKVCache, forward: ForwardBatch, layer_idx: int, q: torch.Tensor, sm_scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp over all that a single token sees of a cache, [num_heads], and of each page, [num_heads,
    pages].

    Args:
        forward: of `kv`, with the token's key and value stored.
        q: [1, num_heads, head_dim].
    """
    group = kv.group_of_layer[layer_idx]
    _, lse, page_lse = ops.attend_pages(
        q,
        forward.cu_query_lens,
        forward.seq_lens(group),
        forward.page_table(group),
        *kv.pool.layers[layer_idx].parts[:-1],
        None,
        None,
        sm_scale,
        window,
        return_page_lse=True,
    )
    page_lse = page_lse[0]
    if window > 0:  # entry i is the i-th visible page: move it to its place
        first_page = max(0, int(forward.seq_lens(group)[0]) - window + 1) // kv.config.page_size
        page_lse = functional.pad(page_lse, (first_page, 0), value=-torch.inf)[:, : page_lse.size(1)]
    return lse[0], page_lse


def mass_by_group(lse: torch.Tensor, page_lse: torch.Tensor, kv: PagedKVCache) -> torch.Tensor:
    """Attention mass of every page, mean over the query heads of a kv head: [num_kv_heads, pages], rows sum
    to 1.
    """
    return (page_lse - lse[:, None]).exp().unflatten(0, (kv.num_kv_heads, -1)).mean(dim=1)
