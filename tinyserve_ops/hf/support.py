"""What a model must look like for the drop-in to compute what the model means.

Every option of a model that changes attention is either honoured elsewhere or refused here by its own name,
before anything is patched. Refusing late (inside a forward) is left for what only a forward can show: masks,
head masks, dropout.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

__all__ = [
    "attention_scale",
    "cache_argument",
    "check_model",
    "check_positions",
    "fingerprint",
    "max_positions",
    "takes_argument",
    "unwrap_model",
]

# Layer types of a transformers config that mean plain softmax attention over earlier tokens, windowed or not.
_SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")


def unwrap_model(model: Any) -> PreTrainedModel:
    """The transformers model inside PEFT, torch.compile or DistributedDataParallel wrappers.

    Raises:
        TypeError: there is no transformers model inside.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(inner, torch.nn.Module) and isinstance(
            getattr(inner, "module", None), torch.nn.Module
        ):
            inner = inner.module  # DistributedDataParallel
        else:
            raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    return inner


# Argument names of forwards: a signature takes far longer to read than a decode step may take.
_arguments: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


def takes_argument(model: Any, name: str) -> bool:
    """Whether a model's forward has this argument."""
    forward = getattr(model.forward, "__func__", model.forward)
    names = _arguments.get(forward)
    if names is None:
        names = _arguments[forward] = frozenset(inspect.signature(forward).parameters)
    return name in names


def cache_argument(model: Any) -> str:
    """Name of the cache argument of a model's forward: "cache" from transformers 5.24 on, "past_key_values"
    before.
    """
    return "cache" if takes_argument(model, "cache") else "past_key_values"


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError naming the first option of `model` that sparse paged attention would not honour."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError("is_encoder_decoder: expected a decoder-only model, got an encoder-decoder")
    if config is not model.config:
        raise ValueError(
            f"{type(model).__name__}: expected a text-only decoder, got a model with a nested text config; "
            "enable its language model instead"
        )
    _check_devices(model)
    _check_attention_options(model, config)
    _check_heads(config)
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__}: expected a model that goes through transformers' AttentionInterface, "
            "got one with its own attention code"
        )


def _check_devices(model: PreTrainedModel) -> None:
    device_map = getattr(model, "hf_device_map", None)
    if device_map and len(set(map(str, device_map.values()))) > 1:
        raise ValueError(
            "hf_device_map: expected all layers on one device, "
            f"got {sorted(set(map(str, device_map.values())))}"
        )


def _check_attention_options(model: PreTrainedModel, config: Any) -> None:
    def value(name: str) -> Any:
        return getattr(config, name, None)

    for name in ("attn_logit_softcapping", "attn_logit_softcap"):
        if value(name):
            raise ValueError(
                f"{name}: expected None (attention logits are not soft-capped here), got {value(name)}"
            )
    for module_name, module in model.named_modules():
        for name in ("sinks", "attention_sinks", "attn_sinks"):
            if isinstance(getattr(module, name, None), torch.Tensor):
                raise ValueError(
                    f"{name}: expected attention without attention-sink parameters, "
                    f"got them in {module_name!r}"
                )
    if value("add_cross_attention"):
        raise ValueError("add_cross_attention: expected False, got True (cross attention has no paged cache)")
    if value("kv_lora_rank"):
        raise ValueError(
            "kv_lora_rank: expected plain keys and values, "
            f"got latent attention of rank {value('kv_lora_rank')}"
        )
    if value("num_kv_shared_layers"):
        raise ValueError(f"num_kv_shared_layers: expected 0, got {value('num_kv_shared_layers')}")
    if value("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: expected False, got True (attention here is causal)")
    if getattr(config, "is_causal", True) is False:
        raise ValueError("is_causal: expected True, got False (attention here is causal)")
    if value("alibi"):
        raise ValueError("alibi: expected False, got True (no position bias is added to attention logits)")
    if value("keep_window_size"):
        raise ValueError(
            "keep_window_size: expected no mask that depends on the values, "
            f"got one that keeps {value('keep_window_size')}"
        )
    unknown = sorted({t for t in (value("layer_types") or ()) if t not in _SUPPORTED_LAYER_TYPES})
    if unknown:
        raise ValueError(f"layer_types: expected only {_SUPPORTED_LAYER_TYPES}, got {unknown}")


def _check_heads(config: Any) -> None:
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if isinstance(head_dim, int) and (head_dim % 8 or not 8 <= head_dim <= 256):
        raise ValueError(f"head_dim: expected a multiple of 8 from 8 to 256, got {head_dim}")
    if isinstance(num_kv_heads, int) and num_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of num_attention_heads {num_heads}, got {num_kv_heads}"
        )


def attention_scale(module: torch.nn.Module, scaling: float | None, head_dim: int) -> float:
    """The factor of q.k. transformers passes it, except for GPT-2 before 5.6, whose flags live on the
    attention module.
    """
    if scaling is not None:
        return scaling
    scale = head_dim**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= float(module.layer_idx + 1)  # type: ignore[operator]
    return scale


def max_positions(config: Any) -> int | None:
    """`max_position_embeddings` of the config (`n_positions` of GPT-2), or None where a model has no
    limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def has_rotary_positions(config: Any) -> bool:
    """Rotary models may decode past their trained positions, as they do unpatched; a table of positions
    simply ends.
    """
    return (
        getattr(config, "rope_theta", None) is not None
        or getattr(config, "rope_parameters", None) is not None
    )


def check_positions(config: Any, num_tokens: int, num_new: int) -> None:
    """Raises ValueError when `num_tokens` real tokens, the last `num_new` of them in this forward, pass the
    model's positions (and this is not a step of a rotary model).
    """
    limit = max_positions(config)
    if limit is not None and num_tokens > limit and not (num_new == 1 and has_rotary_positions(config)):
        raise ValueError(
            f"max_position_embeddings: expected a prompt of at most {limit} tokens, the model's positions, "
            f"got {num_tokens}"
        )


def fingerprint(config: Any) -> str:
    """Names a model by its kind and sizes, the same in every transformers version. Weights are not looked at:
    two models of one architecture have the same.
    """
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(config, name, None) for name in (*names, "intermediate_size", "vocab_size")}
    return " ".join([str(config.model_type), *(f"{k}={v}" for k, v in sizes.items() if isinstance(v, int))])
