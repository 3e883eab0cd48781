"""What stands behind a sequence handle: one allocator sequence per layer group, its position, its pins, and
what it has lost to eviction.

Invariants: a record holds exactly the references that `free` gives back; in every layer group, stored and
evicted tokens add up to the tokens that the sequence was given.
"""

from __future__ import annotations

from typing import Any

import torch

from tinyserve_ops.pools import PagePool

__all__ = ["SequenceRecord", "give_back"]


class SequenceRecord:
    """What a handle stands for.

    `ids` are the allocator's sequences, one per layer group; `versions` the page-table versions that the kept
    batch tables were last told about; `pins` the pages pinned, per group; `reserved` set while a compiled
    step owns the sequence; `in_prompt` until the forward that ends its prompt is committed.

    `evicted` counts the tokens that each kv head of a group has lost; `kept` says which of the first
    `frontier` tokens a layer has still (int64 [num_kv_heads, n], ascending; layers that lost nothing are not
    in it), the later ones are all there. `memory` is what an eviction policy keeps from forward to forward,
    by layer, `plugin_memory` the same by plugin; values are never changed in place, so that forks may share
    them.
    """

    __slots__ = (
        "evicted",
        "frontier",
        "ids",
        "in_prompt",
        "kept",
        "memory",
        "next_position",
        "pins",
        "plugin_memory",
        "reserved",
        "versions",
    )

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.versions = [0] * len(ids)
        self.next_position = 0
        self.pins: list[list[list[int]]] = []
        self.reserved = False
        self.start_anew()

    def start_anew(self) -> None:
        """An empty sequence has no prompt yet and has lost nothing."""
        self.in_prompt = True
        self.evicted = [0] * len(self.ids)
        self.kept: dict[int, torch.Tensor] = {}
        self.frontier = 0
        self.memory: dict[int, Any] = {}
        self.plugin_memory: dict[str, dict[int, Any]] = {}

    def fork(self, pool: PagePool) -> SequenceRecord:
        """A record of new sequences that share the committed pages of these."""
        ids = []
        for group, sequence_id in zip(pool.groups, self.ids, strict=True):
            ids.append(group.allocator.fork(sequence_id))
            group.allocator.trim(ids[-1])
        forked = SequenceRecord(ids)
        forked.next_position = self.next_position
        forked.in_prompt = self.in_prompt
        forked.evicted, forked.frontier = list(self.evicted), self.frontier
        forked.kept, forked.memory = dict(self.kept), dict(self.memory)
        forked.plugin_memory = {name: dict(memory) for name, memory in self.plugin_memory.items()}
        return forked

    def lengths(self, pool: PagePool) -> list[int]:
        """Stored tokens in each layer group."""
        return [g.allocator.length(i) for g, i in zip(pool.groups, self.ids, strict=True)]

    def num_tokens(self, pool: PagePool) -> int:
        """Tokens that the sequence was given, stored or evicted since."""
        length: int = pool.groups[0].allocator.length(self.ids[0])
        return length + self.evicted[0]

    def pin(self, pool: PagePool) -> None:
        """Pins every page the sequence has now."""
        held = []
        for group, sequence_id in zip(pool.groups, self.ids, strict=True):
            page_ids = group.allocator.page_ids(sequence_id, 0).tolist()
            for page_id in page_ids:
                group.allocator.pin(page_id)
            held.append(page_ids)
        self.pins.append(held)

    def unpin(self, pool: PagePool) -> None:
        """Takes back the last `pin`."""
        for group, page_ids in zip(pool.groups, self.pins.pop(), strict=True):
            for page_id in page_ids:
                group.allocator.unpin(page_id)

    def unpin_all(self, pool: PagePool) -> None:
        """Takes back all of them."""
        while self.pins:
            self.unpin(pool)

    def free(self, pool: PagePool) -> None:
        """Ends the sequences; the record is not used again."""
        self.unpin_all(pool)
        for group, sequence_id in zip(pool.groups, self.ids, strict=True):
            group.allocator.free_sequence(sequence_id)


def give_back(records: dict[int, SequenceRecord], pool: PagePool, cache_id: int) -> None:
    """Frees everything a cache held, when it is closed or collected. Must not refer to the cache itself."""
    pool.forget_cache(cache_id)
    while records:
        records.popitem()[1].free(pool)
