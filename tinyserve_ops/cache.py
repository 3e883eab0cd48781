"""`PagedKVCache`: sequences of tokens over a pool of KV pages, and the forwards that extend them.

Invariant between calls: a sequence has the same committed tokens in every layer, less those that were evicted
there; only `ForwardBatch.commit` (or `ReservedBatch.sync`) makes it grow, and nothing outside its stored
length is ever read. A forward that was left open, whatever stopped it, counts as failed: the next call that
touches the cache's sequences closes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from tinyserve_ops import ops, repaging, serialization
from tinyserve_ops import plugins as plugins_module
from tinyserve_ops.batch_tables import BatchStates, BatchTables
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.eviction import Kept, check_kept, evict, text_positions
from tinyserve_ops.forward import ForwardBatch
from tinyserve_ops.plugins import PageEvicted, Plugin, PluginLike, PluginStack, PrefillDone
from tinyserve_ops.policies import Policy, PolicyPlan
from tinyserve_ops.pools import PagePool
from tinyserve_ops.reserved import ReservedBatch
from tinyserve_ops.sequences import SequenceRecord, give_back
from tinyserve_ops.stats import CacheStats, SelectionStep, StatsRecorder

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """KV of any number of sequences, in pages.

    A `seq` is an integer handle, valid in this cache (and, after `copy.deepcopy`, in the copy).

    Args:
        num_layers, num_kv_heads, head_dim: shape of the model's KV.
        config: page size, budgets, scorer and the rest; default `SparseConfig()`.
        dtype: element type of the pages unless `config.kv_dtype` names another.
        device: where the pages live.
        max_tokens: capacity at the start, summed over sequences. A CPU pool grows past it by doubling, up to
            `config.max_kv_bytes`. Untouched pages cost no physical memory, only the allocator's records do:
            about 30 bytes a page, at once. Not needed with `pool`.
        layer_groups: layers that share one page table; default one group of all, or what the policy needs.
        fingerprint: names the kind of model (weights are not looked at); an export is refused by a cache of
            another fingerprint.
        pool: share this pool with other caches instead of making one.
        policy: which keys and values are left out, a `tinyserve_ops.policies.Policy` or its name; None is the
            query-aware selection of the config.
        plugins: changes at the stages of the pipeline, in their order: `tinyserve_ops.plugins.Plugin`s, their
            names or dicts.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        config: SparseConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_tokens: int | None = None,
        layer_groups: Sequence[Sequence[int]] | None = None,
        fingerprint: str = "",
        pool: PagePool | None = None,
        policy: Policy | str | None = None,
        plugins: Sequence[PluginLike] | None = None,
    ) -> None:
        self.config = SparseConfig() if config is None else config
        if not isinstance(self.config, SparseConfig):
            raise TypeError(f"config: expected a SparseConfig, got {type(config).__name__}")
        plan = PolicyPlan.make(policy, self.config, num_layers)
        self._given_plugins = plugins_module.resolve(plugins)
        self.plugin_stack, self.plan = PluginStack.make(self._given_plugins, plan, self.config, num_layers)
        if self.config.kv_dtype is not None:
            dtype = getattr(torch, self.config.kv_dtype)
        if pool is None:
            if max_tokens is None:
                raise ValueError("max_tokens: expected a number of tokens, or a pool to share, got neither")
            pool = PagePool(
                num_layers,
                num_kv_heads,
                head_dim,
                config=self.config,
                dtype=dtype,
                device=device,
                max_tokens=max_tokens,
                layer_groups=self.plan.layer_groups if layer_groups is None else layer_groups,
            )
        else:
            pool.check_matches((num_layers, num_kv_heads, head_dim), self.config, dtype, device, layer_groups)
        self.plan.check_groups(pool.layer_groups)
        self.pool = pool
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = pool.dtype
        self.device = pool.device
        self.layer_groups = pool.layer_groups
        self.fingerprint = fingerprint
        self.group_of_layer = [0] * num_layers
        for group, layer_ids in enumerate(pool.layer_groups):
            for layer_id in layer_ids:
                self.group_of_layer[layer_id] = group
        self.recorder = StatsRecorder(num_layers, record_selection=self.config.record_selection)
        self._records: dict[int, SequenceRecord] = {}
        self._next_handle = 0
        self._states = BatchStates(pool, self.config)
        self._open: ForwardBatch | None = None
        self._reservations: weakref.WeakSet[ReservedBatch] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, give_back, self._records, pool, id(self))
        self._finalizer.atexit = False

    # -- sequences -------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy | None:
        """Which keys and values are left out; None is the query-aware selection of the config."""
        return self.plan.policy

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The plugins at work, those of the policy first."""
        return () if self.plugin_stack is None else self.plugin_stack.plugins

    @property
    def sequences(self) -> tuple[int, ...]:
        """Handles of the live sequences."""
        return tuple(self._records)

    def new_sequence(self) -> int:
        """Handle of a new, empty sequence.

        Raises:
            RuntimeError: the cache was closed.
        """
        self._check_not_closed("new_sequence")
        return self._add(SequenceRecord([group.allocator.new_sequence() for group in self.pool.groups]))

    def fork(self, seq: int) -> int:
        """Handle of a new sequence with the same tokens: shares all pages, copies one when it is written."""
        return self._add(self._settle(seq, "fork").fork(self.pool))

    def adopt(self, source: PagedKVCache, seq: int) -> int:
        """Handle of a new sequence here with the committed tokens of `seq`, a sequence of the cache `source`.

        Over one pool the two share all pages, as after `fork`. Otherwise keys and values are copied into
        pages of this cache, which may have another size, scorer, element type or other layer groups; int8
        pages round what comes from float ones. The policy is this cache's from here on.

        Raises:
            ValueError: `source` has another shape or was made for another kind of model, the policy here
                would have had to see the tokens, or some of a sequence that is to be copied were evicted.
            OutOfPagesError: nothing changed.
        """
        self._check_not_closed("adopt")
        record = source._settle(seq, "adopt")
        self._check_beginning(seq, record, source)
        if source.pool is self.pool:
            adopted = self._add(record.fork(self.pool))
        else:
            source._check_whole("adopt", seq, record)
            adopted = repaging.copy_sequence(source, seq, self)
            self._records[adopted].memory = dict(record.memory)
        self._forget_other_rules(self._records[adopted], source)
        return adopted

    def free(self, seq: int) -> None:
        """Ends a sequence; its pages go back to the pool (pinned ones are unpinned)."""
        record = self._settle(seq, "free")
        del self._records[seq]
        self._states.forget(seq)
        record.free(self.pool)

    def crop(self, seq: int, length: int) -> None:
        """Keeps the first `length` tokens. The next position goes back by as many as are dropped.

        Raises:
            ValueError: `length` is not in [0, num_tokens(seq)], or would go back to where tokens have been
                evicted since or an eviction policy keeps count (0 is always possible).
        """
        record = self._settle(seq, "crop")
        present = record.num_tokens(self.pool)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= present:
            raise ValueError(f"length: expected 0 to {present}, the sequence's tokens, got {length!r}")
        first = present if record.memory else record.frontier
        if 0 < length < first:
            raise ValueError(
                f"length: expected 0, or at least {first} (tokens up to there can't be rolled back after an "
                f"eviction by {self.plan.eviction}), got {length}"
            )
        lengths = [max(0, stored - (present - length)) for stored in record.lengths(self.pool)]
        if not length:
            lengths = [0] * len(lengths)
            record.start_anew()
        for group, sequence_id, stored in zip(self.pool.groups, record.ids, lengths, strict=True):
            group.allocator.crop(sequence_id, stored)
        self._states.note_changes(seq, record, lengths)
        record.next_position = max(0, record.next_position - (present - length))

    def keep_tokens(self, seq: int, kept: Kept) -> None:
        """Takes tokens out of a sequence: in the layers that are named, each kv head keeps the tokens that it
        is told to, in fresh pages; the old ones are given back, where no fork holds them.

        The next position stays what it is, and the tokens that are kept are where they were in the text.

        Args:
            kept: layer -> int64 [num_kv_heads, n], ascending indices of stored tokens; all layers of a layer
                group or none, n the same for all of a group.

        Raises:
            ValueError, TypeError: `kept` does not fit, by layer.
            OutOfPagesError: nothing changed.
        """
        record = self._settle(seq, "keep_tokens")
        check_kept(self.pool, record.lengths(self.pool), kept)
        before = self._eviction_state((seq,), (0,))
        self.recorder.tokens_evicted += evict(self.pool, [(record, 0, kept)])
        self._tell_evicted((seq,), before)
        self._states.forget(seq)

    def kept_tokens(self, layer_idx: int, seq: int) -> torch.Tensor:
        """Which tokens of its text a sequence has stored in a layer: int64 [num_kv_heads, stored], ascending,
        counted from 0 without padding.
        """
        self._check_layer(layer_idx)
        record = self._record(seq)
        return text_positions(record, layer_idx, record.num_tokens(self.pool), self.pool)

    def reset(self, seq: int | None = None) -> None:
        """Empties one sequence, or all of them and the stats; pages and pins are given back.

        Raises:
            RuntimeError: a sequence is reserved; nothing changed.
        """
        handles = self.sequences if seq is None else (seq,)
        for handle, record in [(handle, self._settle(handle, "reset")) for handle in handles]:
            record.unpin_all(self.pool)
            self.crop(handle, 0)
            record.next_position = 0
        if seq is None:
            self.recorder.reset()

    def reorder(self, seqs: Sequence[int], indices: Sequence[int]) -> list[int]:
        """Beam reorder, batch select and repeat in one: result[i] holds what seqs[indices[i]] holds.

        The first use of a sequence keeps its handle, further ones fork it, unused ones are freed.

        Raises:
            ValueError: an index out of range; nothing changed.
        """
        indices = [int(index) for index in indices]
        for index in indices:
            if not 0 <= index < len(seqs):
                raise ValueError(f"indices: expected 0 to {len(seqs) - 1}, got {index}")
        for seq in seqs:
            self._settle(seq, "reorder")
        taken: set[int] = set()
        result = []
        for index in indices:
            seq = seqs[index]
            result.append(self.fork(seq) if seq in taken else seq)
            taken.add(seq)
        for seq in set(seqs) - taken:
            self.free(seq)
        return result

    def length(self, seq: int, group: int = 0) -> int:
        """Committed tokens that a sequence has stored in a layer group."""
        length: int = self.pool.groups[group].allocator.length(self._record(seq).ids[group])
        return length

    def num_tokens(self, seq: int) -> int:
        """Committed tokens of a sequence, those evicted included: what `crop` counts."""
        return self._record(seq).num_tokens(self.pool)

    def next_position(self, seq: int) -> int:
        """Position (rotary or absolute) of the next token. Follows the length unless set apart from it."""
        return self._record(seq).next_position

    def in_prompt(self, seq: int) -> bool:
        """Whether the prompt of a sequence goes on: policies rule over the tokens after it."""
        return self._record(seq).in_prompt

    def set_next_position(self, seq: int, position: int) -> None:
        """Sets it apart from the stored length: after padding that was not stored, eviction, pruning."""
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(f"position: expected an integer >= 0, got {position!r}")
        self._record(seq).next_position = position

    def pin(self, seq: int) -> None:
        """Keeps the pages that the sequence has now from reuse until `unpin`, `reset`, `free` or `close`,
        also when it is cropped. Pages that it gets later are not pinned; forks share the pages, not the pin.
        """
        self._settle(seq, "pin").pin(self.pool)

    def unpin(self, seq: int) -> None:
        """Takes back one `pin`.

        Raises:
            RuntimeError: the sequence is not pinned.
        """
        record = self._record(seq)
        if not record.pins:
            raise RuntimeError(f"unpin: expected a pinned sequence, got {seq}, which is not")
        record.unpin(self.pool)

    def register_page(self, seq: int, page_idx: int, key: bytes, tokens: Sequence[int]) -> bool:
        """Offers a full page of `seq` to other sequences under the key of its content (see `attach_cached`).

        Args:
            key: bytes that identify all the page's KV depend on: model, config, and the tokens of this and
                earlier pages.
            tokens: the page's tokens, compared on every hit.

        Returns:
            Whether the page now stands for that content.

        Raises:
            ValueError: tokens of the sequence were evicted.
        """
        record = self._record(seq)
        self._check_whole("register_page", seq, record)
        done = [
            group.allocator.register_page(sequence_id, page_idx, key, list(tokens))
            for group, sequence_id in zip(self.pool.groups, record.ids, strict=True)
        ]
        return all(done)

    def attach_cached(self, seq: int, key: bytes, tokens: Sequence[int]) -> bool:
        """Appends the page registered under `key`, if there is one with these tokens: prefix reuse without a
        forward.

        Returns:
            False on a miss, with nothing changed.

        Raises:
            ValueError: the sequence does not end at a page boundary, or tokens of it were evicted.
        """
        record = self._settle(seq, "attach_cached")
        self._check_whole("attach_cached", seq, record)
        if self.plan.eviction is not None and self.plan.eviction.per_step:
            raise ValueError(
                f"attach_cached: expected a policy that need not see every query, got {self.plan.eviction}"
            )
        before = self.length(seq)
        for group, sequence_id in zip(self.pool.groups, record.ids, strict=True):
            if not group.allocator.attach_cached(sequence_id, key, list(tokens)):
                if group is not self.pool.groups[0]:
                    for other, other_id in zip(self.pool.groups, record.ids, strict=True):
                        other.allocator.crop(other_id, before)
                    self._states.note_changes(seq, record, [before] * len(record.ids))
                return False
        record.next_position += self.config.page_size
        return True

    # -- forwards --------------------------------------------------------------------------------------------

    @property
    def open_forward(self) -> ForwardBatch | None:
        """The forward between `begin` and `commit`, if any."""
        return self._open

    def begin(
        self,
        batch: Iterable[tuple[int, int]],
        *,
        dense: bool = False,
        prompt_goes_on: Collection[int] = (),
    ) -> ForwardBatch:
        """Starts a forward that appends `num_new` tokens to each `(seq, num_new)`; lengths change at its
        `commit`.

        Args:
            batch: each sequence at most once; 0 new tokens are allowed.
            dense: no page selection in this forward, whatever config and policy say (verifying a draft of one
                token).
            prompt_goes_on: sequences of the batch whose prompt is not complete with this forward, so that a
                policy sees one prompt in several pieces; else the first forward of a sequence is its prompt.

        Raises:
            OutOfPagesError: no lengths changed, no pages kept.
            ValueError: a row that does not fit.
            RuntimeError: the cache was closed, or a sequence is reserved.
        """
        self._check_not_closed("begin")
        self._close_open()
        pairs = list(batch)
        sequences = tuple(seq for seq, _ in pairs)
        num_new = [n for _, n in pairs]
        records = [self._writable(seq, "begin") for seq in sequences]
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"batch: expected each sequence once, got {sequences}")
        for n in num_new:
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise ValueError(f"num_new: expected integers >= 0, got {n!r}")
        for seq in prompt_goes_on:
            if seq not in sequences or not self.in_prompt(seq):
                raise ValueError(
                    f"prompt_goes_on: expected sequences of the batch whose prompt has not ended, got {seq!r}"
                )
        state = self._states.find(sequences, records)
        self.pool.forward_opened(id(self))
        try:
            self._reserve_pages(sequences, records, num_new)
            for tables in state.tables:
                tables.refresh(num_new)
            self._open = ForwardBatch(
                self, state, num_new, records, dense=dense, prompt_goes_on=prompt_goes_on
            )
        except BaseException:
            self.pool.forward_closed(id(self))
            self._trim(sequences)
            raise
        return self._open

    def reserve(self, seqs: Sequence[int], max_tokens: int) -> ReservedBatch:
        """Prepares decoding by a compiled step: pages for up to `max_tokens` stored tokens in each sequence,
        tables of fixed width, and tensors that the step itself advances.

        Until its `release`, these sequences can't be begun, cropped, forked or freed, and the pool does not
        grow.

        Raises:
            OutOfPagesError: nothing changed.
            ValueError: `max_tokens` is below a stored length, `record_selection` is on (nothing is recorded
                inside a graph), or the policy is not one of those that a compiled step can honour.
        """
        self._close_open()
        sequences = tuple(seqs)
        records = [self._writable(seq, "reserve") for seq in sequences]
        if not sequences or len(set(sequences)) != len(sequences):
            raise ValueError(f"seqs: expected at least one sequence, each once, got {sequences}")
        if self.config.record_selection:
            raise ValueError("record_selection: expected False with reserved decoding, got True")
        if self.policy is not None:
            self.policy.check_reservable()
        if self.plugins:
            raise ValueError(f"plugins: expected none with reserved decoding, got {self.plugins}")
        for seq, record in zip(sequences, records, strict=True):
            self._check_whole("reserve", seq, record)
        lengths = [self.length(seq) for seq in sequences]
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < max(lengths):
            raise ValueError(
                f"max_tokens: expected at least {max(lengths)}, the longest stored length, got {max_tokens!r}"
            )
        num_new = [max_tokens - length for length in lengths]
        width = -(-max_tokens // self.config.page_size)
        with self.pool.lock:  # no other cache makes the pool grow between the pages and the registration
            try:
                self._reserve_pages(sequences, records, num_new)
                tables = [
                    BatchTables(
                        group, [record.ids[index] for record in records], self.config, width=max(width, 1)
                    )
                    for index, group in enumerate(self.pool.groups)
                ]
                for table in tables:
                    table.refresh(num_new)
                reserved = ReservedBatch(self, sequences, tables, max_tokens)
            except BaseException:
                self._trim(sequences)
                raise
            self.pool.reservation_opened(id(self))
        for record in records:
            record.reserved = True
        self._reservations.add(reserved)
        return reserved

    def finish_forward(self, forward: ForwardBatch, *, committed: bool) -> None:
        """For `ForwardBatch` only: makes its tokens count, or gives its pages back."""
        assert self._open is forward
        self._open = None
        self.pool.forward_closed(id(self))
        moved: set[int] = set()
        before = self._eviction_state(forward.sequences, forward.num_new)
        try:
            if committed and forward.eviction is not None:
                moved, num_evicted = forward.eviction.apply(forward)
                self.recorder.tokens_evicted += num_evicted
        except BaseException:
            self._trim(forward.sequences)
            raise
        if not committed:
            self._trim(forward.sequences)
            return
        for seq, n in zip(forward.sequences, forward.num_new, strict=True):
            record = self._records[seq]
            if seq in moved:
                record.next_position += n
                self._states.forget(seq)
            else:
                self.advance(seq, n)
            if n and seq not in forward.prompt_goes_on:
                if record.in_prompt and self.plugin_stack is not None:
                    self.plugin_stack.prefill_done(PrefillDone(seq, record.num_tokens(self.pool)))
                record.in_prompt = False
        self._tell_evicted(forward.sequences, before)

    def advance(self, seq: int, num_new: int) -> None:
        """For forwards only: `num_new` reserved and written tokens become part of the sequence."""
        record = self._records[seq]
        for group, sequence_id in zip(self.pool.groups, record.ids, strict=True):
            group.allocator.commit(sequence_id, num_new)
        record.next_position += num_new

    def end_reservation(self, reserved: ReservedBatch) -> None:
        """For `ReservedBatch` only: its sequences are ordinary again."""
        for seq in reserved.sequences:
            self._records[seq].reserved = False
        self._reservations.discard(reserved)
        self.pool.reservation_closed(id(self))
        self._trim(reserved.sequences)

    def _eviction_state(self, seqs: Sequence[int], num_new: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Tokens evicted so far and pages, of each sequence and layer group with `num_new` more tokens;
        nothing where no plugin would be told.
        """
        if self.plugin_stack is None:
            return []
        page_size = self.config.page_size
        return [
            [
                (evicted, -(-(length + n) // page_size))
                for evicted, length in zip(record.evicted, record.lengths(self.pool), strict=True)
            ]
            for record, n in zip(map(self._record, seqs), num_new, strict=True)
        ]

    def _tell_evicted(self, seqs: Sequence[int], before: list[list[tuple[int, int]]]) -> None:
        """Tells plugins what was evicted since `_eviction_state`."""
        stack = self.plugin_stack
        if stack is None:
            return
        after = self._eviction_state(seqs, [0] * len(seqs))
        for seq, old, new in zip(seqs, before, after, strict=True):
            record = self._record(seq)
            moved = [now > then for (then, _), (now, _) in zip(old, new, strict=True)]
            if any(moved):
                full = [length // self.config.page_size for length in record.lengths(self.pool)]
                unmoved = [0 if has_moved else n for has_moved, n in zip(moved, full, strict=True)]
                stack.resume(record, unmoved, self.group_of_layer)
            for group, (evicted, pages), (evicted_now, pages_now) in zip(
                self.pool.groups, old, new, strict=True
            ):
                if evicted_now > evicted:
                    stack.page_evicted(
                        PageEvicted(seq, tuple(group.layer_ids), evicted_now - evicted, pages - pages_now)
                    )

    # -- contents --------------------------------------------------------------------------------------------

    def page_ids(self, seq: int, group: int = 0) -> torch.Tensor:
        """Page ids of the committed tokens of a sequence, int32, on the cache's device."""
        record = self._record(seq)
        if not 0 <= group < len(self.pool.groups):
            raise ValueError(f"group: expected 0 to {len(self.pool.groups) - 1}, got {group}")
        allocator = self.pool.groups[group].allocator
        num_pages = -(-allocator.length(record.ids[group]) // self.config.page_size)
        return torch.from_numpy(allocator.page_ids(record.ids[group], 0)[:num_pages]).to(self.device)

    def dense(self, layer_idx: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values of a sequence, fresh [num_kv_heads, length, head_dim] in the pages' dtype;
        those of int8 pages in fp32, scale * code.
        """
        self._check_layer(layer_idx)
        pool = self.pool.layers[layer_idx]
        group = self.group_of_layer[layer_idx]
        page_ids = self.page_ids(seq, group)
        with torch.no_grad():
            k, v, k_scales, v_scales, _ = ops.gather_pages(page_ids, *pool.parts[:-1], None)
            if pool.dtype == torch.int8:
                k, v = k_scales[..., None] * k, v_scales[..., None] * v
            shape = (self.num_kv_heads, page_ids.numel() * self.config.page_size, self.head_dim)
            length = self.length(seq, group)
            return k.transpose(0, 1).reshape(shape)[:, :length], v.transpose(0, 1).reshape(shape)[:, :length]

    def export(self, seqs: Sequence[int]) -> bytes:
        """The sequences as bytes, for `import_` of a cache of the same model and page format."""
        return serialization.export_sequences(self, seqs)

    def import_(self, data: bytes) -> list[int]:
        """Handles of the sequences in `data`, bit for bit as they were exported.

        Raises:
            ValueError: damaged data, or a header field that does not match this cache, by name; nothing
                changed.
            OutOfPagesError: nothing changed.
        """
        return serialization.import_sequences(self, data)

    # -- accounting ------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters since creation, `reset()` or `reset_stats()`. On CUDA this waits for the device."""
        return self.recorder.summary(
            kv_bytes_held=self.pool.bytes_held,
            kv_bytes_reserved=self.pool.bytes_reserved,
            pool_growths=self.pool.num_growths,
        )

    def plugin_reports(self) -> dict[str, dict[str, Any]]:
        """What each plugin did in this cache, by its name; empty without plugins."""
        return {} if self.plugin_stack is None else self.plugin_stack.reports()

    def reset_stats(self) -> None:
        """Sets the counters to 0 and drops the selection history."""
        self.recorder.reset()

    def selection_history(self) -> list[SelectionStep]:
        """The pages selected in each sparse step, oldest first; empty unless `record_selection` is on."""
        return list(self.recorder.history)

    def check(self) -> None:
        """Raises RuntimeError naming the first broken invariant of pages, lengths or tables. O(pool)."""
        self.pool.check()
        for seq, record in self._records.items():
            lengths = record.lengths(self.pool)
            totals = [n + evicted for n, evicted in zip(lengths, record.evicted, strict=True)]
            if len(set(totals)) != 1:
                raise RuntimeError(
                    f"sequence {seq}: expected one length in all layer groups, got {lengths} and "
                    f"{record.evicted} evicted"
                )
        self._states.check()

    def close(self) -> None:
        """Frees all sequences, open forwards and reservations; also done when the cache is garbage collected.
        No-op when closed.
        """
        self._close_open()
        for reserved in list(self._reservations):
            reserved.release()
        self._states.clear()
        self._finalizer()

    def copy(
        self,
        *,
        config: SparseConfig | None = None,
        policy: Policy | str | None = None,
        plugins: Sequence[PluginLike] | None = None,
    ) -> PagedKVCache:
        """A cache over the same pool with a copy-on-write fork of every sequence, under the same handles:
        what was prefilled once can be decoded in several ways.

        Args:
            config: of the copy; default the same. Page size, scorer and element type must be the pool's.
            policy: of the copy; default the same ("query_aware" names the one of a cache without policy).
            plugins: of the copy; default the same, those of the policy aside. Reports begin anew.

        Raises:
            ValueError: they do not fit the pool, by name; or another policy should evict from sequences whose
                beginning it has not seen.
        """
        self._close_open()
        for seq in self._records:
            self._writable(seq, "copy")
        copy = PagedKVCache(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            config=self.config if config is None else config,
            dtype=self.dtype,
            device=self.device,
            fingerprint=self.fingerprint,
            pool=self.pool,
            policy=self.policy if policy is None else policy,
            plugins=self._given_plugins if plugins is None else plugins,
        )
        for seq, record in self._records.items():
            copy._check_beginning(seq, record, self)
        for seq, record in self._records.items():
            copy._records[seq] = record.fork(self.pool)
            copy._forget_other_rules(copy._records[seq], self)
        copy._next_handle = self._next_handle
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """As `copy`, with the same config, policy and plugins."""
        memo[id(self)] = copy = self.copy()
        return copy

    def __reduce__(self) -> Any:
        raise TypeError("PagedKVCache can't be pickled: use export() and import_()")

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_layer(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx: expected 0 to {self.num_layers - 1}, got {layer_idx}")

    def _check_whole(self, action: str, seq: int, record: SequenceRecord) -> None:
        if record.frontier:
            raise ValueError(
                f"{action}: expected a sequence with all its tokens, got {seq}, some of which were evicted"
            )

    def _check_beginning(self, seq: int, record: SequenceRecord, source: PagedKVCache) -> None:
        """Raises ValueError where the policy here can't go on with a sequence that began in `source`."""
        rule = self.plan.eviction
        if rule is None or rule == source.plan.eviction or not record.num_tokens(source.pool):
            return
        if not record.in_prompt or rule.per_step:
            raise ValueError(
                f"policy: expected {source.policy}, or sequences whose beginning {rule} can do "
                f"without, got sequence {seq}"
            )

    def _forget_other_rules(self, record: SequenceRecord, source: PagedKVCache) -> None:
        """Drops what policy and plugins of `source` remember of a sequence, where they are not those here."""
        if self.plan.eviction != source.plan.eviction:
            record.memory.clear()
        if self.plugins != source.plugins:
            record.plugin_memory.clear()

    def _check_not_closed(self, action: str) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"{action}: expected an open cache, got one that was closed")

    def _add(self, record: SequenceRecord) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._records[handle] = record
        return handle

    def _record(self, seq: int) -> SequenceRecord:
        record = self._records.get(seq)
        if record is None:
            raise ValueError(f"seq: expected a live sequence of this cache, got {seq!r}")
        return record

    def _writable(self, seq: int, action: str) -> SequenceRecord:
        record = self._record(seq)
        if record.reserved:
            raise RuntimeError(
                f"{action}: sequence {seq} is reserved for compiled decoding; release the reservation first"
            )
        return record

    def _settle(self, seq: int, action: str) -> SequenceRecord:
        """The record of a sequence about to change, outside any forward."""
        record = self._writable(seq, action)
        if self._open is not None and seq in self._open.sequences:
            self._close_open()
        return record

    def _close_open(self) -> None:
        if self._open is not None:
            self._open.abandon()

    def _reserve_pages(
        self, sequences: tuple[int, ...], records: list[SequenceRecord], num_new: list[int]
    ) -> None:
        for index, group in enumerate(self.pool.groups):
            if group.reserve([record.ids[index] for record in records], num_new):
                for seq, record in zip(sequences, records, strict=True):
                    # Only pages from the first one that is about to be written may have been replaced.
                    self._states.note_changes(seq, record, record.lengths(self.pool))

    def _trim(self, sequences: tuple[int, ...]) -> None:
        for seq in sequences:
            record = self._records.get(seq)
            if record is None:
                continue
            for group, sequence_id in zip(self.pool.groups, record.ids, strict=True):
                group.allocator.trim(sequence_id)
            self._states.note_changes(seq, record, record.lengths(self.pool))
