"""Leaving out the layers of a model behind the one where its tokens left: the `logits_ready` stage.

While a model is enabled with a plugin of that stage, the forwards of its decoder layers go through here (an
attribute of each layer object, taken away by `disable`). Invariant: what a token that has left stores in a
layer is what that layer computes from the hidden state it left with, whether the layer is computed for others
of the batch or left out; a forward with another cache, or a cache without such a plugin, is not touched.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyserve_ops.forward import ForwardBatch
from tinyserve_ops.hf.link import LinkedCache

__all__ = ["EarlyExitHook", "check_hooked", "check_hooked_model"]

# Model types whose layers are: hidden + attention(norm(hidden)), then hidden + mlp(norm(hidden)).
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_GPT2_LIKE = ("gpt2",)

# Attention modules of the layers that go through a hook.
_hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_hooked(attention: nn.Module) -> None:
    """Raises ValueError unless the model of an attention module asks plugins for early exits."""
    if attention not in _hooked:
        raise ValueError(
            "plugins: expected a model enabled with an early-exit plugin (or policy) for a cache with one, "
            "got one enabled without"
        )


def check_hooked_model(model: PreTrainedModel) -> None:
    """As `check_hooked`, for the whole model."""
    if not any(module in _hooked for module in model.modules()):
        check_hooked(model)


class _LayerForward(functools.partial[Any]):
    """`EarlyExitHook._run` of a layer, known by its type."""


class EarlyExitHook:
    """Stands between a model and its decoder layers until `remove`.

    Raises:
        ValueError: the model's layers are not of a known kind, or it has no language modelling head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kind, head = model.config.model_type, model.get_output_embeddings()
        if kind not in (*_LLAMA_LIKE, *_GPT2_LIKE):
            raise ValueError(
                f"model_type: expected one of {(*_LLAMA_LIKE, *_GPT2_LIKE)} with early exit, got {kind!r}"
            )
        if head is None:
            raise ValueError(
                "model: expected one with a language modelling head with early exit, "
                f"got {type(model).__name__}"
            )
        self._is_llama = kind in _LLAMA_LIKE
        inner: Any = model.base_model
        self._head = head
        self._norm = inner.norm if self._is_llama else inner.ln_f
        self._layers: list[Any] = list(inner.layers if self._is_llama else inner.h)
        self._returns_tuple = (
            False  # of the layers; known before one is left out, since the first is computed
        )
        for layer in self._layers:  # a copy of a model that is hooked brings the hook along
            if isinstance(layer.__dict__.get("forward"), _LayerForward):
                del layer.forward
        self._previous = [layer.__dict__.get("forward") for layer in self._layers]
        for layer_idx, layer in enumerate(self._layers):
            layer.forward = _LayerForward(self._run, layer_idx, layer.forward)
            _hooked.add(self._attention(layer))

    def remove(self) -> None:
        """Gives the layers their own forwards back."""
        for layer, previous in zip(self._layers, self._previous, strict=True):
            del layer.forward
            if previous is not None:
                layer.forward = previous
            _hooked.discard(self._attention(layer))

    def _attention(self, layer: Any) -> Any:
        return layer.self_attn if self._is_llama else layer.attn

    def _run(
        self, layer_idx: int, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """One layer: computed, computed for some of its tokens, or left out."""
        cache: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, LinkedCache)), None)
        # Before layer 0 a cache may still hold a forward that failed.
        batch: ForwardBatch | None = cache.open_batch if cache is not None and layer_idx else None
        index = cache.packed_index if batch is not None else None  # the last layer ends the forward
        if batch is not None and batch.all_left:
            cache.store(layer_idx, *self._keys_and_values(layer_idx, hidden, kwargs))
            return (hidden,) if self._returns_tuple else hidden
        result = forward(hidden, *args, **kwargs)
        self._returns_tuple = isinstance(result, tuple)
        if cache is None:
            return result
        if layer_idx == 0:
            batch, index = cache.open_batch, cache.packed_index
        if batch is None or not batch.logit_layers:
            return result
        out: Tensor = result[0] if isinstance(result, tuple) else result
        left = batch.tokens_left()
        if left is not None:
            out = torch.where(_unpacked(left, index, out)[..., None], hidden, out)
        if layer_idx in batch.logit_layers:
            self._ask(batch, layer_idx, out, index)
        return (out, *result[1:]) if isinstance(result, tuple) else out

    def _ask(self, batch: ForwardBatch, layer_idx: int, hidden: Tensor, index: Tensor | None) -> None:
        tokens = batch.tokens_to_ask()
        if not tokens.numel():
            return
        flat = hidden.flatten(0, 1)[tokens if index is None else index[tokens]]
        batch.logits_ready(layer_idx, tokens, self._head(self._norm(flat)))

    def _keys_and_values(
        self, layer_idx: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """What a layer stores of `hidden` [batch, num_new, hidden_size]: keys (rotated) and values [batch,
        num_kv_heads, num_new, head_dim].
        """
        layer = self._layers[layer_idx]
        attention = self._attention(layer)
        shape = (*hidden.shape[:-1], -1, attention.head_dim)
        if not self._is_llama:
            _, k, v = attention.c_attn(layer.ln_1(hidden)).split(attention.split_size, dim=2)
            return k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        normed = layer.input_layernorm(hidden)
        k, v = attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)
        if hasattr(attention, "k_norm"):  # Qwen3
            k = attention.k_norm(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb  # the model's own
        no_queries = k[:, :0]
        return rotate(no_queries, k, *kwargs["position_embeddings"])[1], v


def _unpacked(mask: Tensor, index: Tensor | None, hidden: Tensor) -> Tensor:
    """A mask of packed tokens as [batch, num_new] of `hidden`; False at padding."""
    if index is not None:
        mask = mask.new_zeros(hidden.size(0) * hidden.size(1)).index_copy_(0, index, mask)
    return mask.view(hidden.shape[:2])
