"""The attention and mask functions registered with transformers under the name "tinyserve".

A call whose keys come from a cache of ours goes to that cache; every other one (training, no cache,
DynamicCache, StaticCache) does exactly what transformers' "sdpa" does. The mask function never makes a
[queries, keys] mask for our caches: it hands the two-dimensional key mask through, and positions do the rest.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tinyserve_ops.hf.cache import ATTENTION_NAME, MASK_SENTINEL, MASK_SENTINEL_RESERVED
from tinyserve_ops.hf.packed import PackedBatch
from tinyserve_ops.hf.support import attention_scale

__all__ = ["attention_forward", "attention_mask", "register"]

logger = logging.getLogger("tinyserve_ops")

# Arguments that change what attention computes and that no path of ours computes. None and 0 mean "not used".
_REFUSED = ("softcap", "s_aux", "head_mask", "position_bias")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers' `AttentionInterface` calls it.

    Args:
        query: [batch, num_heads, num_new, head_dim].
        key, value: [batch, num_kv_heads, num_new, head_dim] from our caches, all keys otherwise.

    Returns:
        (out [batch, num_new, num_heads, head_dim], None).

    Raises:
        ValueError: an option that is neither honoured nor neutral, by name.
    """
    link = kwargs.pop("tinyserve_link", None) or getattr(key, "_tinyserve_link", None)
    scale = attention_scale(module, scaling, query.size(3))
    if link is None:
        _warn_when_dense(query, key)
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scale,
            sliding_window=sliding_window,
            dropout=dropout,
            **kwargs,
        )
    _check_options(module, query, dropout, kwargs)
    cache, layer_idx = link
    attention_mask, window = _split_window(attention_mask, sliding_window)
    if isinstance(cache, PackedBatch):
        return cache.attend(layer_idx, query, key, value, attention_mask, scale, window), None
    return cache.attend(layer_idx, module, query, key, value, attention_mask, scale, window), None


def _split_window(mask: torch.Tensor | None, told: int | None) -> tuple[torch.Tensor | None, int]:
    """(key mask or 4D mask, window or -1) of a mask that may carry a window, as `attention_mask` returns it.

    Under sdpa the mask alone decides, and some models tell the window to nobody else. A 4D mask has no place
    for it, so it may not leave open what the attention call was told to hide.
    """
    if mask is not None and mask.dim() == 3:
        return _without_window(mask), mask.size(1)
    window = -1 if told is None else told
    if mask is not None and mask.dim() == 4 and 0 < window < mask.size(3):
        raise ValueError(
            f"attention_mask: expected a two-dimensional one for {mask.size(3)} tokens and a sliding window "
            f"of {window}, got a 4D mask"
        )
    return mask, window


def _with_window(
    mask: torch.Tensor | None, window: int | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The key mask [batch, length; 0 for None], repeated `window` times without a copy: [batch, window,
    length]. A shape is all that gets through `generate`, the model and a traced graph without fail.
    """
    if window is None:
        return mask
    if mask is None:
        device = kwargs["cache_position"].device if "cache_position" in kwargs else kwargs.get("device")
        mask = torch.empty(kwargs["batch_size"], 0, dtype=torch.bool, device=device)
    return mask.unsqueeze(1).expand(-1, window, -1)


def _without_window(mask: torch.Tensor) -> torch.Tensor | None:
    return mask[:, 0] if mask.size(2) else None


def _check_options(
    module: torch.nn.Module, query: torch.Tensor, dropout: float, kwargs: dict[str, Any]
) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None and not (name == "softcap" and kwargs[name] == 0):
            raise ValueError(
                f"{name}: expected None, got a value; attention over a TinyServeCache doesn't support it"
            )
    if dropout:
        raise ValueError(f"attention dropout: expected 0 (call model.eval()), got {dropout}")
    if getattr(module, "is_causal", True) is False:
        raise ValueError("is_causal: expected a causal attention module, got one with is_causal=False")
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "query: expected no gradient, got requires_grad=True; a TinyServeCache has no backward. "
            "Use torch.no_grad(), or train without a cache (use_cache=False)"
        )


_warned_dense = False


def reset_dense_warning() -> None:
    """Lets the warning about foreign caches be given once more (each `enable` does)."""
    global _warned_dense
    _warned_dense = False


def _warn_when_dense(query: torch.Tensor, key: torch.Tensor) -> None:
    """One warning when single tokens are decoded through another cache, where nothing is sparse."""
    global _warned_dense
    if torch.compiler.is_compiling() or _warned_dense or query.size(2) != 1 or key.size(2) == 1:
        return
    _warned_dense = True
    logger.warning(
        "attention is dense: the model decodes with a cache that is not a TinyServeCache "
        "(give none to generate(), or Handle.new_cache())"
    )


def attention_mask(**kwargs: Any) -> torch.Tensor | None:
    """The key mask bool [batch, length] or None for our caches, with a window as in `_with_window`;
    transformers' sdpa mask for everything else.
    """
    kv_offset = kwargs.get("kv_offset")
    if kv_offset not in (MASK_SENTINEL, MASK_SENTINEL_RESERVED):
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**kwargs)
    if kv_offset == MASK_SENTINEL and kwargs.get("allow_is_causal_skip", True) is False:
        # transformers forbids the skip exactly when something is laid over the causal mask.
        raise ValueError(
            "mask_function: expected a causal mask (with a sliding window or not), got one with an overlay "
            "(bidirectional blocks or packed documents), which a TinyServeCache doesn't support"
        )
    mask, window = kwargs.get("attention_mask"), kwargs.get("local_size")
    if mask is not None and mask.dim() == 3:  # ours: `generate` makes the mask of a compiled step beforehand
        mask = _without_window(mask)
    if kv_offset == MASK_SENTINEL_RESERVED and _num_queries(kwargs) == 1:
        # A reserved step takes its token as real and knows the padding; a mask that grows would only cause
        # recompilation.
        if mask is not None and not torch.compiler.is_compiling() and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask: expected a real token in every row of a reserved step, got padding"
            )
        mask = None
    return _with_window(mask, window, kwargs)


def _num_queries(kwargs: dict[str, Any]) -> int:
    num_queries = kwargs.get("q_length")  # 5.6 and newer
    return kwargs["cache_position"].shape[0] if num_queries is None else int(num_queries)


def register() -> None:
    """Registers both functions. The names stay registered: without our cache they are the same as "sdpa"."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
