"""`ForwardBatch`: one forward of the model over a ragged batch, from `PagedKVCache.begin` to `commit`.

The only place that decides which op serves a row: rows with one new token go to `sparse_decode`, or to
`attend_pages` in dense layers; rows with several go to `prefill_attention`; rows that a selection policy
rules over go to `attend_pages` with the lists it chose, a list for each token. An eviction policy sees the
tokens of each layer after they were attended. The plan (which rows, which slices) is made once per forward.
Until `commit` the cache's lengths are those from before, so a forward that
fails half-way leaves nothing to undo.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from tinyserve_ops import ops
from tinyserve_ops.batch_parts import BatchPart, Rows, TokenPart
from tinyserve_ops.eviction import EvictionRun
from tinyserve_ops.layer_pool import LayerPool
from tinyserve_ops.plugins.base import Selection
from tinyserve_ops.policies.base import TokenRows
from tinyserve_ops.pool_ops import append_tokens, attend_listed, attend_sparse, check_new

if TYPE_CHECKING:
    from tinyserve_ops.batch_tables import BatchState
    from tinyserve_ops.cache import PagedKVCache
    from tinyserve_ops.sequences import SequenceRecord

__all__ = ["ForwardBatch"]


class _Kind(Enum):
    """How the rows of a part attend."""

    DECODE = 0  # one new token each: fused selection, or everything
    PREFILL = 1  # several new tokens each: everything
    SELECT = 2  # each token over the pages that the cache's policy selects


_DECODE, _PREFILL, _SELECT = _Kind  # looked at in every layer: a global is cheaper than a member


class ForwardBatch:
    """The new tokens of some sequences, packed one sequence after the other. Made by `PagedKVCache.begin`.

    Attributes:
        sequences: handle of each row.
        num_new: new tokens of each row.
        num_tokens: their sum.
        is_decode: every row has exactly one new token.
        cu_query_lens: int32 [batch + 1], where each row's tokens start in the packed tensors.
        prompt_goes_on: sequences whose prompt does not end with this forward.
        all_left: a plugin has let every token leave the model; what is missing are its keys and values in the
            layers to come, which `store` takes.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        state: BatchState,
        num_new: list[int],
        records: list[SequenceRecord],
        *,
        dense: bool,
        prompt_goes_on: Collection[int] = (),
    ) -> None:
        # Weak, because the cache holds its open forward: a cycle would keep the pool's tensors until the
        # cycle collector runs. None when closed.
        self._cache: weakref.ref[PagedKVCache] | None = weakref.ref(cache)
        self._state = state
        self._config = cache.config
        self._stats = cache.recorder
        self._layers = cache.pool.layers
        self._group_of = cache.group_of_layer
        self._dense_layers = cache.num_layers if dense else cache.plan.dense_layers
        self._policy = None if dense else cache.plan.selection
        self.sequences = state.sequences
        self.num_new = tuple(num_new)
        self.num_tokens = sum(num_new)
        self.prompt_goes_on = frozenset(prompt_goes_on)
        batch = len(num_new)
        self.is_decode = batch > 0 and self.num_tokens == batch and all(n == 1 for n in num_new)
        self._attended = bytearray(cache.num_layers)
        # None where there are none, and in forwards that must read everything.
        self._plugins = None if dense else cache.plugin_stack
        self._records = records
        self._left: torch.Tensor | None = None  # tokens that left the model, bool [num_tokens]
        self.all_left = False
        if cache.plugin_stack is not None:
            for record in records:
                full = [length // cache.config.page_size for length in record.lengths(cache.pool)]
                cache.plugin_stack.resume(record, full, self._group_of)
        if self.is_decode:
            self.host_cu_query_lens = list(range(batch + 1))
            self.cu_query_lens = state.decode_cu_query_lens
        else:
            self.host_cu_query_lens = [0, *accumulate(num_new)]
            self.cu_query_lens = torch.tensor(self.host_cu_query_lens, dtype=torch.int32, device=cache.device)
        if self.is_decode and self._policy is None:
            self._parts = [(BatchPart(self, list(range(batch)), True), _DECODE)]
        else:
            self._parts = self._split([record.in_prompt for record in records])
        # None where no policy wants to see these tokens. A window counts stored tokens, so it means nothing
        # where some are gone.
        self.eviction: EvictionRun | None = None
        self._refuses_window = any(record.frontier for record in records)
        if cache.plan.eviction is not None:
            self._refuses_window = True
            self.eviction = EvictionRun(cache, cache.plan.eviction, self, records) or None

    def _split(self, in_prompt: list[bool]) -> list[tuple[BatchPart, _Kind]]:
        """The parts that have tokens."""
        kinds: dict[_Kind, list[int]] = {kind: [] for kind in _Kind}
        policy = self._policy
        for row, n in enumerate(self.num_new):
            if n and policy is not None and (not in_prompt[row] if policy.per_token else n == 1):
                kinds[_SELECT].append(row)
            elif n:  # a prompt of one token is dense like any other, where the policy knows prompts
                kinds[_DECODE if n == 1 and policy is None else _PREFILL].append(row)
        whole = sum(map(bool, kinds.values())) == 1  # rows without tokens may stay in any part
        parts: list[tuple[BatchPart, _Kind]] = []
        for kind, busy_rows in kinds.items():
            if busy_rows:
                rows = list(range(len(self.num_new))) if whole else busy_rows
                if kind is _SELECT and any(self.num_new[row] > 1 for row in rows):
                    parts.append((TokenPart(self, rows, whole, self._config), kind))
                else:
                    parts.append((BatchPart(self, rows, whole), kind))
        return parts

    @property
    def is_open(self) -> bool:
        """Neither committed nor abandoned, and its cache is still there."""
        return self._cache is not None and self._cache() is not None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Stored length of each row before this forward (of the first layer group)."""
        return tuple(self._state.tables[0].lengths)

    def seq_lens(self, group: int = 0) -> torch.Tensor:
        """Stored lengths before this forward, int32 [batch]; valid until the next `begin`."""
        return self._state.tables[group].seq_lens

    def page_table(self, group: int = 0) -> torch.Tensor:
        """Page ids by row, int32 [batch, width], -1 where none; valid until the next `begin`."""
        return self._state.tables[group].page_table

    def positions(self) -> torch.Tensor:
        """Position of each packed token, int64 [num_tokens]: from `next_position` of its sequence on."""
        cache = self._open_cache("positions")
        starts = [cache.next_position(seq) for seq in self.sequences]
        values = [p for start, n in zip(starts, self.num_new, strict=True) for p in range(start, start + n)]
        return torch.tensor(values, dtype=torch.int64, device=cache.device)

    def last_token_indices(self) -> torch.Tensor:
        """Packed index of the last new token of each row that has any, int64: where logits are read."""
        ends = [self.host_cu_query_lens[row + 1] - 1 for row, n in enumerate(self.num_new) if n]
        return torch.tensor(ends, dtype=torch.int64, device=self.cu_query_lens.device)

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float,
        window: int = -1,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Appends the new keys and values of a layer to its pages, then attends.

        Args:
            layer_idx: layer of the model.
            q: [num_tokens, num_heads, head_dim], head_dim stride 1, other strides free.
            k, v: [num_tokens, num_kv_heads, head_dim], likewise.
            sm_scale: multiplies q.k.
            window: tokens visible to a query, itself included; -1 for all.
            softcap: refused unless 0.

        Returns:
            [num_tokens, num_heads, head_dim], of q's dtype.

        Raises:
            RuntimeError: the forward is no longer open, or its cache is gone.
            ValueError: an argument that does not fit, by name.
        """
        self._check_layer("attend", layer_idx, q, k, v)
        if self._refuses_window and window > 0:
            raise ValueError(
                f"window: expected -1 where tokens are evicted, got a sliding window of {window}"
            )
        group = self._group_of[layer_idx]
        tables = self._state.tables[group]
        pool = self._layers[layer_idx]
        append_tokens(pool, k, v, self.cu_query_lens, tables.seq_lens, tables.page_table)
        parts = self._parts
        out: torch.Tensor | None = None
        for part, kind in parts:
            rows, lengths = part.of_group(group, tables)
            part_q = part.take(q)
            sparse = layer_idx >= self._dense_layers
            if kind is _DECODE and sparse:
                part_out, selected_pages, num_selected = attend_sparse(
                    part_q, part.cu_query_lens, rows, pool, self._config, sm_scale, window, softcap
                )
                self._stats.record_sparse(
                    layer_idx, pool, part.sequences, lengths, window, selected_pages, num_selected
                )
            elif kind is not _PREFILL and not sparse:
                part_out, _ = attend_listed(
                    part_q, part.cu_query_lens, rows, pool, None, None, sm_scale, window, softcap
                )
                self._stats.record_dense(pool, lengths, window)
            elif kind is _SELECT:
                part_out = self._attend_selected(
                    layer_idx, part, rows, lengths, part_q, pool, sm_scale, window, softcap
                )
            else:
                part_out, _ = ops.prefill_attention(
                    part_q,
                    part.take(k),
                    part.take(v),
                    part.cu_query_lens,
                    rows[0],
                    rows[1],
                    pool.k_pages,
                    pool.v_pages,
                    pool.k_scales,
                    pool.v_scales,
                    sm_scale,
                    window,
                    softcap,
                )
            if part.tokens is None:
                out = part_out
            else:
                if out is None:
                    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
                out[part.tokens] = part_out
        if self.eviction is not None and out is not None:
            self.eviction.observe(layer_idx, group, self, tables, q, out, sm_scale)
        self._attended[layer_idx] = 1
        return torch.empty_like(q) if out is None else out

    def store(self, layer_idx: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Appends the new keys and values of a layer whose attention is not computed: its tokens have left
        the model. Arguments and errors as for `attend`.
        """
        self._check_layer("store", layer_idx, k, k, v)
        tables = self._state.tables[self._group_of[layer_idx]]
        append_tokens(self._layers[layer_idx], k, v, self.cu_query_lens, tables.seq_lens, tables.page_table)
        if self._plugins is not None:
            self._plugins.tokens_left(0, self.num_tokens)
        self._attended[layer_idx] = 1

    @property
    def logit_layers(self) -> frozenset[int]:
        """Layers after which a plugin wants to see logits (`logits_ready`)."""
        return frozenset() if self._plugins is None else self._plugins.logit_layers

    def tokens_to_ask(self) -> torch.Tensor:
        """Packed indices of the tokens that a plugin may let leave: those after the prompt that are still in
        the model.
        """
        starts = self.host_cu_query_lens
        asked = [
            token
            for row, record in enumerate(self._records)
            if not record.in_prompt
            for token in range(starts[row], starts[row + 1])
        ]
        tokens = torch.tensor(asked, dtype=torch.int64, device=self.cu_query_lens.device)
        return tokens if self._left is None else tokens[~self._left[tokens]]

    def logits_ready(self, layer_idx: int, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Asks the plugins which tokens leave the model after a layer.

        Args:
            tokens: `tokens_to_ask()`.
            logits: [len(tokens), vocabulary], if the model ended with this layer.
        """
        assert self._plugins is not None
        leaving = self._plugins.logits_ready(layer_idx, logits)
        if leaving is None or not bool(leaving.any()):
            return
        left = torch.zeros(self.num_tokens, dtype=torch.bool, device=tokens.device)
        if self._left is not None:
            left |= self._left
        left[tokens[leaving]] = True
        self._left, self.all_left = left, bool(left.all())

    def tokens_left(self) -> torch.Tensor | None:
        """Tokens that have left the model while others go on, bool [num_tokens]: what a layer that was
        computed for all made of them is dropped. None where no token has.
        """
        if self._left is not None and self._plugins is not None:
            self._plugins.tokens_left(int(self._left.sum()), 0)
        return self._left

    def _check_layer(
        self, action: str, layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        if self._cache is None or self._cache() is None:
            self._open_cache(action)  # raises
        num_tokens = self.num_tokens
        if not (q.size(0) == k.size(0) == v.size(0) == num_tokens):
            raise ValueError(
                f"q, k, v: expected {num_tokens} packed tokens, got shapes {tuple(q.shape)}, "
                f"{tuple(k.shape)}, {tuple(v.shape)}"
            )
        if not 0 <= layer_idx < len(self._attended):
            raise ValueError(f"layer_idx: expected 0 to {len(self._attended) - 1}, got {layer_idx}")
        check_new(self._layers[layer_idx], q, k, v)

    def _attend_selected(
        self,
        layer_idx: int,
        part: BatchPart,
        rows: Rows,
        lengths: tuple[int, ...],
        q: torch.Tensor,
        pool: LayerPool,
        sm_scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of rows over the pages that the policy selects, stage by stage: score, select, attend."""
        policy = self._policy
        assert policy is not None
        seq_lens, page_table, page_budget, max_page_budget = rows
        view = TokenRows(
            layer_idx,
            q,
            part.cu_query_lens,
            seq_lens,
            page_table,
            page_budget,
            max_page_budget,
            pool,
            self._config,
            sm_scale,
            window,
        )
        plugins = self._plugins
        page_scores = policy.score(view)
        if plugins is not None:
            records = self._records_of(part)
            page_scores = plugins.pages_scored(view, lengths, records, page_scores)
        selected_pages, num_selected = policy.select(view, page_scores)
        estimates: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        if plugins is not None:
            selection = plugins.pages_selected(
                view, lengths, records, page_scores, Selection(selected_pages, num_selected)
            )
            selected_pages, num_selected = selection.selected_pages, selection.num_selected
            estimates = selection.estimates
        out, lse = attend_listed(
            q, part.cu_query_lens, rows, pool, selected_pages, num_selected, sm_scale, window, softcap
        )
        self._stats.record_sparse(
            layer_idx,
            pool,
            part.sequences,
            lengths,
            window,
            selected_pages,
            num_selected,
            scans_summaries=policy.scans_summaries,
        )
        if estimates:
            outs, lses = zip((out, lse), *estimates, strict=True)
            out, _ = ops.merge_states(torch.stack(outs), torch.stack(lses))
        return out

    def _records_of(self, part: BatchPart) -> list[SequenceRecord]:
        """Record of each row of a part."""
        by_sequence = dict(zip(self.sequences, self._records, strict=True))
        return [by_sequence[seq] for seq in part.sequences]

    def commit(self, *, allow_missing_layers: bool = False) -> None:
        """Advances length and next position of every row by its new tokens. Called once, after the last
        layer.

        Args:
            allow_missing_layers: accept layers that did not attend (a model left early); their new tokens are
                garbage.

        Raises:
            RuntimeError: the forward is not open, or a layer is missing.
            OutOfPagesError: the policy evicts tokens, and there are no pages for those that stay; the forward
                has not happened.
        """
        cache = self._open_cache("commit")
        if not allow_missing_layers and self.num_tokens and not all(self._attended):
            missing = [layer for layer, done in enumerate(self._attended) if not done]
            raise RuntimeError(f"commit: expected every layer to have attended, got none of layers {missing}")
        self._cache = None
        cache.finish_forward(self, committed=True)
        if any(self._attended):
            self._stats.prefill_tokens += sum(n for n in self.num_new if n > 1)

    def abandon(self) -> None:
        """Closes the forward and gives its pages back; nothing advances. No-op when closed."""
        cache = None if self._cache is None else self._cache()
        self._cache = None
        if cache is not None:
            cache.finish_forward(self, committed=False)

    def _open_cache(self, action: str) -> PagedKVCache:
        if self._cache is None:
            raise RuntimeError(f"{action}: expected an open forward, got one that was committed or abandoned")
        cache = self._cache()
        if cache is None:
            raise RuntimeError(f"{action}: expected a forward of a live cache, got one whose cache is gone")
        return cache
