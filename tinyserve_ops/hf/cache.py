"""TinyServeCache: a transformers `Cache` whose keys and values live in a `PagedKVCache`.

transformers speaks of rows and padded positions, the paged cache of sequences and stored tokens; this file
translates. `update` stores nothing: the append waits for the attention call, where the key mask says which
new tokens are real. Invariant between forwards: row i holds sequence `_seqs[i]`, whose length is the number
of unpadded positions of row i below `_pads.length`. A forward opens at its first layer and commits after its
last one, so a forward that raises leaves everything as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from tinyserve_ops.cache import PagedKVCache
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.errors import OutOfPagesError
from tinyserve_ops.forward import ForwardBatch
from tinyserve_ops.hf.early_exit import check_hooked
from tinyserve_ops.hf.layer import TinyServeLayer
from tinyserve_ops.hf.padding import PadRuns, new_tokens
from tinyserve_ops.hf.reserved_decoding import ReservedDecoding
from tinyserve_ops.hf.support import fingerprint, max_positions
from tinyserve_ops.plugins import Plugin, PluginLike, PluginStack, resolve
from tinyserve_ops.policies import Policy, PolicyPlan
from tinyserve_ops.pool_ops import append_tokens, check_new
from tinyserve_ops.stats import CacheStats

__all__ = ["ATTENTION_NAME", "MASK_SENTINEL", "MASK_SENTINEL_RESERVED", "TinyServeCache"]

# transformers tests attention names by substring; this one must not contain "sdpa", "flash", "flex", "eager",
# "paged|" or "/".
ATTENTION_NAME = "tinyserve"
# `kv_offset` values by which the mask function recognises our caches; real offsets are never negative.
MASK_SENTINEL = -1
MASK_SENTINEL_RESERVED = -2

# transformers renamed the argument of `Cache.crop` when it changed from a length (up to 5.16) to a number of
# tokens to remove. Only the meaning of 0 depends on it; negative numbers always remove, positive ones always
# are a length.
_CROP_ZERO_EMPTIES = "max_length" in Cache.crop.__code__.co_varnames[: Cache.crop.__code__.co_argcount]


@dataclass
class _Forward:
    """The forward under way: made at its first layer, gone after its last."""

    # Padded new positions of every row.
    num_new: int
    # Which are real, bool [batch, num_new], and where they lie in [batch * num_new], int64. None: all are.
    valid: torch.Tensor | None
    index: torch.Tensor | None
    # None when every new position is padding.
    batch: ForwardBatch | None
    last_layer: int


class TinyServeCache(ReservedDecoding):
    """Paged KV cache for `generate(past_key_values=...)`, `generate(cache=...)` and plain forwards of an
    enabled model.

    Usually made by `generate` itself or by `Handle.new_cache()`. Forward several times, crop, copy
    (copy-on-write), reorder.

    Args:
        config: the model's config; shared, not copied.
        sparse: how decode steps choose pages; default `SparseConfig()`.
        max_tokens: capacity of the pool, summed over rows; default rows x the model's positions (the pool
            grows when needed).
        policy, layer_groups, plugins: as for `PagedKVCache`.

    Attributes:
        plugins: those at work, of the policy first.
        prompt_length: padded positions of a prompt that comes in several forwards, until `reset`. None: the
            first forward of a row is its prompt. Policies rule over what follows the prompt; `generate` sets
            it where it cuts a prompt (`prefill_chunk_size`).
    """

    def __init__(
        self,
        config: Any,
        sparse: SparseConfig | None = None,
        *,
        max_tokens: int | None = None,
        policy: Policy | str | None = None,
        layer_groups: Sequence[Sequence[int]] | None = None,
        plugins: Sequence[PluginLike] | None = None,
    ) -> None:
        self._on_delete: Callable[[CacheStats, dict[str, dict[str, Any]]], None] | None = None
        self._kv: PagedKVCache | None = None
        self.config = config.get_text_config(decoder=True)  # the very object the attention modules look at
        self.sparse = sparse if sparse is not None else SparseConfig()
        self.num_layers = int(self.config.num_hidden_layers)
        plan = PolicyPlan.make(policy, self.sparse, self.num_layers)
        self.policy = plan.policy
        self._given_plugins = resolve(plugins)
        # The stack at work is that of the paged cache, made with the first keys; errors should come now.
        stack, self._plan = PluginStack.make(self._given_plugins, plan, self.sparse, self.num_layers)
        self.plugins: tuple[Plugin, ...] = () if stack is None else stack.plugins
        self._reads_logits = stack is not None and bool(stack.logit_layers)
        self.prompt_length: int | None = None
        self._max_tokens = max_tokens
        self._layer_groups = layer_groups
        self._seqs: list[int] = []
        self._pads = PadRuns(0)
        self._forward: _Forward | None = None
        self._is_active = True  # the forward under way attends through us
        super().__init__(layers=[TinyServeLayer(self) for _ in range(self.num_layers)])

    # What transformers asks ---------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new keys and values on to the attention function, which stores them.

        Returns them unchanged, marked with this cache. Under another attention ("sdpa", "eager") they are
        stored here, and everything is returned densely in padded positions, so that switching attention never
        computes something else.

        Raises:
            ValueError: the calling model does not attend through this cache.
        """
        if layer_idx == 0:  # once a forward: a transformers config looks every attribute up the slow way
            self._is_active = self._is_ours()
        if not self._is_active:
            return self._update_for_other_attention(key_states, value_states, layer_idx)
        return self._hand_on(key_states, layer_idx, kwargs), value_states

    def _is_ours(self) -> bool:
        """Whether the model attends through this cache, and not through "sdpa" or "eager"."""
        return bool(self.config._attn_implementation == ATTENTION_NAME)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Padded length: an int, or a 0-d tensor while decoding is reserved."""
        return self._pads.length if self._reserved is None else self._reserved_length

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[Any, int]:
        """(keys, offset); the offset is the sign by which our mask function knows this cache."""
        num_new = query if isinstance(query, int) else query.shape[0]
        is_traced = torch.compiler.is_compiling()
        # A traced step is one of ours; asking its config would put a guard into the graph.
        if not is_traced and not self._is_ours():
            self._sync()
            return self._pads.length + num_new, 0
        if self._reserved is not None:  # constant: nothing that grows from step to step
            if num_new == 1 and not is_traced:
                self._count_step()  # a step that generate() compiles passes no other eager place
            return self._reserved_positions, MASK_SENTINEL_RESERVED
        length = self._pads.length + num_new
        if self._reserve_tokens is not None:
            return max(self._reserve_tokens, length), MASK_SENTINEL_RESERVED
        return length, MASK_SENTINEL

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The reserved length in padded positions, or -1: unbounded (transformers 5.13 and newer)."""
        if self._reserved is not None:
            return self._reserved_positions
        return -1 if self._reserve_tokens is None else self._reserve_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """As `get_max_length`, under its older name."""
        return self.get_max_length()

    @property
    def is_initialized(self) -> bool:
        """Whether pools exist."""
        return self._kv is not None

    @property
    def is_compileable(self) -> bool:
        """Whether decode steps may be compiled: after `reserve`."""
        return self._reserve_tokens is not None and self._is_ours()

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self._seqs) or -1

    def crop(self, tokens: int) -> None:
        """Removes the last `-tokens` padded positions of every row, or keeps the first `tokens`.

        Args:
            tokens: negative: positions to remove (all, when there are fewer). Positive: length to keep. 0
                follows the installed transformers, whose own decoding loops call it: it removes nothing where
                its argument is a number of tokens to remove (5.17 and newer), and empties the cache where it
                is a length. `crop_to` says it without doubt.
        """
        if tokens == 0 and not _CROP_ZERO_EMPTIES:
            return
        self._sync()
        self.crop_to(min(tokens, self._pads.length) if tokens >= 0 else max(0, self._pads.length + tokens))

    def crop_to(self, length: int) -> None:
        """Keeps the first `length` padded positions of every row; pages behind them are given back.

        Raises:
            ValueError: `length` is negative or beyond the length.
        """
        self._sync()
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self._pads.length:
            raise ValueError(f"length: expected 0 to {self._pads.length}, the padded length, got {length!r}")
        self._suspend()
        self._crop_rows(length)
        self._resume()

    def _crop_rows(self, length: int) -> None:
        if length < self._pads.length:
            for row, seq in enumerate(self._seqs):
                self._paged().crop(seq, self._pads.num_stored(row, length))
            self._pads.crop(length)

    def reset(self) -> None:
        """Forgets everything and gives all pages back; the next forward may have another batch size."""
        self._suspend()
        self._free_rows()
        self.prompt_length = None

    def _free_rows(self) -> None:
        for seq in self._seqs:
            self._paged().free(seq)
        self._seqs, self._pads = [], PadRuns(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes a copy-on-write copy of row `beam_idx[i]`; an identity costs nothing."""
        self._take_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows of `indices` (integers, or a bool per row); without any, as `reset`."""
        self._take_rows((indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, copy-on-write."""
        if repeats < 1:
            raise ValueError(f"repeats: expected at least 1, got {repeats}")
        self._take_rows([row for row in range(len(self._seqs)) for _ in range(repeats)])

    def _take_rows(self, rows: list[int]) -> None:
        if not self._seqs or rows == list(range(len(self._seqs))):
            return
        bad = [row for row in rows if not 0 <= row < len(self._seqs)]
        if bad:
            raise ValueError(f"row index: expected 0 to {len(self._seqs) - 1}, got {bad[0]}")
        if not rows:
            self.reset()
            return
        self._suspend()
        self._seqs = self._paged().reorder(self._seqs, rows)
        self._pads.take(rows)
        self._resume()

    # What users ask -----------------------------------------------------------------------------------------

    @property
    def kv(self) -> PagedKVCache:
        """The paged cache underneath (pages, sequences, export). RuntimeError before the first forward."""
        if self._kv is None:
            raise RuntimeError("TinyServeCache.kv: expected at least one forward before, got none")
        return self._kv

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequence of each row in `kv`."""
        return tuple(self._seqs)

    def stored_lengths(self) -> list[int]:
        """Real tokens stored of each row (in the first layer group)."""
        self._sync()
        return [self.kv.length(seq) for seq in self._seqs]

    def stats(self) -> CacheStats:
        """Counters of the steps taken: see `tinyserve_ops.stats.CacheStats`. RuntimeError before the first
        forward.
        """
        self._sync()
        return self.kv.stats()

    def plugin_reports(self) -> dict[str, dict[str, Any]]:
        """What each plugin did in this cache, by its name. RuntimeError before the first forward."""
        return self.kv.plugin_reports()

    def dense(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) of a layer, each [batch, num_kv_heads, length, head_dim] in padded positions, zeros at pads.
        Copies.

        Raises:
            RuntimeError: there are no tokens, or some were evicted (`kv.dense` and `kv.kept_tokens` tell).
        """
        self._sync()
        group = 0 if self._kv is None else self._kv.group_of_layer[layer_idx]
        if any(self.kv.length(seq, group) < self.kv.num_tokens(seq) for seq in self._seqs):
            raise RuntimeError("TinyServeCache.dense: expected all tokens to be stored, got evicted ones")
        pairs = [self.kv.dense(layer_idx, seq) for seq in self._seqs]
        if not pairs:
            raise RuntimeError("TinyServeCache.dense: expected stored tokens, got an empty cache")
        return self._padded([k for k, _ in pairs]), self._padded([v for _, v in pairs])

    def _padded(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self._pads:
            return torch.stack(list(rows))
        out = rows[0].new_zeros(len(rows), rows[0].size(0), self._pads.length, rows[0].size(2))
        for row, stored in enumerate(rows):
            out[row].index_copy_(1, self._pads.stored_positions(row, out.device), stored)
        return out

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.dense(layer_idx) for layer_idx in range(self.num_layers))

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.dense(layer_idx)

    def copy(
        self,
        *,
        sparse: SparseConfig | None = None,
        policy: Policy | str | None = None,
        plugins: Sequence[PluginLike] | None = None,
    ) -> TinyServeCache:
        """A copy-on-write copy: pages are shared until either side writes to them.

        Args:
            sparse, policy, plugins: of the copy, as for `PagedKVCache.copy`; default the same.
        """
        self._suspend()
        new = TinyServeCache(
            self.config,
            self.sparse if sparse is None else sparse,
            max_tokens=self._max_tokens,
            policy=self.policy if policy is None else policy,
            layer_groups=self._layer_groups,
            plugins=self._given_plugins if plugins is None else plugins,
        )
        new.prompt_length = self.prompt_length
        if self._kv is not None:
            new._kv = self._kv.copy(config=new.sparse, policy=new.policy, plugins=new._given_plugins)
        new._seqs, new._pads, new._reserve_tokens = list(self._seqs), self._pads.copy(), self._reserve_tokens
        self._resume()
        new._resume()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> TinyServeCache:
        """As `copy`, with the same config, policy and plugins."""
        memo[id(self)] = new = self.copy()
        return new

    def __del__(self) -> None:
        if self._on_delete is not None and self._kv is not None and not sys.is_finalizing():
            if self._kv.sequences:  # none: the cycle collector has closed it already
                self._suspend()
            self._on_delete(self._kv.stats(), self._kv.plugin_reports())

    def __repr__(self) -> str:
        return f"TinyServeCache(layers={self.num_layers}, rows={len(self._seqs)}, length={self._pads.length})"

    # What the attention function asks -----------------------------------------------------------------------

    def attend(
        self,
        layer_idx: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sm_scale: float,
        window: int,
    ) -> torch.Tensor:
        """Stores the new keys and values of one layer, then attends.

        Args:
            query, key, value: [batch, heads, num_new, head_dim], any strides with head_dim stride 1.
            attention_mask: None, a key mask [batch, length], or a causal 4D mask; read at the first layer of
                a forward.

        Returns:
            [batch, num_new, num_heads, head_dim], zeros at padding.
        """
        self._handed_on = False
        if self._reserved is not None and query.size(2) == 1:
            return self._attend_reserved(layer_idx, query, key, value, sm_scale, window)
        forward = self._forward_at(layer_idx, module, key, attention_mask)
        batch_size, num_heads, num_new, _ = query.shape
        if forward.batch is None:
            out = query.new_zeros(batch_size * num_new, num_heads, value.size(3))
        else:
            index = forward.index
            if num_new == 1 and index is None:  # as `_pack` does it, without three more Python frames
                q, k, v = query.select(2, 0), key.select(2, 0), value.select(2, 0)
            else:
                q, k, v = _pack(query, index), _pack(key, index), _pack(value, index)
            out = forward.batch.attend(layer_idx, q, k, v, sm_scale, window)
            if index is not None:
                out = out.new_zeros(batch_size * num_new, *out.shape[1:]).index_copy_(0, index, out)
        if layer_idx == self.num_layers - 1:
            self._commit()
        return out.view(batch_size, num_new, num_heads, out.size(2))

    @property
    def open_batch(self) -> ForwardBatch | None:
        """The forward of real tokens that is under way."""
        return None if self._forward is None else self._forward.batch

    @property
    def packed_index(self) -> torch.Tensor | None:
        """Where the packed tokens of the forward under way lie in [batch * num_new], int64; None: all of
        them, in order.
        """
        return None if self._forward is None else self._forward.index

    def store(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the new keys and values of a layer that is left out, in a forward under way; shapes as for
        `attend`.
        """
        forward = self._forward
        assert forward is not None
        assert forward.batch is not None
        forward.last_layer = layer_idx
        forward.batch.store(layer_idx, _pack(key, forward.index), _pack(value, forward.index))
        if layer_idx == self.num_layers - 1:
            self._commit()

    def _forward_at(
        self,
        layer_idx: int,
        module: torch.nn.Module | None,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> _Forward:
        """The forward under way, or a new one where this layer can't be its next."""
        forward = self._forward
        if forward is None or layer_idx <= forward.last_layer or forward.num_new != key.size(2):
            forward = self._begin(module, key, attention_mask)
        forward.last_layer = layer_idx
        return forward

    def _begin(
        self, module: torch.nn.Module | None, key: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> _Forward:
        self._suspend()
        self._check_model(module, key)
        batch_size, _, num_new, _ = key.shape
        fresh = not self._seqs
        pads = PadRuns(batch_size) if fresh else self._pads
        if self._reserve_tokens is not None and attention_mask is not None and attention_mask.dim() == 4:
            # OPT of 4.57 makes it as wide as the reservation.
            attention_mask = attention_mask[..., : pads.length + num_new]
        valid = new_tokens(attention_mask, pads, num_new)
        index, counts = None, [num_new] * batch_size
        if valid is not None:
            index, counts = valid.flatten().nonzero().squeeze(1), valid.sum(dim=1).tolist()
        longest = max((pads.num_stored(row) + count for row, count in enumerate(counts)), default=0)
        if self._reserve_tokens is not None and longest > self._reserve_tokens:
            raise OutOfPagesError(
                f"max_tokens: expected at most the {self._reserve_tokens} reserved tokens, got {longest}"
            )
        if self._kv is None:
            self._kv = self._new_pools(key)
        if fresh:
            self._seqs, self._pads = [self._kv.new_sequence() for _ in range(batch_size)], pads
        rows = [(seq, count) for seq, count in zip(self._seqs, counts, strict=True) if count]
        try:
            batch = self._kv.begin(rows, prompt_goes_on=self._in_prompt(rows, num_new)) if rows else None
        except (ValueError, OutOfPagesError):
            if fresh:
                self._free_rows()
            raise
        self._forward = _Forward(num_new, valid, index, batch, -1)
        return self._forward

    def _in_prompt(self, rows: list[tuple[int, int]], num_new: int) -> list[int]:
        """Sequences whose prompt does not end with a forward of `num_new` padded positions."""
        if self.prompt_length is None or self._pads.length + num_new >= self.prompt_length:
            return []
        return [seq for seq, _ in rows if self._paged().in_prompt(seq)]

    def _commit(self, *, allow_missing_layers: bool = False) -> None:
        forward, self._forward = self._forward, None
        assert forward is not None
        before = self._pads.length
        if forward.batch is not None:
            try:
                forward.batch.commit(allow_missing_layers=allow_missing_layers)
            except (ValueError, OutOfPagesError):  # no room for what a policy keeps: nothing has happened
                self._drop_rows_of_a_failed_start()
                raise
        self._pads.append(forward.num_new, forward.valid)
        try:
            self._resume()
        except (ValueError, OutOfPagesError):  # not reserved: then this forward has not happened either
            self._crop_rows(before)
            self._drop_rows_of_a_failed_start()
            raise

    def _abandon(self) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            if forward.batch is not None:
                forward.batch.abandon()
            self._drop_rows_of_a_failed_start()

    def _drop_rows_of_a_failed_start(self) -> None:
        """A first forward that failed leaves nothing behind, not even its batch size."""
        if not self._pads.length:
            self._free_rows()

    def _check_model(self, module: torch.nn.Module | None, key: torch.Tensor) -> None:
        config = getattr(module, "config", self.config)
        if config is not self.config:
            raise ValueError(
                f"cache: expected the model it was made for ({type(self.config).__name__} with "
                f"{self.num_layers} layers), got another one ({type(config).__name__}); "
                "make a new cache for it"
            )
        if self._reads_logits and module is not None:
            check_hooked(module)
        if self._kv is not None and (key.size(1), key.size(3)) != (self._kv.num_kv_heads, self._kv.head_dim):
            raise ValueError(
                f"cache: expected keys of {self._kv.num_kv_heads} heads of {self._kv.head_dim}, "
                f"got {key.size(1)} of {key.size(3)}"
            )
        if self._seqs and key.size(0) != len(self._seqs):
            raise ValueError(
                f"batch size: expected {len(self._seqs)}, the rows of the cache, got {key.size(0)}"
            )

    def _new_pools(self, key: torch.Tensor) -> PagedKVCache:
        kv_dtype = self.sparse.kv_dtype
        max_tokens = self._max_tokens
        if max_tokens is None:
            max_tokens = key.size(0) * max(max_positions(self.config) or 0, key.size(2))
        return PagedKVCache(
            self.num_layers,
            key.size(1),
            key.size(3),
            config=self.sparse,
            dtype=key.dtype if kv_dtype is None else getattr(torch, kv_dtype),
            device=key.device,
            max_tokens=max_tokens,
            fingerprint=fingerprint(self.config),
            policy=self.policy,
            layer_groups=self._layer_groups,
            plugins=self._given_plugins,
        )

    def _update_for_other_attention(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._plan.eviction is not None or self.plugins:
            names = [item.name for item in (self.policy, *self.plugins) if item is not None]
            raise ValueError(
                f"attn_implementation: expected {ATTENTION_NAME!r} with policy {', '.join(names)} "
                f"(call enable), got {self.config._attn_implementation!r}"
            )
        forward = self._forward_at(layer_idx, None, key, self._all_real(key) if self._pads else None)
        batch = forward.batch
        assert batch is not None
        past = self.dense(layer_idx)
        pool, group = self.kv.pool.layers[layer_idx], self.kv.group_of_layer[layer_idx]
        check_new(pool, key, key, value)
        packed = (_pack(key, None), _pack(value, None))
        append_tokens(pool, *packed, batch.cu_query_lens, batch.seq_lens(group), batch.page_table(group))
        if layer_idx == self.num_layers - 1:
            self._commit(allow_missing_layers=True)  # attended elsewhere
        return torch.cat([past[0].to(key.dtype), key], dim=2), torch.cat(
            [past[1].to(value.dtype), value], dim=2
        )

    def _all_real(self, key: torch.Tensor) -> torch.Tensor:
        """A key mask that says: padding as stored, every new token real."""
        mask = torch.ones(key.size(0), self._pads.length + key.size(2), dtype=torch.bool, device=key.device)
        for row, runs in enumerate(self._pads.runs):
            for start, stop in runs:
                mask[row, start:stop] = False
        return mask


def _pack(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, num_new, head_dim] -> packed [tokens, heads, head_dim]: a view where strides allow and
    nothing is padded.
    """
    packed = x.select(2, 0) if x.size(2) == 1 else x.transpose(1, 2).flatten(0, 1)
    return packed if index is None else packed.index_select(0, index)
