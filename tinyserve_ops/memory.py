"""What the KV of a model costs, computed from its shape: nothing is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from tinyserve_ops import scorers
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.layer_pool import kv_bytes_per_token

__all__ = ["MemoryEstimate", "estimate_memory"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes for `batch` sequences of `length` tokens each.

    Attributes:
        kv_bytes: K and V in pages (and the scales of int8 pages), the last page of each sequence rounded up.
        summary_bytes: page summaries.
        page_table_bytes: page tables.
        total_bytes: sum of the three above.
        full_attention_bytes: K and V of a contiguous cache in the model's own dtype, for comparison.
        read_bytes_per_step: K, V and summaries that one decode step reads, over the batch.
        full_read_bytes_per_step: the same for full attention.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    length: int
    batch: int
    kv_dtype: str
    kv_bytes: int
    summary_bytes: int
    page_table_bytes: int
    total_bytes: int
    full_attention_bytes: int
    read_bytes_per_step: int
    full_read_bytes_per_step: int

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.length} tokens: {_readable(self.total_bytes)} "
            f"(KV {_readable(self.kv_bytes)}, "
            f"summaries {_readable(self.summary_bytes)}, page tables {_readable(self.page_table_bytes)}); "
            f"full attention {_readable(self.full_attention_bytes)}. A decode step reads "
            f"{_readable(self.read_bytes_per_step)} instead of {_readable(self.full_read_bytes_per_step)}"
        )


def estimate_memory(
    model_or_config: Any,
    length: int,
    batch: int = 1,
    *,
    config: SparseConfig | None = None,
    dtype: torch.dtype | str | None = None,
) -> MemoryEstimate:
    """Memory of the paged cache of a model, against a full-attention cache.

    Args:
        model_or_config: a model with a `config`, or a config; read by the attribute names of transformers.
        length: stored tokens of each sequence.
        batch: sequences.
        config: page size, scorer, budget and `kv_dtype`; default `SparseConfig()`.
        dtype: element type of the model; default the model's own, else float32.

    Returns:
        The estimate. Sliding-window layers are counted in full: their old pages are kept.

    Raises:
        ValueError, TypeError: naming what is missing or out of range.
    """
    for name, value, low in (("length", length, 0), ("batch", batch, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
        if value < low:
            raise ValueError(f"{name}: expected at least {low}, got {value}")
    sparse = SparseConfig() if config is None else config
    if not isinstance(sparse, SparseConfig):
        raise TypeError(f"config: expected a SparseConfig, got {type(config).__name__}")
    text_config = _text_config(getattr(model_or_config, "config", model_or_config))
    num_layers = _number(text_config, "num_hidden_layers", "n_layer")
    num_heads = _number(text_config, "num_attention_heads", "n_head")
    num_kv_heads = _optional(text_config, "num_key_value_heads") or num_heads
    head_dim = (
        _optional(text_config, "head_dim") or _number(text_config, "hidden_size", "n_embd") // num_heads
    )
    model_dtype = _dtype(dtype, model_or_config, text_config)
    kv_dtype: torch.dtype = model_dtype if sparse.kv_dtype is None else getattr(torch, sparse.kv_dtype)

    num_pages = -(-length // sparse.page_size)
    rows = batch * num_layers * num_kv_heads  # K rows, V rows and summaries come once for each of these
    token_bytes = kv_bytes_per_token(head_dim, kv_dtype)
    summary_row = scorers.summary_bytes(sparse.scorer, head_dim, kv_dtype)
    kv_bytes = rows * num_pages * sparse.page_size * token_bytes
    summary_bytes = rows * num_pages * summary_row
    page_table_bytes = batch * num_pages * torch.int32.itemsize

    dense_rows = batch * min(sparse.dense_layers, num_layers) * num_kv_heads
    pages_read = min(sparse.page_budget(num_pages), num_pages)
    tokens_read = min(pages_read * sparse.page_size, length)
    read_bytes = dense_rows * length * token_bytes
    read_bytes += (rows - dense_rows) * (tokens_read * token_bytes + length // sparse.page_size * summary_row)
    full_bytes = rows * length * 2 * head_dim * model_dtype.itemsize
    return MemoryEstimate(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        length=length,
        batch=batch,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        kv_bytes=kv_bytes,
        summary_bytes=summary_bytes,
        page_table_bytes=page_table_bytes,
        total_bytes=kv_bytes + summary_bytes + page_table_bytes,
        full_attention_bytes=full_bytes,
        read_bytes_per_step=read_bytes,
        full_read_bytes_per_step=full_bytes,
    )


def _text_config(config: Any) -> Any:
    """The part of a (possibly multimodal) config that describes the decoder."""
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config


def _optional(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _number(config: Any, *names: str) -> int:
    for name in names:
        value = _optional(config, name)
        if value is not None:
            return value
    raise ValueError(
        f"model_or_config: expected one of the attributes {names}, got {type(config).__name__} without them"
    )


def _dtype(given: torch.dtype | str | None, model: Any, config: Any) -> torch.dtype:
    if given is not None:
        return _as_dtype("dtype", given)
    for holder, name in ((model, "dtype"), (config, "dtype"), (config, "torch_dtype")):
        value = getattr(holder, name, None)
        if isinstance(value, (torch.dtype, str)):
            return _as_dtype("dtype", value)
    return torch.float32


def _as_dtype(name: str, value: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating-point torch dtype, got {value!r}")
    return dtype


def _readable(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
