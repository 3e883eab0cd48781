"""The decoding loop both kinds of attention share: prefill in chunks, then one greedy token per forward, each
timed.

The loop knows nothing about the cache it is handed, so the two sides of the demo differ in their attention
and cache only.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tinyserve.progress import bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_CHUNK = 256  # tokens; as fast as one piece on a CPU, and the bar moves


@dataclass(frozen=True)
class Decoded:
    """What came out and how long it took: `step_seconds[i]` is the forward that produced `token_ids[i +
    1]`."""

    token_ids: list[int]
    prefill_seconds: float
    step_seconds: list[float]


def forward_kwargs(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """Keywords every forward here needs: the cache under the name this transformers release uses, last logits
    only."""
    names = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in names:
        kwargs["logits_to_keep"] = 1
    return kwargs


def prefill(model: PreTrainedModel, cache: Any, token_ids: list[int], label: str) -> int:
    """Stores the prompt in `cache`, chunk by chunk; returns the greedy next token."""
    kwargs = forward_kwargs(model, cache)
    ids = torch.tensor([token_ids])
    logits = None
    with bar(f"{label}: prefill", total=len(token_ids), unit=" tokens") as progress:
        for chunk in ids.split(PREFILL_CHUNK, dim=1):
            logits = model(chunk, **kwargs).logits
            progress.update(chunk.size(1))
    assert logits is not None
    return int(logits[0, -1].argmax())


@torch.inference_mode()
def decode_greedily(
    model: PreTrainedModel,
    cache: Any,
    token_ids: list[int],
    num_new_tokens: int,
    label: str,
    after_prefill: Callable[[], None] | None = None,
) -> Decoded:
    """Continues `token_ids` (at least one token) by exactly `num_new_tokens` greedy tokens, past any
    end-of-text token.

    Going on past the end keeps the timing of both sides over the same number of steps; the caller cuts the
    text.
    """
    started = time.perf_counter()
    new_ids = [prefill(model, cache, token_ids, label)]
    prefill_seconds = time.perf_counter() - started
    if after_prefill is not None:
        after_prefill()
    kwargs = forward_kwargs(model, cache)
    step_seconds = []
    for _ in bar(
        f"{label}: decode", total=num_new_tokens - 1, unit=" tokens", items=range(num_new_tokens - 1)
    ):
        ids = torch.tensor([[new_ids[-1]]])
        started = time.perf_counter()
        logits = model(ids, **kwargs).logits
        new_ids.append(int(logits[0, -1].argmax()))
        step_seconds.append(time.perf_counter() - started)
    return Decoded(new_ids, prefill_seconds, step_seconds)
