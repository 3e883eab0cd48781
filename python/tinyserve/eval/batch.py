"""`EvalBatch`: a packed forward that a probe watches.

What it computes is what `PackedBatch` computes; the probe only looks at the queries, keys and values that
pass through.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tinyserve_ops import PagedKVCache
from tinyserve_ops.forward import ForwardBatch
from tinyserve_ops.hf import PackedBatch

__all__ = ["EvalBatch", "LayerProbe"]


class LayerProbe(Protocol):
    """Looks at the layers of forwards of one sequence."""

    def observe(
        self,
        forward: ForwardBatch,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float,
        window: int,
    ) -> None:
        """`q` [tokens, num_heads, head_dim], `k` and `v` [tokens, num_kv_heads, head_dim]; stored and
        attended already.
        """
        ...


class EvalBatch(PackedBatch):
    """The forwards of one sequence at a time.

    Attributes:
        probe: sees every layer of every forward while it is not None.
        attention_seconds: what attention took, in all, without the probe.
    """

    def __init__(self, model: Any, kv: PagedKVCache) -> None:
        super().__init__(model, kv)
        self._model = model
        self.probe: LayerProbe | None = None
        self.attention_seconds = 0.0

    def feed(self, seq: int, token_ids: Sequence[int], *, prompt_goes_on: bool = False) -> torch.Tensor:
        """Appends tokens to a sequence in one forward; fp32 logits [vocabulary] behind the last of them."""
        inputs = self.inputs([(seq, token_ids)], prompt_goes_on=[seq] if prompt_goes_on else [])
        return self.last_logits(self._model(**inputs))[0].float()

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
        """As `PackedBatch.attend`; then the probe looks."""
        started = time.perf_counter()
        out = super().attend(layer_idx, query, key, value, attention_mask, sm_scale, window)
        self.attention_seconds += time.perf_counter() - started
        if self.probe is not None:
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            self.probe.observe(self._current(), layer_idx, q, k, v, sm_scale, window)
        return out

    def abandon(self) -> None:
        """Drops the forward under way."""
        if self.batch is not None:
            self.batch.abandon()
