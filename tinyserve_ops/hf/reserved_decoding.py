"""The reserved (compiled) decoding of a `TinyServeCache`: single-token steps of torch ops on static tensors.

While steps are reserved, the paged cache's `ReservedBatch` owns the sequences and the host learns their
lengths late. Invariant: whatever changes rows or lengths stands between `_suspend` and `_resume`, or after
`_sync`, so the padded length and the stored ones are those of the steps taken.
"""

from __future__ import annotations

from typing import Any

import torch

from tinyserve_ops.cache import PagedKVCache
from tinyserve_ops.errors import OutOfPagesError
from tinyserve_ops.hf.link import LinkedCache
from tinyserve_ops.hf.padding import PadRuns
from tinyserve_ops.hf.support import cache_argument, takes_argument, unwrap_model
from tinyserve_ops.plugins import Plugin
from tinyserve_ops.policies import Policy
from tinyserve_ops.reserved import ReservedBatch

__all__ = ["ReservedDecoding"]


class ReservedDecoding(LinkedCache):
    """The half of `TinyServeCache` that reserves."""

    num_layers: int
    policy: Policy | None
    _kv: PagedKVCache | None
    plugins: tuple[Plugin, ...]
    _seqs: list[int]
    _pads: PadRuns

    def __init__(self, layers: list[Any]) -> None:
        self._reserve_tokens: int | None = None
        self._reserved: ReservedBatch | None = None
        self._reserved_length: torch.Tensor | None = None
        self._reserved_positions = 0  # padded positions of a row that holds the reserved tokens
        self._step_counted = False  # the coming reserved step was, and has room
        super().__init__(layers=layers)

    def _abandon(self) -> None:
        """Drops an unfinished forward."""
        raise NotImplementedError

    def _paged(self) -> PagedKVCache:
        assert self._kv is not None
        return self._kv

    def reserve(self, max_tokens: int) -> None:
        """From now on single-token steps use only torch ops on static tensors, for `torch.compile` and CUDA
        graphs.

        Call it before or after the prefill. Prefill itself stays eager. New tokens of reserved steps are all
        taken as real.

        Args:
            max_tokens: stored tokens of every row in total, prompt included, padding not.

        Raises:
            OutOfPagesError, ValueError: that much can't be reserved; everything is as before.
        """
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens: expected a positive integer, got {max_tokens!r}")
        if self.policy is not None:
            self.policy.check_reservable()
        if self.plugins:
            raise ValueError(f"plugins: expected none with reserved decoding, got {self.plugins}")
        self._suspend()
        previous, self._reserve_tokens = self._reserve_tokens, max_tokens
        try:
            self._resume()
        except (ValueError, OutOfPagesError):
            self._reserve_tokens = previous
            self._resume()
            raise

    def step_inputs(self, model: Any, tokens: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of a reserved step, for `compiled(**cache.step_inputs(model, tokens))`: nothing
        in them depends on the length in a way that makes the step compile again.

        Args:
            model: the enabled model (not its compiled form).
            tokens: int64 [batch, 1].

        Raises:
            OutOfPagesError: the step doesn't fit into what was reserved. Nothing changed.
            RuntimeError: nothing is reserved.
        """
        if self._reserved is None or self._reserved_length is None:
            raise RuntimeError("step_inputs: expected reserved decoding (reserve, and a prefill), got none")
        if tuple(tokens.shape) != (len(self._seqs), 1):
            raise ValueError(f"tokens: expected shape {[len(self._seqs), 1]}, got {list(tokens.shape)}")
        self._reserved.check_room()  # always: nothing but this call sees a replayed graph
        self._step_counted = True
        inner = unwrap_model(model)
        values = {
            "input_ids": tokens,
            "position_ids": self._reserved.next_positions.unsqueeze(1).clone(),
            cache_argument(inner): self,
            "use_cache": True,
        }
        if takes_argument(inner, "cache_position"):
            # Without it these versions make a tensor of a traced length.
            values["cache_position"] = self._reserved_length.unsqueeze(0).clone()
        return values

    def release(self) -> None:
        """Ends `reserve`: lengths are read back and unused pages given back."""
        self._suspend()
        self._reserve_tokens = None

    def _sync(self) -> None:
        """Reads the lengths of reserved steps back to the host."""
        if self._reserved is not None:
            try:
                self._reserved.sync()
            except RuntimeError:  # said once: steps were run without room, and their tokens are dropped
                self._suspend()
                self._resume()
                raise
            self._step_counted = False
            self._take_lengths()

    def _take_lengths(self) -> None:
        """Counts the reserved steps that all rows took, as read back: a full row stops the batch."""
        kv = self._paged()
        before = [self._pads.num_stored(row) for row in range(len(self._seqs))]
        num_new = min(kv.length(seq) - length for seq, length in zip(self._seqs, before, strict=True))
        for seq, length in zip(self._seqs, before, strict=True):
            if kv.length(seq) > length + num_new:
                kv.crop(seq, length + num_new)
        self._pads.append(num_new, None)

    def _count_step(self) -> None:
        """Makes sure, once for each reserved step, that it has room."""
        if not self._step_counted and self._reserved is not None:
            self._reserved.check_room()
            self._step_counted = True

    def _suspend(self) -> None:
        """Makes the sequences ordinary again, as every change of rows or lengths needs; drops an unfinished
        forward.
        """
        self._abandon()
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._reserved_length, self._step_counted = None, False
            reserved.release()
            self._take_lengths()

    def _resume(self) -> None:
        """Reserves again after `_suspend`, where reserved decoding was asked for and there is something to
        decode.
        """
        if self._reserve_tokens is not None and self._seqs and self._pads.length:
            self._reserved = self._paged().reserve(self._seqs, self._reserve_tokens)
            longest = max(self._pads.num_stored(row) for row in range(len(self._seqs)))
            self._reserved_positions = self._reserve_tokens + self._pads.length - longest
            with torch.inference_mode(False):  # or it could not be advanced from normal mode
                self._reserved_length = torch.tensor(self._pads.length, device=self._paged().device)

    def _attend_reserved(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sm_scale: float,
        window: int,
    ) -> torch.Tensor:
        reserved = self._reserved
        assert reserved is not None
        if layer_idx == 0 and not torch.compiler.is_compiling():
            self._count_step()
        out = reserved.attend(layer_idx, query[:, :, 0], key[:, :, 0], value[:, :, 0], sm_scale, window)
        if layer_idx == self.num_layers - 1:
            reserved.advance()
            self._reserved_length.add_(1)  # type: ignore[union-attr]
            self._step_counted = False  # written and never read while traced: nothing to guard on
        return out.unsqueeze(1)
