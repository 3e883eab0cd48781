"""The dense prefill of a sample's context, done once, and what every method begins with.

The prefill runs in pages of the model's own type with a budget that covers everything, so it is dense
whatever the methods do later. A method with the same page format shares its pages, copy-on-write; for another
format the keys and values are copied into a cache of that format, which seals its own summaries.

A policy that evicts has to see the prompt's queries. One that looks at the prompt's end only (its observation
`window`) begins with what lies before and is shown the rest of the prompt as one dense piece; one that counts
every query is shown the whole prompt. Both know the question when they choose, as in their papers: all of the
prompt but its last token is their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinyserve.decode import PREFILL_CHUNK
from tinyserve.eval.batch import EvalBatch
from tinyserve.eval.methods import Method, PageFormat
from tinyserve.progress import bar
from tinyserve_ops import PagedKVCache, SparseConfig
from tinyserve_ops.hf import new_paged_cache
from tinyserve_ops.policies import EvictionPolicy

__all__ = ["Beginning", "Prefix", "observation_window", "prefill"]


def observation_window(rule: EvictionPolicy) -> int | None:
    """How many of the prompt's last queries a rule has to see; None for all of them."""
    window: int | None = None if rule.per_step else getattr(rule, "window", None)
    return window


def prefill(
    batch: EvalBatch, seq: int, token_ids: Sequence[int], *, prompt_goes_on: bool = False
) -> torch.Tensor:
    """Stores tokens densely, chunk by chunk; logits behind the last of them (at least one token).

    No chunk has a single token, which would be a step of its own, unless there is only one in all. The caller
    holds `torch.inference_mode()`.
    """
    with bar("prefill", total=len(token_ids), unit=" tokens", delay=5.0) as progress:
        start = 0
        while start < len(token_ids):
            stop = min(start + PREFILL_CHUNK, len(token_ids))
            stop -= len(token_ids) - stop == 1  # leaves two for the last chunk
            goes_on = prompt_goes_on or stop < len(token_ids)
            logits = batch.feed(seq, token_ids[start:stop], prompt_goes_on=goes_on)
            progress.update(stop - start)
            start = stop
    return logits


@dataclass(frozen=True)
class Beginning:
    """Where a method begins.

    Attributes:
        kv, seq: its cache, and the sequence in it.
        num_stored: tokens of the prompt that the sequence holds.
        num_dense: tokens of the prompt up to which it is dense: those after the stored ones are still to be
            fed, as the end of the policy's prompt.
        logits: behind the stored tokens; None where some are still to be fed.
        full: a cache without policy and a sequence with the same tokens, where the policy evicts.
    """

    kv: PagedKVCache
    seq: int
    num_stored: int
    num_dense: int
    logits: torch.Tensor | None = None
    full: tuple[PagedKVCache, int] | None = None


class Prefix:
    """The context of one sample.

    Args:
        model: an enabled model.
        prompt_ids: of the sample.
        num_dense: tokens of it that are prefilled; at least one is, because the first token of a text attends
            to itself only.
        base: a method whose page format the prefill uses: an exact one, without eviction.
        window: the largest observation window among the methods; 0 without any.
        max_tokens: what the pools are made for, forks included; they grow past it.
    """

    def __init__(
        self,
        model: Any,
        prompt_ids: Sequence[int],
        num_dense: int,
        base: Method,
        *,
        window: int,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._prompt_ids = prompt_ids
        self._num_dense = max(num_dense, 1)
        self._max_tokens = max_tokens
        everything = base.config.replace(keep_ratio=1.0)
        self._base = new_paged_cache(model, everything, max_tokens=max_tokens)
        self._format = base.page_format(self._base.num_layers)
        self._seq = self._base.new_sequence()
        self._open: int | None = None  # what lies before every observation window, as a prompt that goes on
        batch = EvalBatch(model, self._base)
        num_open = min(self._num_dense - 1, len(prompt_ids) - 1 - window) if window else 0
        if num_open > 0:
            prefill(batch, self._seq, prompt_ids[:num_open], prompt_goes_on=True)
            self._open = self._base.fork(self._seq)
        self._logits = prefill(batch, self._seq, prompt_ids[max(num_open, 0) : self._num_dense])
        self._copies: dict[PageFormat, tuple[PagedKVCache, int]] = {}

    def begin(self, method: Method, config: SparseConfig, *, wants_full: bool) -> Beginning:
        """A cache of `method` with the settings `config`, which differ from the method's in what is recorded.

        Args:
            wants_full: give the full cache of a policy that evicts.
        """
        if method.eviction is not None:
            return self._begin_evicting(method, method.eviction, config, wants_full)
        source, seq = self._of_format(method)
        kv = _sharing(source, config, method)
        return Beginning(kv, kv.adopt(source, seq), self._num_dense, self._num_dense, self._logits)

    def _begin_evicting(
        self, method: Method, rule: EvictionPolicy, config: SparseConfig, wants_full: bool
    ) -> Beginning:
        num_dense = max(len(self._prompt_ids) - 1, 1)
        kv = new_paged_cache(
            self._model,
            config,
            max_tokens=self._max_tokens,
            policy=method.executed_policy,
            plugins=method.plugins,
        )
        full = _sharing(self._base, self._base.config, None) if wants_full else None
        if self._open is None or observation_window(rule) is None:
            no_tokens = None if full is None else (full, full.new_sequence())
            return Beginning(kv, kv.new_sequence(), 0, num_dense, full=no_tokens)
        same_tokens = None if full is None else (full, full.adopt(self._base, self._open))
        num_stored = self._base.length(self._open)
        return Beginning(kv, kv.adopt(self._base, self._open), num_stored, num_dense, full=same_tokens)

    def _of_format(self, method: Method) -> tuple[PagedKVCache, int]:
        wanted = method.page_format(self._base.num_layers)
        if wanted == self._format:
            return self._base, self._seq
        if wanted not in self._copies:
            copy = new_paged_cache(self._model, method.config, max_tokens=self._max_tokens)
            self._copies[wanted] = (copy, copy.adopt(self._base, self._seq))
        return self._copies[wanted]

    def forget_copies(self) -> None:
        """Lets the copies in other formats go; those that began from one keep its pages."""
        self._copies.clear()


def _sharing(source: PagedKVCache, config: SparseConfig, method: Method | None) -> PagedKVCache:
    """An empty cache over the pool of `source`, with policy and plugins of a method."""
    return PagedKVCache(
        source.num_layers,
        source.num_kv_heads,
        source.head_dim,
        config=config,
        dtype=source.dtype,
        device=source.device,
        fingerprint=source.fingerprint,
        pool=source.pool,
        policy=None if method is None else method.executed_policy,
        plugins=None if method is None else method.plugins,
    )
