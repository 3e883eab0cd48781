"""Greedy decoding that is timed token by token: prefill in chunks, then one token per call.

A `Decoder` knows nothing about the cache it is handed, so the sides of a comparison differ in attention and
cache only. `share_weights` gives each side a model object of its own over one set of weights.
"""

from __future__ import annotations

import copy
import inspect
import time
from typing import TYPE_CHECKING, Any

import torch

from tinyserve.progress import bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_CHUNK = 256  # tokens; as fast as one piece on a CPU, and the bar moves


class Decoder:
    """One model with one cache, decoding greedily; the caller holds `torch.inference_mode()`.

    As in `generate`, the first new token comes out of the prefill, the others out of single-token steps.

    Attributes:
        next_id: the newest token, which the next step feeds in.
        token_ids: the new tokens so far.
        prefill_seconds: 0 before the prefill.
        step_seconds: `step_seconds[i]` is the forward that chose `token_ids[i + 1]`.
    """

    def __init__(self, model: PreTrainedModel, cache: Any) -> None:
        self.model = model
        self.cache = cache
        self.next_id: int | None = None
        self.token_ids: list[int] = []
        self.prefill_seconds = 0.0
        self.step_seconds: list[float] = []
        names = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument.
        self._kwargs: dict[str, Any] = {
            "cache" if "cache" in names else "past_key_values": cache,
            "use_cache": True,
        }
        if "logits_to_keep" in names:
            self._kwargs["logits_to_keep"] = 1

    def prefill(self, prompt_ids: list[int], label: str) -> None:
        """Stores the prompt (at least one token) chunk by chunk and chooses the first new token."""
        started = time.perf_counter()
        logits = None
        with bar(label, total=len(prompt_ids), unit=" tokens") as progress:
            for chunk in torch.tensor([prompt_ids]).split(PREFILL_CHUNK, dim=1):
                logits = self.model(chunk, **self._kwargs).logits
                progress.update(chunk.size(1))
        assert logits is not None
        self._choose(logits)
        self.prefill_seconds = time.perf_counter() - started

    def step(self) -> None:
        """One forward of `next_id`, and the choice of the token after it."""
        ids = torch.tensor([[self.next_id]])
        started = time.perf_counter()
        self._choose(self.model(ids, **self._kwargs).logits)
        self.step_seconds.append(time.perf_counter() - started)

    def _choose(self, logits: torch.Tensor) -> None:
        self.next_id = int(logits[0, -1].argmax())
        self.token_ids.append(self.next_id)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second model object over the same parameters, with a config and an attention of its own."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo)
