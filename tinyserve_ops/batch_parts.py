"""Rows of one kind within a forward: which they are, where their tokens lie, and their tensors.

A part is made once per forward; the tensors of a layer group are made when its first layer asks. Invariant: a
part holds the same tokens of q, k and v for every layer.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tinyserve_ops.batch_tables import BatchTables
    from tinyserve_ops.config import SparseConfig
    from tinyserve_ops.forward import ForwardBatch

__all__ = ["BatchPart", "TokenPart"]

# `seq_lens`, `page_table`, `page_budget`, `max_page_budget` of the rows in a layer group.
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


class BatchPart:
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
        self._groups: dict[int, tuple[Rows, tuple[int, ...]]] = {}
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

    def of_group(self, group: int, tables: BatchTables) -> tuple[Rows, tuple[int, ...]]:
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


class TokenPart(BatchPart):
    """Rows whose every new token is a row of its own: for policies that rule token by token.

    Token i of a row becomes a row of one new token with a stored length of `seq_lens + i`, so it sees what it
    would see alone. All of them are appended already.
    """

    def __init__(self, batch: ForwardBatch, rows: list[int], whole: bool, config: SparseConfig) -> None:
        super().__init__(batch, rows, whole)
        self._config = config
        pairs = [(row, offset) for row in rows for offset in range(batch.num_new[row])]
        self._pairs = pairs
        self.sequences = tuple(batch.sequences[row] for row, _ in pairs)
        device = batch.cu_query_lens.device
        self._row_of_token, self._offsets = torch.tensor(pairs, dtype=torch.int64, device=device).T
        self.cu_query_lens = torch.arange(len(pairs) + 1, dtype=torch.int32, device=device)

    def of_group(self, group: int, tables: BatchTables) -> tuple[Rows, tuple[int, ...]]:
        """As `BatchPart.of_group`, a row for each token."""
        found = self._groups.get(group)
        if found is None:
            page_size = self._config.page_size
            lengths = tuple(tables.lengths[row] + offset for row, offset in self._pairs)
            num_pages = [length // page_size + 1 for length in lengths]
            # No list wider than can be filled, as in `BatchTables.refresh`.
            widest = max(*num_pages, self._config.forced_pages)
            budgets = [min(self._config.page_budget(pages), widest) for pages in num_pages]
            tensors = (
                tables.seq_lens[self._row_of_token] + self._offsets.to(torch.int32),
                tables.page_table[self._row_of_token],
                torch.tensor(budgets, dtype=torch.int32, device=tables.seq_lens.device),
            )
            found = self._groups[group] = ((*tensors, max(budgets)), lengths)
        return found
