"""`ForwardBatch`: one forward of the model over a ragged batch, from `PagedKVCache.begin` to `commit`.

The only place that decides which op serves a row: rows with one new token go to `sparse_decode`, or to
`attend_pages` in dense layers; rows with several go to `prefill_attention`. The plan (which rows, which
slices) is made once per forward. Until `commit` the cache's lengths are those from before, so a forward that
fails half-way leaves nothing to undo.
"""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from tinyserve_ops import ops
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.layer_pool import LayerPool

if TYPE_CHECKING:
    from tinyserve_ops.batch_tables import BatchState, BatchTables
    from tinyserve_ops.cache import PagedKVCache

__all__ = ["ForwardBatch", "append_tokens", "attend_decode"]


def append_tokens(
    pool: LayerPool,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Writes the packed new keys and values of one layer into its pool. Arguments as for `ops.append_kv`."""
    ops.append_kv(
        k,
        v,
        cu_query_lens,
        seq_lens,
        page_table,
        pool.k_pages,
        pool.v_pages,
        pool.k_scales,
        pool.v_scales,
        pool.page_summary,
        pool.scorer,
    )


def attend_decode(
    q: torch.Tensor,
    cu_query_lens: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
    pool: LayerPool,
    config: SparseConfig,
    sparse: bool,
    sm_scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Attention of single-token rows whose token is already appended.

    Args:
        q: [num_tokens, num_heads, head_dim].
        cu_query_lens: int32 [batch + 1].
        rows: `seq_lens`, `page_table`, `page_budget`, `max_page_budget` of the batch.
        sparse: select pages by `config`, or read them all.

    Returns:
        The output like `q`, then `selected_pages` and `num_selected` of a sparse call, None of a dense one.
    """
    seq_lens, page_table, page_budget, max_page_budget = rows
    if sparse:
        out, _, selected_pages, num_selected = ops.sparse_decode(
            q,
            cu_query_lens,
            seq_lens,
            page_table,
            pool.k_pages,
            pool.v_pages,
            pool.k_scales,
            pool.v_scales,
            pool.page_summary,
            page_budget,
            max_page_budget,
            pool.scorer,
            config.op_group_reduction,
            sm_scale,
            config.num_sink_pages,
            config.num_recent_pages,
            window,
            softcap,
        )
        return out, selected_pages, num_selected
    out, _, _ = ops.attend_pages(
        q,
        cu_query_lens,
        seq_lens,
        page_table,
        pool.k_pages,
        pool.v_pages,
        pool.k_scales,
        pool.v_scales,
        None,
        None,
        sm_scale,
        window,
        softcap,
    )
    return out, None, None


class _Part:
    """Rows of one kind within a forward, and where their tokens lie.

    `tokens` is None for the whole batch, a slice where the rows are neighbours (no copy of q), else an index
    tensor.
    """

    def __init__(self, batch: ForwardBatch, rows: list[int], whole: bool) -> None:
        starts = batch.host_cu_query_lens
        num_new = batch.num_new
        busy_rows = [row for row in rows if num_new[row]]
        self.sequences = tuple(batch.sequences[row] for row in busy_rows)
        self._rows = rows
        self._busy_rows = busy_rows
        self.tokens: slice | torch.Tensor | None = None
        self._row_index: slice | torch.Tensor | None = None
        self.cu_query_lens = batch.cu_query_lens
        self._groups: dict[
            int, tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[int, ...]]
        ] = {}
        if whole:
            return
        device = batch.cu_query_lens.device
        if rows[-1] - rows[0] + 1 == len(rows):
            self._row_index = slice(rows[0], rows[-1] + 1)
            self.tokens = slice(starts[rows[0]], starts[rows[-1] + 1])
        else:
            self._row_index = torch.tensor(rows, device=device)
            token_list = [t for row in rows for t in range(starts[row], starts[row + 1])]
            self.tokens = torch.tensor(token_list, device=device)
        lens = [0, *accumulate(num_new[row] for row in rows)]
        self.cu_query_lens = torch.tensor(lens, dtype=torch.int32, device=device)

    def of_group(
        self, group: int, tables: BatchTables
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[int, ...]]:
        """`seq_lens, page_table, page_budget, max_page_budget` of these rows in a group, and host lengths."""
        found = self._groups.get(group)
        if found is None:
            index = self._row_index
            tensors = (tables.seq_lens, tables.page_table, tables.page_budget)
            if index is not None:
                tensors = (tensors[0][index], tensors[1][index], tensors[2][index])
            lengths = tuple(tables.lengths[row] for row in self._busy_rows)
            found = self._groups[group] = ((*tensors, tables.max_page_budget), lengths)
        return found

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The packed tokens of these rows."""
        return tensor if self.tokens is None else tensor[self.tokens]


class ForwardBatch:
    """The new tokens of some sequences, packed one sequence after the other. Made by `PagedKVCache.begin`.

    Attributes:
        sequences: handle of each row.
        num_new: new tokens of each row.
        num_tokens: their sum.
        is_decode: every row has exactly one new token.
        cu_query_lens: int32 [batch + 1], where each row's tokens start in the packed tensors.
    """

    def __init__(self, cache: PagedKVCache, state: BatchState, num_new: list[int], *, dense: bool) -> None:
        # Weak, because the cache holds its open forward: a cycle would keep the pool's tensors until the
        # cycle collector runs. None when closed.
        self._cache: weakref.ref[PagedKVCache] | None = weakref.ref(cache)
        self._state = state
        self._config = cache.config
        self._stats = cache.recorder
        self._layers = cache.pool.layers
        self._group_of = cache.group_of_layer
        self._dense_layers = cache.num_layers if dense else cache.config.dense_layers
        self.sequences = state.sequences
        self.num_new = tuple(num_new)
        self.num_tokens = sum(num_new)
        batch = len(num_new)
        self.is_decode = batch > 0 and self.num_tokens == batch and all(n == 1 for n in num_new)
        self._attended = bytearray(cache.num_layers)
        if self.is_decode:
            self.host_cu_query_lens = list(range(batch + 1))
            self.cu_query_lens = state.decode_cu_query_lens
            self._parts = [(_Part(self, list(range(batch)), True), True)]
        else:
            self.host_cu_query_lens = [0, *accumulate(num_new)]
            self.cu_query_lens = torch.tensor(self.host_cu_query_lens, dtype=torch.int32, device=cache.device)
            self._parts = self._split()

    def _split(self) -> list[tuple[_Part, bool]]:
        """The parts that have tokens, each with whether it is of single-token rows."""
        decode_rows = [row for row, n in enumerate(self.num_new) if n == 1]
        prefill_rows = [row for row, n in enumerate(self.num_new) if n > 1]
        whole = not (decode_rows and prefill_rows)  # rows without tokens may stay in either
        parts = []
        for rows, is_decode in ((decode_rows, True), (prefill_rows, False)):
            if rows:
                parts.append(
                    (_Part(self, list(range(len(self.num_new))) if whole else rows, whole), is_decode)
                )
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
        self._open_cache("attend")
        num_tokens = self.num_tokens
        if not (q.size(0) == k.size(0) == v.size(0) == num_tokens):
            raise ValueError(
                f"q, k, v: expected {num_tokens} packed tokens, got shapes {tuple(q.shape)}, "
                f"{tuple(k.shape)}, {tuple(v.shape)}"
            )
        if not 0 <= layer_idx < len(self._attended):
            raise ValueError(f"layer_idx: expected 0 to {len(self._attended) - 1}, got {layer_idx}")
        group = self._group_of[layer_idx]
        tables = self._state.tables[group]
        pool = self._layers[layer_idx]
        append_tokens(pool, k, v, self.cu_query_lens, tables.seq_lens, tables.page_table)
        parts = self._parts
        out: torch.Tensor | None = None
        for part, is_decode in parts:
            rows, lengths = part.of_group(group, tables)
            part_q = part.take(q)
            if is_decode:
                sparse = layer_idx >= self._dense_layers
                part_out, selected_pages, num_selected = attend_decode(
                    part_q, part.cu_query_lens, rows, pool, self._config, sparse, sm_scale, window, softcap
                )
                if selected_pages is not None and num_selected is not None:
                    self._stats.record_sparse(
                        layer_idx, pool, part.sequences, lengths, window, selected_pages, num_selected
                    )
                else:
                    self._stats.record_dense(pool, lengths, window)
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
        self._attended[layer_idx] = 1
        return torch.empty_like(q) if out is None else out

    def commit(self, *, allow_missing_layers: bool = False) -> None:
        """Advances length and next position of every row by its new tokens. Called once, after the last
        layer.

        Args:
            allow_missing_layers: accept layers that did not attend (a model left early); their new tokens are
                garbage.

        Raises:
            RuntimeError: the forward is not open, or a layer is missing.
        """
        cache = self._open_cache("commit")
        if not allow_missing_layers and self.num_tokens and not all(self._attended):
            missing = [layer for layer, done in enumerate(self._attended) if not done]
            raise RuntimeError(f"commit: expected every layer to have attended, got none of layers {missing}")
        if any(self._attended):
            self._stats.prefill_tokens += sum(n for n in self.num_new if n > 1)
        self._cache = None
        cache.finish_forward(self, committed=True)

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
