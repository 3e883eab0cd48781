"""Taking tokens out of stored sequences: each kv head keeps its own, in fresh pages in place of the old ones.

Keys are stored as they were rotated, so a kept token keeps its position in the text and only its place among
the stored tokens changes. Invariant: either every sequence of a call has moved, or none (`OutOfPagesError`);
pages that forks share are never written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tinyserve_ops import ops
from tinyserve_ops.policies.eviction import EvictionPolicy, SequenceTokens

if TYPE_CHECKING:
    from tinyserve_ops.batch_tables import BatchTables
    from tinyserve_ops.cache import PagedKVCache
    from tinyserve_ops.forward import ForwardBatch
    from tinyserve_ops.layer_pool import LayerPool
    from tinyserve_ops.pools import PagePool
    from tinyserve_ops.sequences import SequenceRecord

__all__ = ["EvictionRun", "Kept", "check_kept", "evict", "text_positions"]

# Layer -> stored tokens to keep, int64 [num_kv_heads, n], ascending in every row.
Kept = Mapping[int, torch.Tensor]


def check_kept(pool: PagePool, lengths: Sequence[int], kept: Kept) -> None:
    """Raises ValueError or TypeError, by layer, where `kept` can't be carried out.

    Args:
        lengths: stored tokens in each layer group.
    """
    for layer_id, tokens in kept.items():
        if layer_id not in range(pool.num_layers):
            raise ValueError(f"kept: expected layers 0 to {pool.num_layers - 1}, got {layer_id!r}")
        if not isinstance(tokens, torch.Tensor) or tokens.dtype != torch.int64:
            raise TypeError(
                f"kept[{layer_id}]: expected an int64 tensor, got {getattr(tokens, 'dtype', type(tokens))}"
            )
    for group, length in zip(pool.groups, lengths, strict=True):
        named = [layer_id for layer_id in group.layer_ids if layer_id in kept]
        if named and len(named) != len(group.layer_ids):
            missing = sorted(set(group.layer_ids) - set(named))
            raise ValueError(f"kept: expected all layers of a layer group or none, got none of {missing}")
        if not named:
            continue
        expected = (pool.num_kv_heads, kept[named[0]].size(-1))
        for layer_id in named:
            tokens = kept[layer_id]
            if tuple(tokens.shape) != expected:
                raise ValueError(
                    f"kept[{layer_id}]: expected shape {list(expected)} (one number of tokens in a layer "
                    f"group), got {list(tokens.shape)}"
                )
            ascending = bool((tokens.diff(dim=1) > 0).all())
            if not ascending or (tokens.numel() and not (tokens[:, 0].min() >= 0 and tokens.max() < length)):
                raise ValueError(f"kept[{layer_id}]: expected ascending indices from 0 to {length - 1}")


def evict(pool: PagePool, plans: Sequence[tuple[SequenceRecord, int, Kept]]) -> int:
    """Keeps the named tokens of each sequence and gives the other pages back.

    Args:
        plans: record, its tokens that are written but not committed yet (they become part of it where they
            are kept), and which tokens to keep, uncommitted ones included; checked before.

    Returns:
        Tokens evicted, summed over layers and kv heads.

    Raises:
        OutOfPagesError: nothing changed.
    """
    fresh: list[tuple[SequenceRecord, int, int]] = []  # record, group, new allocator sequence
    try:
        for record, _, kept in plans:
            for index, group in enumerate(pool.groups):
                if group.layer_ids[0] in kept:
                    fresh.append((record, index, group.allocator.new_sequence()))
                    group.reserve([fresh[-1][2]], [kept[group.layer_ids[0]].size(1)])
    except BaseException:
        for _, index, new_id in fresh:
            pool.groups[index].allocator.free_sequence(new_id)
        raise
    evicted = 0
    moved = {(id(record), index): new_id for record, index, new_id in fresh}
    for record, num_new, kept in plans:
        num_tokens = record.num_tokens(pool) + num_new
        for index, group in enumerate(pool.groups):
            allocator, old_id = group.allocator, record.ids[index]
            if (id(record), index) not in moved:
                allocator.commit(old_id, num_new)
                continue
            new_id = moved[id(record), index]
            num_stored, num_kept = allocator.length(old_id) + num_new, kept[group.layer_ids[0]].size(1)
            source, target = (
                torch.from_numpy(allocator.page_ids(sequence_id)) for sequence_id in (old_id, new_id)
            )
            if target.numel():
                group.note_page(int(target.max()))
            for layer_id, layer in zip(group.layer_ids, group.layers, strict=True):
                _copy_tokens(layer, source, target, kept[layer_id])
            allocator.commit(new_id, num_kept)
            allocator.free_sequence(old_id)
            record.ids[index], record.versions[index] = new_id, 0
            record.evicted[index] += num_stored - num_kept
            evicted += (num_stored - num_kept) * pool.num_kv_heads * len(group.layers)
            for layer_id in group.layer_ids:
                record.kept[layer_id] = text_positions(record, layer_id, num_tokens, pool).gather(
                    1, kept[layer_id].cpu()
                )
        for layer_id in record.kept.keys() - kept.keys():  # these have all tokens since the old frontier
            record.kept[layer_id] = text_positions(record, layer_id, num_tokens, pool)
        record.frontier = num_tokens
    return evicted


def text_positions(record: SequenceRecord, layer_id: int, num_tokens: int, pool: PagePool) -> torch.Tensor:
    """Which token of its text each stored token of a layer is, int64 [num_kv_heads, stored], counted from 0.

    Args:
        num_tokens: tokens of the sequence, those evicted included.
    """
    kept = record.kept.get(layer_id)
    start = 0 if kept is None else record.frontier
    later = torch.arange(start, num_tokens).expand(pool.num_kv_heads, -1)
    return later if kept is None else torch.cat([kept, later], dim=1)


def _copy_tokens(pool: LayerPool, source: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> None:
    """Copies tokens `kept` [num_kv_heads, n] of pages `source` to the first n slots of pages `target`, and
    seals the pages that are full.
    """
    page_size, num_kept = pool.page_size, kept.size(1)
    if not num_kept:
        return
    source, target, kept = (x.to(pool.device) for x in (source.long(), target.long(), kept))
    heads = torch.arange(pool.num_kv_heads, device=pool.device)[:, None]
    slots = torch.arange(num_kept, device=pool.device)
    with torch.no_grad():
        for pages in (pool.k_pages, pool.v_pages, pool.k_scales, pool.v_scales):
            if pages is not None:
                tokens = pages[source[kept // page_size], heads, kept % page_size]
                pages[target[slots // page_size], heads, slots % page_size] = tokens
        full = target[: num_kept // page_size].to(torch.int32)
        ops.seal_pages(full, pool.k_pages, pool.k_scales, pool.page_summary, pool.scorer)


class EvictionRun:
    """What an eviction policy saw and decided in one forward; nothing counts before `apply`."""

    def __init__(
        self, cache: PagedKVCache, policy: EvictionPolicy, batch: ForwardBatch, records: list[SequenceRecord]
    ) -> None:
        self._policy = policy
        self._config = cache.config
        self._pool = cache.pool
        self._first_layer = cache.config.dense_layers
        self._rows: list[tuple[int, SequenceRecord, bool]] = []  # row, its record, whether its prompt ends
        self._memory: dict[int, dict[int, Any]] = {}  # row -> layer -> memory after this forward
        self._kept: dict[int, dict[int, torch.Tensor]] = {}  # row -> layer -> tokens
        for row, (record, n) in enumerate(zip(records, batch.num_new, strict=True)):
            if n and (record.in_prompt or policy.per_step):
                goes_on = batch.sequences[row] in batch.prompt_goes_on
                self._rows.append((row, record, record.in_prompt and not goes_on))

    def __bool__(self) -> bool:
        """Whether there is anything to see."""
        return bool(self._rows)

    def observe(
        self,
        layer_idx: int,
        group: int,
        batch: ForwardBatch,
        tables: BatchTables,
        q: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
    ) -> None:
        """Shows the policy the new tokens of a layer, sequence by sequence, after they were attended.

        Where the policy says what they attended to, `out` is changed.
        """
        if layer_idx < self._first_layer:
            return
        pool = self._pool.layers[layer_idx]
        for row, record, ends_prompt in self._rows:
            part = slice(batch.host_cu_query_lens[row], batch.host_cu_query_lens[row + 1])
            num_new, num_stored = batch.num_new[row], tables.lengths[row]
            num_pages = -(-(num_stored + num_new) // pool.page_size)
            tokens = SequenceTokens(
                q=q[part],
                num_stored=num_stored,
                num_tokens=num_stored + record.evicted[group] + num_new,
                budget_of=functools.partial(
                    self._policy.budget, self._config, layer_idx, self._pool.num_layers
                ),
                in_prompt=record.in_prompt,
                ends_prompt=ends_prompt,
                page_ids=tables.page_table[row, :num_pages],
                pool=pool,
                sm_scale=sm_scale,
            )
            seen = self._policy.observe(record.memory.get(layer_idx), tokens)
            self._memory.setdefault(row, {})[layer_idx] = seen.memory
            if seen.kept is not None:
                self._kept.setdefault(row, {})[layer_idx] = seen.kept
            if seen.out is not None:
                out[part] = seen.out

    def apply(self, batch: ForwardBatch) -> tuple[set[int], int]:
        """Evicts what the policy decided and remembers what it asked for.

        Returns:
            Sequences that have taken their new tokens by it, and the tokens evicted, summed over layers and
            kv heads.

        Raises:
            OutOfPagesError: nothing changed.
        """
        plans = []
        for row, record, _ in self._rows:
            if row in self._kept:
                num_new = batch.num_new[row]
                check_kept(self._pool, [n + num_new for n in record.lengths(self._pool)], self._kept[row])
                plans.append((record, num_new, self._kept[row]))
        num_evicted = evict(self._pool, plans)
        for row, record, _ in self._rows:
            for layer_idx, memory in self._memory.get(row, {}).items():
                if memory is None:
                    record.memory.pop(layer_idx, None)
                else:
                    record.memory[layer_idx] = memory
        return {batch.sequences[row] for row in self._kept}, num_evicted
