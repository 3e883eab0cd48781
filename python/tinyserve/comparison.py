"""Runs one prompt through full and through sparse attention and accounts for both in the same terms.

Full attention is the unpatched model: transformers' `sdpa` with its default `DynamicCache`. Its KV bytes are
computed from the cache's shape; those of the sparse side are what the library counted from the pages it
iterated. After the two prefills the sides take turns, token by token, so that a busy machine slows both
alike.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tinyserve.decode import Decoder, share_weights
from tinyserve.errors import SetupError, UsageError
from tinyserve.progress import bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tinyserve_ops import SparseConfig


@dataclass(frozen=True)
class ModeResult:
    """One side. Per-step figures are means over the decode steps; bytes are of all layers together."""

    title: str
    attention: str
    cache: str
    token_ids: list[int]
    prefill_seconds: float
    step_seconds: list[float]
    kv_bytes_per_step: float
    summary_bytes_per_step: float
    kv_bytes_held: int
    sparse_engaged: bool
    # Per decode step: layer index -> selected pages [batch, num_kv_heads, max_page_budget], -1 padded.
    selection_history: list[dict[int, Any]] = field(repr=False)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.step_seconds)

    @property
    def minimum_ms(self) -> float:
        return 1e3 * min(self.step_seconds)


@torch.inference_mode()
def compare(
    model: PreTrainedModel, prompt_ids: list[int], num_new_tokens: int, config: SparseConfig
) -> tuple[ModeResult, ModeResult]:
    """Decodes exactly `num_new_tokens` greedy tokens with full and with sparse attention, in that order.

    It goes on past an end-of-text token, to time the same number of steps; the caller cuts the text.

    Args:
        config: of the sparse side, with `record_selection=True`.

    Raises:
        UsageError: the library does not support this model.
        SetupError: the library did not take part in the decode steps, so there is nothing to compare.
    """
    from transformers import DynamicCache

    from tinyserve_ops.hf import enable

    twin = share_weights(model)
    try:
        handle = enable(twin, config)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    with handle:
        full = Decoder(model, DynamicCache(config=model.config))
        sparse = Decoder(twin, handle.new_cache())
        full.prefill(prompt_ids, "full attention: prefill")
        sparse.prefill(prompt_ids, "sparse attention: prefill")
        sparse.cache.kv.reset_stats()
        steps = range(num_new_tokens - 1)  # the first token came out of the prefill
        for step_idx in bar("both in turn: decode", total=len(steps), unit=" tokens", items=steps):
            for side in (full, sparse) if step_idx % 2 == 0 else (sparse, full):
                side.step()
        return _full_result(full), _sparse_result(sparse, config)


def budget_text(config: SparseConfig) -> str:
    """The budget of a config in words."""
    if config.keep_ratio is not None:
        return f"{config.keep_ratio:.0%} of the pages"
    return f"budget {config.token_budget} tokens"


def _full_result(side: Decoder) -> ModeResult:
    # [batch, kv heads, length, head_dim] each. A step reads all of it, and the length grew by one a step up
    # to what it is now; only a sliding-window layer has stopped growing.
    tensors = [tensor for layer in side.cache.layers for tensor in (layer.keys, layer.values)]
    final_len = side.cache.get_seq_length()
    mean_len = final_len - (len(side.step_seconds) - 1) / 2
    read = (tensor.nbytes / tensor.size(-2) * min(mean_len, tensor.size(-2)) for tensor in tensors)
    return ModeResult(
        title="full attention",
        attention="sdpa, every token",
        cache="DynamicCache",
        token_ids=side.token_ids,
        prefill_seconds=side.prefill_seconds,
        step_seconds=side.step_seconds,
        kv_bytes_per_step=sum(read),
        summary_bytes_per_step=0.0,
        kv_bytes_held=sum(tensor.nbytes for tensor in tensors),
        sparse_engaged=False,
        selection_history=[],
    )


def _sparse_result(side: Decoder, config: SparseConfig) -> ModeResult:
    stats, steps = side.cache.stats(), len(side.step_seconds)
    expected = steps * side.model.config.num_hidden_layers
    if stats.sparse_steps + stats.dense_steps != expected:
        counted = stats.sparse_steps + stats.dense_steps
        raise SetupError(f"the paged attention counted {counted} decode steps of layers, expected {expected}")
    return ModeResult(
        title="sparse attention",
        attention=f"{config.scorer} scorer, {budget_text(config)}",
        cache=f"pages of {config.page_size} tokens",
        token_ids=side.token_ids,
        prefill_seconds=side.prefill_seconds,
        step_seconds=side.step_seconds,
        kv_bytes_per_step=stats.kv_bytes_read / steps,
        summary_bytes_per_step=stats.summary_bytes_read / steps,
        kv_bytes_held=stats.kv_bytes_held,
        sparse_engaged=stats.selection_engaged,
        selection_history=[step.selected_pages for step in side.cache.kv.selection_history()],
    )
