"""The per-layer objects that transformers expects in `Cache.layers`.

They hold nothing: keys and values live in pages, and the cache that owns them answers every question.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["TinyServeLayer"]


class TinyServeLayer(CacheLayerMixin):
    """What transformers asks of a single layer; everything is answered by the cache that owns it."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: Cache) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)  # a strong one would leave freeing the pages to the cycle collector

    def _cache(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("TinyServeLayer: expected its cache to be alive, got one that was deleted")
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Nothing: pools are made by the cache when the first keys arrive."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refused: a layer doesn't know its own index; transformers goes through `Cache.update`."""
        raise NotImplementedError("TinyServeLayer.update: call update on the cache")

    def get_seq_length(self, *args: Any) -> Any:
        """Padded length of the cache."""
        return self._cache().get_seq_length()

    def get_mask_sizes(self, query: Any) -> tuple[Any, int]:
        """As `TinyServeCache.get_mask_sizes`."""
        return self._cache().get_mask_sizes(query, 0)

    def get_max_length(self) -> int:
        """As `TinyServeCache.get_max_length`."""
        return self._cache().get_max_length()

    def get_max_cache_shape(self) -> int:
        """As `get_max_length`, under its older name."""
        return self._cache().get_max_length()

    def offload(self) -> None:
        """Nothing: pages stay where they are."""

    def prefetch(self) -> None:
        """Nothing: pages stay where they are."""
