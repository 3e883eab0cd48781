"""Runs one prompt through full and through sparse attention and accounts for both in the same terms.

Full attention is the unpatched model: transformers' `sdpa` with its default `DynamicCache`. Its KV bytes are
computed from the cache's shape; those of the sparse side are what the library counted from the pages it
iterated.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinyserve.decode import Decoded, decode_greedily
from tinyserve.errors import SetupError
from tinyserve.process_memory import peak_bytes, reset_peak

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tinyserve_ops import SparseConfig


@dataclass(frozen=True)
class ModeResult:
    """One side of the comparison. Per-step figures are means over the decode steps; bytes are of all layers
    together."""

    title: str
    attention: str
    cache: str
    decoded: Decoded
    kv_bytes_per_step: float
    summary_bytes_per_step: float
    kv_bytes_held: int
    peak_memory_bytes: int
    peak_is_of_this_phase: bool
    sparse_engaged: bool
    # Per decode step: layer index -> selected pages [batch, num_kv_heads, max_page_budget], -1 padded.
    selection_history: list[dict[int, Any]] = field(repr=False)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.decoded.step_seconds)

    @property
    def minimum_ms(self) -> float:
        return 1e3 * min(self.decoded.step_seconds)


def run_full(model: PreTrainedModel, token_ids: list[int], num_new_tokens: int) -> ModeResult:
    """The unpatched model with its own attention and transformers' default cache."""
    from transformers import DynamicCache

    own_peak = reset_peak()
    cache = DynamicCache(config=model.config)
    decoded = decode_greedily(model, cache, token_ids, num_new_tokens, "full attention")
    layers = [layer for layer in cache.layers if layer.keys is not None]
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    # The step that reads n tokens reads them in every layer; n grows by one a step up to the final length.
    steps, final_len = len(decoded.step_seconds), cache.get_seq_length()
    mean_len = final_len - (steps - 1) / 2
    per_token = sum(_bytes_per_token(tensor) for layer in layers for tensor in (layer.keys, layer.values))
    return ModeResult(
        title="full attention",
        attention="sdpa, every token",
        cache="DynamicCache",
        decoded=decoded,
        kv_bytes_per_step=per_token * mean_len,
        summary_bytes_per_step=0.0,
        kv_bytes_held=held,
        peak_memory_bytes=peak_bytes(),
        peak_is_of_this_phase=own_peak,
        sparse_engaged=False,
        selection_history=[],
    )


def run_sparse(
    model: PreTrainedModel, token_ids: list[int], num_new_tokens: int, config: SparseConfig
) -> ModeResult:
    """The same model with the library switched on; it is off again when this returns.

    Raises:
        SetupError: the library did not take part in the decode steps, so there is nothing to compare.
    """
    import tinyserve_ops

    own_peak = reset_peak()
    before: list[Any] = []
    with tinyserve_ops.enable(model, config) as handle:
        cache = handle.new_cache()
        decoded = decode_greedily(
            model, cache, token_ids, num_new_tokens, "sparse attention", lambda: before.append(cache.stats())
        )
        after, history = cache.stats(), cache.kv.selection_history()
    start = before[0]
    if after.sparse_steps + after.dense_steps == start.sparse_steps + start.dense_steps:
        raise SetupError(
            "the paged attention counted no decode step: the model does not use it, nothing was compared"
        )
    steps = len(decoded.step_seconds)
    return ModeResult(
        title="sparse attention",
        attention=f"{config.scorer} scorer, {budget_text(config)}",
        cache=f"pages of {config.page_size} tokens",
        decoded=decoded,
        kv_bytes_per_step=(after.kv_bytes_read - start.kv_bytes_read) / steps,
        summary_bytes_per_step=(after.summary_bytes_read - start.summary_bytes_read) / steps,
        kv_bytes_held=after.kv_bytes_held,
        peak_memory_bytes=peak_bytes(),
        peak_is_of_this_phase=own_peak,
        sparse_engaged=after.selection_engaged,
        selection_history=[step.selected_pages for step in history],
    )


def budget_text(config: SparseConfig) -> str:
    if config.keep_ratio is not None:
        return f"{config.keep_ratio:.0%} of the pages"
    return f"budget {config.token_budget} tokens"


def _bytes_per_token(tensor: Any) -> float:
    """Bytes one token takes in a cached tensor [batch, heads, length, head_dim]."""
    return float(tensor.nbytes) / tensor.size(-2)
