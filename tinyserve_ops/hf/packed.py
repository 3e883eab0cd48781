"""Packed forwards: many sequences, some in prefill and some in decode, in one call of an enabled model
without padding.

`PackedBatch` is a transformers `Cache` of one row that holds all new tokens of all sequences one after the
other. It stores nothing itself: the sequences live in a `PagedKVCache`. Invariant: between `inputs` and the
last layer one forward is open; it commits after the last layer, and is dropped by the next `inputs` when the
model raised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from tinyserve_ops.cache import PagedKVCache
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.forward import ForwardBatch
from tinyserve_ops.hf.cache import ATTENTION_NAME, MASK_SENTINEL
from tinyserve_ops.hf.early_exit import check_hooked_model
from tinyserve_ops.hf.layer import TinyServeLayer
from tinyserve_ops.hf.link import LinkedCache
from tinyserve_ops.hf.support import (
    cache_argument,
    check_positions,
    fingerprint,
    max_positions,
    takes_argument,
    unwrap_model,
)
from tinyserve_ops.plugins import PluginLike
from tinyserve_ops.policies import Policy

__all__ = ["PackedBatch", "new_paged_cache"]


def new_paged_cache(
    model: Any,
    sparse: SparseConfig | None = None,
    *,
    max_tokens: int | None = None,
    policy: Policy | str | None = None,
    layer_groups: Sequence[Sequence[int]] | None = None,
    plugins: Sequence[PluginLike] | None = None,
) -> PagedKVCache:
    """A `PagedKVCache` of the shape, dtype and device of `model`.

    Args:
        sparse: how decode steps choose pages; default `SparseConfig()`.
        max_tokens: capacity, summed over sequences; default the model's positions.
        policy, layer_groups, plugins: as for `PagedKVCache`.
    """
    inner = unwrap_model(model)
    config = inner.config.get_text_config(decoder=True)
    sparse = sparse if sparse is not None else SparseConfig()
    return PagedKVCache(
        config.num_hidden_layers,
        _num_kv_heads(config),
        _head_dim(config),
        config=sparse,
        dtype=inner.dtype if sparse.kv_dtype is None else getattr(torch, sparse.kv_dtype),
        device=inner.device,
        max_tokens=max_tokens if max_tokens is not None else max_positions(config),
        fingerprint=fingerprint(config),
        policy=policy,
        layer_groups=layer_groups,
        plugins=plugins,
    )


def _num_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class PackedBatch(LinkedCache):
    """One ragged forward after another over a `PagedKVCache`.

    Example::

        kv = new_paged_cache(model)
        batch, a, b = PackedBatch(model, kv), kv.new_sequence(), kv.new_sequence()
        logits = batch.last_logits(model(**batch.inputs([(a, prompt), (b, [token])])))   # [2, vocabulary]

    Args:
        model: an enabled model (`tinyserve_ops.enable`).
        kv: where the sequences live; several batches may take turns on it.

    Raises:
        ValueError: `kv` has another shape, or was made for another kind of model.
    """

    def __init__(self, model: Any, kv: PagedKVCache) -> None:
        inner = unwrap_model(model)
        self.config = inner.config.get_text_config(decoder=True)
        self.kv = kv
        self.num_layers = int(self.config.num_hidden_layers)
        if kv.num_layers != self.num_layers:
            raise ValueError(f"kv: expected {self.num_layers} layers, the model's, got {kv.num_layers}")
        heads = (_num_kv_heads(self.config), _head_dim(self.config))
        if (kv.num_kv_heads, kv.head_dim) != heads:
            raise ValueError(
                f"kv: expected {heads[0]} kv heads of {heads[1]}, the model's, "
                f"got {kv.num_kv_heads} of {kv.head_dim}"
            )
        expected = fingerprint(self.config)
        if kv.fingerprint not in ("", expected):
            raise ValueError(f"kv: expected one made for {expected!r}, got one for {kv.fingerprint!r}")
        if kv.plugin_stack is not None and kv.plugin_stack.logit_layers:
            check_hooked_model(inner)
        self.batch: ForwardBatch | None = None
        self._last = torch.empty(0, dtype=torch.int64)  # packed index of each row's last token
        self._cache_argument = cache_argument(inner)
        self._keeps_logits = takes_argument(inner, "logits_to_keep")
        super().__init__(layers=[TinyServeLayer(self) for _ in range(self.num_layers)])

    def inputs(
        self, rows: Iterable[tuple[int, Sequence[int]]], *, prompt_goes_on: Collection[int] = ()
    ) -> dict[str, Any]:
        """Opens a forward and returns the keyword arguments of the model's call.

        Args:
            rows: (sequence, its new token ids), at least one token each; a sequence may come once.
            prompt_goes_on: sequences whose prompt is not complete with this forward (see
                `PagedKVCache.begin`).

        Returns:
            input_ids and position_ids [1, total], the cache, `use_cache`, and `logits_to_keep` (the last
            token of each row) where the model takes it.

        Raises:
            ValueError: empty rows, or tokens past the model's positions.
            OutOfPagesError: the pool can't hold them; nothing changed.
        """
        listed = [(seq, [int(t) for t in tokens]) for seq, tokens in rows]
        if not listed or any(not tokens for _, tokens in listed):
            raise ValueError("rows: expected at least one row, each with at least one token, got none")
        for seq, tokens in listed:
            check_positions(self.config, self.kv.next_position(seq) + len(tokens), num_new=len(tokens))
        batch = [(seq, len(tokens)) for seq, tokens in listed]
        self.batch = self.kv.begin(batch, prompt_goes_on=prompt_goes_on)
        self._last = self.batch.last_token_indices()
        device = self.batch.cu_query_lens.device
        values: dict[str, Any] = {
            "input_ids": torch.tensor([[t for _, tokens in listed for t in tokens]], device=device),
            "position_ids": self.batch.positions().unsqueeze(0),
            self._cache_argument: self,
            "use_cache": True,
        }
        if self._keeps_logits:
            values["logits_to_keep"] = self._last
        return values

    @property
    def cu_query_lens(self) -> torch.Tensor:
        """int32 [rows + 1]: where each row of the open or latest forward starts among the packed tokens."""
        return self._current().cu_query_lens

    def last_logits(self, outputs: Any) -> torch.Tensor:
        """[rows, vocabulary]: logits behind the last token of each row, also for models that return all
        (OPT).
        """
        logits = outputs.logits[0]
        return logits if self._keeps_logits else logits.index_select(0, self._last)

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sm_scale: float,
        window: int,
    ) -> torch.Tensor:
        """Called by the attention function: stores and attends one layer; [1, total, num_heads, head_dim]."""
        self._handed_on = False
        batch = self._current()
        if not batch.is_open:
            raise RuntimeError("PackedBatch: expected inputs() before every forward, got a second forward")
        if attention_mask is not None and attention_mask.dim() == 2 and not bool(attention_mask.all()):
            raise ValueError(
                "attention_mask: expected none, got padding; a packed batch holds real tokens only"
            )
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = batch.attend(layer_idx, q, k, v, sm_scale, window)
        if layer_idx == self.num_layers - 1:
            batch.commit()
        return out.unsqueeze(0)

    @property
    def open_batch(self) -> ForwardBatch | None:
        """The forward under way."""
        return self.batch

    @property
    def packed_index(self) -> None:
        """None: the tokens are packed already."""
        return None

    def store(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the new keys and values of a layer that is left out, [1, num_kv_heads, total, head_dim]."""
        batch = self._current()
        batch.store(layer_idx, *(x.transpose(1, 2).flatten(0, 1) for x in (key, value)))
        if layer_idx == self.num_layers - 1:
            batch.commit()

    def _current(self) -> ForwardBatch:
        if self.batch is None:
            raise RuntimeError("PackedBatch: expected inputs() before the forward, got none")
        return self.batch

    # What transformers asks ---------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new keys and values on to the attention function, marked with this batch."""
        if self.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(
                f"attn_implementation: expected {ATTENTION_NAME!r} (call enable), "
                f"got {self.config._attn_implementation!r}"
            )
        if key_states.size(0) != 1:
            raise ValueError(f"batch size: expected 1 (all rows packed into one), got {key_states.size(0)}")
        return self._hand_on(key_states, layer_idx, kwargs), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: position_ids are always given, and nothing before this forward is in this row."""
        return 0

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(new tokens, the sign of our caches)."""
        return query if isinstance(query, int) else query.shape[0], MASK_SENTINEL

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: unbounded."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: unbounded."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """False: the shape of every forward differs."""
        return False

    def __repr__(self) -> str:
        return f"PackedBatch(layers={self.num_layers}, kv={self.kv!r})"
