"""Switching a transformers model to sparse paged attention and back.

A model is enabled by its attention name plus an entry in `_handles`; nothing of the model or of transformers'
files is patched, except one class-wide method that lets `generate` make our cache. That hook is installed by
the first handle, asks `_handles` before doing anything, and leaves with the last handle (also when an enabled
model is simply deleted).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from tinyserve_ops import plugins as plugins_module
from tinyserve_ops import policies
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.hf.attention import register, reset_dense_warning
from tinyserve_ops.hf.cache import ATTENTION_NAME, TinyServeCache
from tinyserve_ops.hf.early_exit import EarlyExitHook
from tinyserve_ops.hf.packed import PackedBatch
from tinyserve_ops.hf.support import cache_argument, check_model, check_positions, max_positions, unwrap_model
from tinyserve_ops.plugins import Plugin, PluginLike, PluginStack
from tinyserve_ops.policies import Policy, PolicyPlan
from tinyserve_ops.stats import CacheStats

__all__ = ["Handle", "disable", "enable"]

# `cache_implementation` values that mean "the default cache": old hub configs of sliding-window models carry
# some of them.
_DEFAULT_CACHES = (None, "dynamic", "dynamic_full", "hybrid", "sliding_window")

_lock = threading.RLock()
_handles: weakref.WeakKeyDictionary[PreTrainedModel, Handle] = weakref.WeakKeyDictionary()
_original_prepare: Any = None


class Handle:
    """What `enable` returns: makes caches, reads their counters, and undoes the switch. A context manager.

    Attributes:
        config, policy, plugins: the `SparseConfig`, the policy and the plugins of caches made through this
            handle.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SparseConfig,
        policy: Policy | None,
        plugins: tuple[Plugin, ...],
        early_exit: EarlyExitHook | None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.plugins = plugins
        self._early_exit = early_exit
        self._model = weakref.ref(model)  # a strong one would keep every enabled model alive
        self._previous = model.config._attn_implementation
        self._num_caches = 0
        self._last_cache: weakref.ref[TinyServeCache] | None = None
        self._last_stats: CacheStats | None = None
        self._last_reports: dict[str, dict[str, Any]] = {}
        self._hook: RemovableHandle | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The enabled transformers model (without PEFT or compile wrappers). RuntimeError once it is
        deleted.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("Handle.model: expected a living model, got one that was deleted")
        return model

    @property
    def enabled(self) -> bool:
        """Whether the model still uses this handle."""
        model = self._model()
        return model is not None and _handles.get(model) is self

    def new_cache(self, *, max_tokens: int | None = None) -> TinyServeCache:
        """A cache for `generate` or plain forwards of the model.

        Args:
            max_tokens: capacity summed over rows; default rows x the model's positions.
        """
        cache = TinyServeCache(
            self.model.config, self.config, max_tokens=max_tokens, policy=self.policy, plugins=self.plugins
        )
        self._num_caches += 1
        cache._on_delete = functools.partial(self._keep_stats, self._num_caches)
        self._last_cache, self._last_stats = weakref.ref(cache), None
        return cache

    def _keep_stats(self, number: int, stats: CacheStats, reports: dict[str, dict[str, Any]]) -> None:
        """A cache is going: its counters stay, its pages don't. An older cache that goes later says
        nothing.
        """
        if number == self._num_caches:
            self._last_stats, self._last_reports = stats, reports

    def stats(self) -> CacheStats:
        """Counters of the cache made last, by `generate` or by `new_cache`, also after that cache is gone.

        Raises:
            RuntimeError: no cache of this handle has seen a forward yet.
        """
        cache = self._last_cache() if self._last_cache is not None else None
        if cache is not None:
            return cache.stats()
        if self._last_stats is None:
            raise RuntimeError(
                "Handle.stats: expected a cache that has seen a forward, got none; generate something first"
            )
        return self._last_stats

    def plugin_reports(self) -> dict[str, dict[str, Any]]:
        """What each plugin did in the cache made last, by its name, also after that cache is gone.

        Raises:
            RuntimeError: no cache of this handle has seen a forward yet.
        """
        self.stats()
        cache = self._last_cache() if self._last_cache is not None else None
        return self._last_reports if cache is None else cache.plugin_reports()

    def disable(self) -> None:
        """Gives the model back its previous attention. A second call does nothing."""
        model = self._model()
        if model is not None and _handles.get(model) is self:
            _disable(model, self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disable()


def enable(
    model: Any,
    config: SparseConfig | None = None,
    *,
    policy: Policy | str | None = None,
    plugins: Sequence[PluginLike] | None = None,
    **keywords: Any,
) -> Handle:
    """Switches a transformers model to sparse attention over a paged KV cache. `model.generate(...)` then
    works as before.

    Args:
        model: a decoder-only transformers model; wrappers of PEFT and torch.compile are looked through.
        config: a `SparseConfig`; or give its fields as keywords (`token_budget=2048, page_size=16, ...`).
        policy: which keys and values are left out, a `tinyserve_ops.policies.Policy` or its name; None is the
            query-aware selection of the config.
        plugins: changes at the stages of the pipeline, in their order: `tinyserve_ops.plugins.Plugin`s, their
            names or dicts.

    Returns:
        A `Handle`; call `disable()` on it or use it as a context manager.

    Raises:
        ValueError: the model is enabled already, or has an option that attention here would not honour, by
            name.
        TypeError: both `config` and keywords, not a policy, or not a transformers model.

    Mutates the model's `config._attn_implementation`; nothing is written by `save_pretrained`.
    """
    if config is not None and keywords:
        raise TypeError(
            f"config: expected a SparseConfig or keywords, got both (keywords {sorted(keywords)})"
        )
    if config is not None and not isinstance(config, SparseConfig):
        raise TypeError(f"config: expected a SparseConfig, got {type(config).__name__}")
    sparse = config if config is not None else SparseConfig(**keywords)
    policy = policies.resolve(policy)
    given = plugins_module.resolve(plugins)
    inner = unwrap_model(model)
    num_layers = int(inner.config.get_text_config(decoder=True).num_hidden_layers)
    stack, _ = PluginStack.make(given, PolicyPlan.make(policy, sparse, num_layers), sparse, num_layers)
    with _lock:
        if inner in _handles:
            raise ValueError(
                f"model: expected one that is not enabled, got a {type(inner).__name__} enabled with "
                f"{_handles[inner].config}; call its handle's disable() first"
            )
        check_model(inner)
        register()
        early_exit = EarlyExitHook(inner) if stack is not None and stack.logit_layers else None
        handle = Handle(inner, sparse, policy, given, early_exit)
        inner.set_attn_implementation(ATTENTION_NAME)
        handle._hook = inner.register_forward_pre_hook(_check_forward, with_kwargs=True)
        handle._finalizer = weakref.finalize(inner, _remove_hook_when_unused)
        handle._finalizer.atexit = False
        _handles[inner] = handle
        _install_hook()
    reset_dense_warning()
    return handle


def disable(model: Any) -> None:
    """Undoes `enable`.

    Raises:
        ValueError: the model is not enabled.
    """
    inner = unwrap_model(model)
    handle = _handles.get(inner)
    if handle is None:
        raise ValueError(f"model: expected an enabled one, got a {type(inner).__name__} that is not enabled")
    handle.disable()


def _disable(model: PreTrainedModel, handle: Handle) -> None:
    with _lock:
        del _handles[model]
        if handle._hook is not None:
            handle._hook.remove()
        if handle._early_exit is not None:
            handle._early_exit.remove()
        if handle._finalizer is not None:
            handle._finalizer.detach()
        # A model that was enabled, copied, and enabled again has our own name as its previous one.
        previous = handle._previous if handle._previous != ATTENTION_NAME else "sdpa"
        model.set_attn_implementation(previous)
        _remove_hook_when_unused()


# The hook in generate() -------------------------------------------------------------------------------------


def _install_hook() -> None:
    global _original_prepare
    if _original_prepare is None:
        _original_prepare = GenerationMixin._prepare_cache_for_generation
        GenerationMixin._prepare_cache_for_generation = functools.wraps(_original_prepare)(_prepare_cache)


def _remove_hook_when_unused() -> None:
    """Puts transformers' own method back once no model is enabled; a hook that someone wrapped since stays,
    and is inert.
    """
    global _original_prepare
    with _lock:
        current = GenerationMixin._prepare_cache_for_generation
        anyone = any(ref() is not None for ref in _handles.keyrefs())  # a dying model may still be listed
        if not anyone and _original_prepare is not None and current is _prepare_cache:
            GenerationMixin._prepare_cache_for_generation = _original_prepare
            _original_prepare = None


def _prepare_cache(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """In place of `GenerationMixin._prepare_cache_for_generation`: our cache for enabled models, everything
    else as before.
    """
    original = _original_prepare  # another thread's disable() may take it away at any time
    if original is None:
        original = GenerationMixin._prepare_cache_for_generation
    handle = _handles.get(self)
    if handle is not None and self.config._attn_implementation == ATTENTION_NAME:
        mask = model_kwargs.get("attention_mask")
        if (
            mask is not None
            and mask.dim() == 2
            and mask.size(1) > (max_positions(self.config) or mask.size(1))
        ):
            check_positions(self.config, int(mask.sum(dim=1).max()), num_new=mask.size(1))
        name = cache_argument(self)
        given = model_kwargs.get(name)
        if (
            given is None
            and generation_config.use_cache is not False
            and generation_config.cache_implementation in _DEFAULT_CACHES
        ):
            given = model_kwargs[name] = handle.new_cache()
            _announce_prompt(given, mask, generation_config)
            return None
        if isinstance(given, TinyServeCache):
            _announce_prompt(given, mask, generation_config)
    return original(self, generation_config, model_kwargs, *args, **kwargs)


def _announce_prompt(cache: TinyServeCache, mask: torch.Tensor | None, generation_config: Any) -> None:
    """Tells an empty cache that its prompt will come in pieces."""
    chunk_size = getattr(generation_config, "prefill_chunk_size", None)
    if chunk_size is None or cache.sequences:
        return
    if mask is not None and mask.dim() == 2:
        cache.prompt_length = mask.size(1)
    else:  # 5.x leaves out a mask of ones, and notes its length
        cache.prompt_length = getattr(generation_config, "_mask_length", None)
    if cache.prompt_length is None and cache.policy is not None:
        raise ValueError(
            f"prefill_chunk_size: expected None, or a two-dimensional attention mask that says how long the "
            f"prompt is for policy {cache.policy.name}, got {chunk_size}"
        )


# The check of positions -------------------------------------------------------------------------------------


def _check_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward: a prompt past the model's positions is refused by name, where an embedding would
    only say "index".
    """
    if torch.compiler.is_compiling():
        return
    limit = max_positions(module.config)
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if limit is None or not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return
    num_new = tokens.shape[1]
    cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
    if isinstance(cache, PackedBatch):  # one row of many sequences, which its `inputs` has checked
        return
    past = cache.get_seq_length() if isinstance(cache, Cache) else 0
    if isinstance(past, torch.Tensor) or past + num_new <= limit:
        return
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        num_tokens = int(mask.sum(dim=1).max())
    elif isinstance(positions, torch.Tensor):
        num_tokens = int(positions.max()) + 1
    else:
        num_tokens = past + num_new
    check_positions(module.config, num_tokens, num_new)
