"""`BatchTables`: page table, stored lengths and page budgets of one batch composition in one layer group, as
tensors; and `BatchStates`, those of the batches that a cache ran last.

They persist from step to step and are updated in place: a decode step writes one length per row, and a page
id only where a row has gained a page. Entries [0, written) of a row equal the allocator's page ids as long as
the row's version is the allocator's; entries beyond are -1.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from tinyserve_ops.config import SparseConfig
from tinyserve_ops.pools import PageGroup, PagePool
from tinyserve_ops.sequences import SequenceRecord

__all__ = ["BatchState", "BatchStates", "BatchTables"]

_MIN_WIDTH = 16
# Batch compositions whose tensors are kept: the running batch, and the ones before a row joined or left.
_MAX_STATES = 4


class BatchTables:
    """The tensors of the allocator sequences `sequence_ids` of `group`, row by row.

    Attributes:
        page_table: int32 [batch, width], -1 where there is no page; `width` grows by doubling.
        seq_lens: int32 [batch], committed lengths as of the last `refresh`.
        page_budget: int32 [batch], pages a sparse step of one new token attends to: never more than the
            longest row has (or the forced pages), so that no list is wider than can be filled.
        max_page_budget: the largest of them.
        lengths: `seq_lens` as host integers.
    """

    def __init__(
        self, group: PageGroup, sequence_ids: list[int], config: SparseConfig, *, width: int = _MIN_WIDTH
    ) -> None:
        self.group = group
        self.sequence_ids = sequence_ids
        self._config = config
        batch = len(sequence_ids)
        self._device = group.pool.device
        self._on_cpu = self._device.type == "cpu"
        self._written = [0] * batch
        self._versions = [-1] * batch
        self.lengths: list[int] = [0] * batch
        self.max_page_budget = config.forced_pages
        with torch.inference_mode(False):  # written under any mode later
            self.page_table = torch.full((batch, width), -1, dtype=torch.int32, device=self._device)
            self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=self._device)
            self.page_budget = torch.full(
                (batch,), self.max_page_budget, dtype=torch.int32, device=self._device
            )
            self._lens_view = self.seq_lens.numpy() if self._on_cpu else None
            self._budget_view = self.page_budget.numpy() if self._on_cpu else None

    def refresh(self, num_new: list[int]) -> None:
        """Brings the tensors up to date for `num_new` reserved tokens beyond each row's committed length."""
        allocator = self.group.allocator
        page_size = allocator.page_size
        versions, written = self._versions, self._written
        lengths = [allocator.length(sequence_id) for sequence_id in self.sequence_ids]
        for row, sequence_id in enumerate(self.sequence_ids):
            version = allocator.page_table_version(sequence_id)
            if version != versions[row]:
                versions[row] = version
                written[row] = 0
            if lengths[row] + num_new[row] > written[row] * page_size:
                self._write_pages(row, sequence_id)
        if lengths != self.lengths:
            self.lengths = lengths
            self._store(self.seq_lens, self._lens_view, lengths)
        num_pages = [
            (length + max(new, 1) - 1) // page_size + 1 for length, new in zip(lengths, num_new, strict=True)
        ]
        if self._config.ratio is not None:
            budgets = [self._config.page_budget(pages) for pages in num_pages]
            self.max_page_budget = max(budgets, default=self._config.forced_pages)
            self._store(self.page_budget, self._budget_view, budgets)
            return
        longest = max(num_pages, default=0)
        budget = min(self._config.page_budget(longest), max(longest, self._config.forced_pages))
        if budget != self.max_page_budget:
            self.max_page_budget = budget
            self._store(self.page_budget, self._budget_view, [budget] * len(lengths))

    def forget(self, row: int, from_page: int, version: int) -> None:
        """Entries of `row` from `from_page` on have changed, no others; `version` is the new one."""
        if self._written[row] > from_page:
            with torch.no_grad():
                self.page_table[row, from_page : self._written[row]] = -1
            self._written[row] = from_page
        self._versions[row] = version

    def row_version(self, row: int) -> int:
        """The allocator's version that the row was last seen at."""
        return self._versions[row]

    def check(self) -> None:
        """Raises RuntimeError when an up-to-date row differs from the allocator."""
        allocator = self.group.allocator
        for row, sequence_id in enumerate(self.sequence_ids):
            if self._versions[row] != allocator.page_table_version(sequence_id):
                continue
            expected = list(allocator.page_ids(sequence_id))[: self._written[row]]
            got = self.page_table[row, : self._written[row]].tolist()
            if got != expected:
                raise RuntimeError(f"page table of sequence {sequence_id}: expected {expected}, got {got}")

    def _write_pages(self, row: int, sequence_id: int) -> None:
        start = self._written[row]
        page_ids = torch.from_numpy(self.group.allocator.page_ids(sequence_id, start))
        count = page_ids.numel()
        if count == 0:
            return
        if start + count > self.page_table.size(1):
            self._widen(start + count)
        with torch.no_grad():
            if start == 0:
                self.page_table[row] = -1
            self.page_table[row, start : start + count] = page_ids
        self.group.note_page(int(page_ids.max()))
        self._written[row] = start + count

    def _widen(self, width: int) -> None:
        width = max(width, 2 * self.page_table.size(1))
        with torch.inference_mode(False), torch.no_grad():
            wider = torch.full((self.page_table.size(0), width), -1, dtype=torch.int32, device=self._device)
            wider[:, : self.page_table.size(1)] = self.page_table
        self.page_table = wider

    def _store(self, tensor: torch.Tensor, view: object, values: list[int]) -> None:
        if view is not None:
            view[:] = values  # type: ignore[index]  # numpy's view of the tensor: much cheaper than a tensor write
        else:
            with torch.no_grad():
                tensor.copy_(torch.tensor(values, dtype=torch.int32), non_blocking=True)


