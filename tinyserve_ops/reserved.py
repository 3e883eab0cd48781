"""`ReservedBatch`: decode steps that consist of torch ops only, for `torch.compile(fullgraph=True)` and CUDA
graphs.

Pages, page tables and every tensor a step touches exist before the first step and keep their addresses; the
step itself advances lengths, positions and budgets. The host learns the lengths only at `sync`. Invariant:
what the tensors say after an `advance` is what the pages hold, so a step that fails before it has not
happened.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from tinyserve_ops.batch_tables import BatchTables
from tinyserve_ops.errors import OutOfPagesError
from tinyserve_ops.pool_ops import append_tokens, attend_listed, attend_sparse, check_new
from tinyserve_ops.stats import hidden_by_window

if TYPE_CHECKING:
    from tinyserve_ops.cache import PagedKVCache

__all__ = ["ReservedBatch"]


class ReservedBatch:
    """One new token for each of `sequences` and step. Made by `PagedKVCache.reserve`; also a context manager.

    A compiled function calls `attend` for every layer and then `advance`; around it the eager caller calls
    `check_room` before each step, and `sync` or `release` when it wants the cache's own lengths to follow.

    Attributes:
        sequences: handle of each row.
        max_tokens: stored tokens that each row has room for, in total.
        cu_query_lens: int32 [batch + 1].
        seq_lens: int32 [batch], stored tokens of each row; of all layer groups.
        next_positions: int64 [batch], position of the token that the next step decodes.
        page_budget: int32 [batch], pages that a sparse layer attends to in the next step.
    """

    def __init__(
        self, cache: PagedKVCache, sequences: tuple[int, ...], tables: list[BatchTables], max_tokens: int
    ) -> None:
        self.sequences = sequences
        self.max_tokens = max_tokens
        self._cache = cache
        self._config = cache.config
        self._dense_layers = cache.plan.dense_layers
        self._layers = cache.pool.layers
        self._page_tables = [tables[group].page_table for group in cache.group_of_layer]  # by layer
        self._start_lengths = list(tables[0].lengths)  # committed, as of the last sync
        self._steps_taken = 0  # since then, as far as check_room was told
        self._released = False
        self._windows = [-1] * cache.num_layers
        width = max(1, -(-max_tokens // cache.config.page_size))
        self._max_page_budget = min(cache.config.page_budget(width), max(width, cache.config.forced_pages))
        ratio = cache.config.ratio
        self._ratio = None if ratio is None else (ratio.numerator, ratio.denominator)
        batch = len(sequences)
        with torch.inference_mode(False), torch.no_grad():
            self.cu_query_lens = torch.arange(batch + 1, dtype=torch.int32, device=cache.device)
            self.seq_lens = tables[0].seq_lens.clone()
            starts = [cache.next_position(seq) for seq in sequences]
            self.next_positions = torch.tensor(starts, dtype=torch.int64, device=cache.device)
            self.page_budget = torch.full(
                (batch,), self._max_page_budget, dtype=torch.int32, device=cache.device
            )
            self._update_budget()
            # Pages read so far and tokens in them before the window, per layer: one tensor each, because a
            # tensor mutated twice in a graph is copied.
            self._pages_read, self._tokens_hidden = (
                [torch.zeros((), dtype=torch.int64, device=cache.device) for _ in self._layers]
                for _ in range(2)
            )
        static = [self.cu_query_lens, self.seq_lens, self.next_positions, self.page_budget]
        static += [*self._pages_read, *self._tokens_hidden]
        for pool in self._layers:
            static += [part for part in pool.parts if part is not None]
        for tensor in [*static, *self._page_tables]:
            torch._dynamo.mark_static_address(tensor)

    def check_room(self, num_steps: int = 1) -> None:
        """Counts `num_steps` coming steps and makes sure they fit; eager, reads nothing from the device.

        Raises:
            OutOfPagesError: they don't. Nothing changed, and the steps are not counted.
            RuntimeError: the reservation was released.
        """
        self._check_live("check_room")
        longest = max(self._start_lengths) + self._steps_taken
        if longest + num_steps > self.max_tokens:
            raise OutOfPagesError(
                f"reserved decoding: expected room for {num_steps} more tokens, got "
                f"{self.max_tokens - longest} of the {self.max_tokens} reserved (max_tokens)"
            )
        self._steps_taken += num_steps

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
        """Appends one token per row and attends; traceable. Arguments as for `ForwardBatch.attend`.

        Raises:
            RuntimeError: the reservation was released. A compiled step is guarded by it and raises as well.
        """
        self._check_live("attend")
        pool = self._layers[layer_idx]
        check_new(pool, q, k, v)
        page_table = self._page_tables[layer_idx]
        append_tokens(pool, k, v, self.cu_query_lens, self.seq_lens, page_table)
        rows = (self.seq_lens, page_table, self.page_budget, self._max_page_budget)
        self._windows[layer_idx] = window
        if layer_idx < self._dense_layers:
            out, _ = attend_listed(q, self.cu_query_lens, rows, pool, None, None, sm_scale, window, softcap)
            return out
        out, selected_pages, num_selected = attend_sparse(
            q, self.cu_query_lens, rows, pool, self._config, sm_scale, window, softcap
        )
        self._pages_read[layer_idx].add_(num_selected.sum())
        if window > 0:
            page_size = self._config.page_size
            hidden = hidden_by_window(selected_pages, self.seq_lens, page_size, window)
            self._tokens_hidden[layer_idx].add_(hidden)
        return out

    def advance(self) -> None:
        """Makes the step's tokens count; traceable. Called once per step, after the last layer.

        Raises:
            RuntimeError: the reservation was released.
        """
        self._check_live("advance")
        self.seq_lens.add_(1)
        self.next_positions.add_(1)
        self._update_budget()

    def sync(self) -> None:
        """Tells the cache the lengths that the steps have reached: one read from the device. The reservation
        goes on.

        Raises:
            RuntimeError: the reservation was released, or steps were run without room (said once: those steps
                are dropped in every row, and decoding goes on from the last one that fitted).
        """
        self._check_live("sync")
        reached = self._tell_cache()
        if max(reached) > self.max_tokens:
            raise RuntimeError(
                f"sync: expected at most {self.max_tokens} tokens in a sequence (max_tokens), got lengths "
                f"{reached}: steps were run without check_room; those beyond were dropped in every row"
            )

    def _tell_cache(self) -> list[int]:
        """`sync` without a complaint: steps past `max_tokens` did not happen. Returns the lengths reached."""
        reached: list[int] = self.seq_lens.tolist()
        excess = max(0, max(reached) - self.max_tokens)  # steps: all rows take one token in each
        lengths = [length - excess for length in reached]
        if excess:
            self.seq_lens.sub_(excess)
            self.next_positions.sub_(excess)
            self._update_budget()
        new_counts = [length - start for length, start in zip(lengths, self._start_lengths, strict=True)]
        for seq, num_new in zip(self.sequences, new_counts, strict=True):
            self._cache.advance(seq, num_new)
        self._count_steps(lengths)
        self._start_lengths = lengths
        self._steps_taken = 0
        return reached

    def release(self) -> None:
        """`sync`, then gives unused pages back; the sequences are ordinary again. No-op when done.

        Steps run without room are no error here; they are dropped.
        """
        if self._released:
            return
        try:
            self._tell_cache()
        finally:
            self._released = True
            self._cache.end_reservation(self)

    def __enter__(self) -> ReservedBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _update_budget(self) -> None:
        """`SparseConfig.page_budget` of the pages visible to the next token, on tensors."""
        if self._ratio is None:
            return
        numerator, denominator = self._ratio
        num_pages = self.seq_lens.to(torch.int64) // self._config.page_size + 1
        budget = (num_pages * numerator + (denominator - 1)) // denominator
        self.page_budget.copy_(budget.clamp(self._config.forced_pages, self._max_page_budget))

    def _count_steps(self, lengths: list[int]) -> None:
        steps = tuple(
            position
            for start, end in zip(self._start_lengths, lengths, strict=True)
            for position in range(start, end)
        )
        for layer_idx, pool in enumerate(self._layers):
            pages_read, tokens_hidden = None, 0
            if layer_idx >= self._dense_layers:
                pages_read = int(self._pages_read[layer_idx])
                tokens_hidden = int(self._tokens_hidden[layer_idx])
                self._pages_read[layer_idx].zero_()
                self._tokens_hidden[layer_idx].zero_()
            self._cache.recorder.add_counts(
                pool=pool,
                lengths=steps,
                window=self._windows[layer_idx],
                pages_read=pages_read,
                tokens_hidden=tokens_hidden,
            )

    def _check_live(self, action: str) -> None:
        if self._released:
            raise RuntimeError(f"{action}: expected a live reservation, got one that was released")
