"""`LinkedCache`: how the keys that `Cache.update` returns find back to their cache in the attention function.

Invariant: keys that were handed on come back to `attend` before those of the next layer are handed on. A
model that is not enabled would attend to the new keys alone, without any sign of it; it is refused here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

__all__ = ["LinkedCache"]


class LinkedCache(Cache):
    """A cache whose `update` hands keys on with `_hand_on`, and whose `attend` clears `_handed_on`."""

    _handed_on = False  # `update` gave keys away that have not come back to `attend`

    def _hand_on(self, key: torch.Tensor, layer_idx: int, keywords: dict[str, Any]) -> torch.Tensor:
        """The keys, marked (themselves, or in the keyword arguments of the attention call) as coming from
        this cache.

        Args:
            keywords: the keyword arguments of `update`.

        Raises:
            ValueError: the calling model does not attend through this cache.
        """
        if layer_idx > 0 and self._handed_on:
            raise ValueError(
                "cache: expected the enabled model it was made for, got one whose attention did not come "
                "back for the keys of the layer before (another model, or one that is not enabled)"
            )
        self._handed_on = True
        link = (self, layer_idx)
        if isinstance(keywords.get("kwargs"), dict):  # 5.24 and newer: those of the attention call, live
            keywords["kwargs"]["tinyserve_link"] = link
        else:
            key = key.view_as(key)  # never leave a mark on a tensor of the caller
            key._tinyserve_link = link  # type: ignore[attr-defined]
        return key