class BatchState:
    """The tensors of one batch composition, in every layer group."""

    def __init__(self, sequences: tuple[int, ...], tables: list[BatchTables], device: torch.device) -> None:
        self.sequences = sequences
        self.tables = tables
        with torch.inference_mode(False):
            self.decode_cu_query_lens = torch.arange(len(sequences) + 1, dtype=torch.int32, device=device)


class BatchStates:
    """The last few batch compositions of a cache, kept up to date while their sequences change."""

    def __init__(self, pool: PagePool, config: SparseConfig) -> None:
        self._pool = pool
        self._config = config
        self._states: OrderedDict[tuple[int, ...], BatchState] = OrderedDict()

    def find(self, sequences: tuple[int, ...], records: list[SequenceRecord]) -> BatchState:
        """The state of a batch, made where there is none."""
        state = self._states.get(sequences)
        if state is not None:
            self._states.move_to_end(sequences)
            return state
        tables = [
            BatchTables(group, [record.ids[index] for record in records], self._config)
            for index, group in enumerate(self._pool.groups)
        ]
        state = self._states[sequences] = BatchState(sequences, tables, self._pool.device)
        if len(self._states) > _MAX_STATES:
            self._states.popitem(last=False)
        return state

    def note_changes(self, seq: int, record: SequenceRecord, lengths: list[int]) -> None:
        """The pages of `seq` from token `lengths[group]` on may have been replaced, no others."""
        for index, group in enumerate(self._pool.groups):
            version = group.allocator.page_table_version(record.ids[index])
            before = record.versions[index]
            if version == before:
                continue
            record.versions[index] = version
            for sequences, state in self._states.items():
                if seq in sequences:
                    row = sequences.index(seq)
                    if state.tables[index].row_version(row) == before:
                        state.tables[index].forget(row, lengths[index] // self._config.page_size, version)

    def forget(self, seq: int) -> None:
        """Drops every batch that the sequence was in."""
        for key in [key for key in self._states if seq in key]:
            del self._states[key]

    def clear(self) -> None:
        """Drops all of them."""
        self._states.clear()

    def check(self) -> None:
        """Raises RuntimeError when an up-to-date row differs from the allocator."""
        for state in self._states.values():
            for tables in state.tables:
                tables.check()
