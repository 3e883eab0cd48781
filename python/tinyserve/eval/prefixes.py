"""The dense prefill of a sample's context, done once, and forks of it for every method.

The prefill runs in pages of the model's own type with a budget that covers everything, so it is dense
whatever the methods do later. A method with the same page format shares its pages, copy-on-write; for another
format the keys and values are copied into a cache of that format, which seals its own summaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyserve.decode import PREFILL_CHUNK
from tinyserve.eval.batch import EvalBatch
from tinyserve.eval.methods import Method, PageFormat, full_cache
from tinyserve.progress import bar
from tinyserve_ops import PagedKVCache, PagePool
from tinyserve_ops.hf import new_paged_cache

__all__ = ["Prefix", "prefill"]


def prefill(batch: EvalBatch, seq: int, token_ids: Sequence[int]) -> None:
    """Stores tokens densely, chunk by chunk. The caller holds `torch.inference_mode()`.

    No chunk has a single token, which would be a sparse step, unless there is only one in all.
    """
    with bar("prefill", total=len(token_ids), unit=" tokens", delay=5.0) as progress:
        start = 0
        while start < len(token_ids):
            stop = min(start + PREFILL_CHUNK, len(token_ids))
            stop -= len(token_ids) - stop == 1  # leaves two for the last chunk
            batch.feed(seq, token_ids[start:stop])
            progress.update(stop - start)
            start = stop


class Prefix:
    """The context of one sample.

    Args:
        model: an enabled model.
        token_ids: the context; may be empty.
        base: the format of the pages it is prefilled into; an exact one.
        max_tokens: what the pools are made for, forks included; they grow past it.
    """

    def __init__(self, model: Any, token_ids: Sequence[int], base: Method, *, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._base_format = base.page_format
        self._base = new_paged_cache(model, full_cache(base.config).config, max_tokens=max_tokens)
        self._seq = self._base.new_sequence()
        prefill(EvalBatch(model, self._base), self._seq, token_ids)
        self._copy: tuple[PageFormat, PagedKVCache, int] | None = None

    def fork(self, method: Method, config: Any) -> tuple[PagedKVCache, int]:
        """A cache with the settings `config` of `method`, and its sequence that holds the context.

        Only the latest foreign format is kept: methods of one format should come one after the other.
        """
        source, seq = self._of_format(method)
        kv = _sharing(source.pool, source, config)
        return kv, kv.adopt(source, seq)

    def _of_format(self, method: Method) -> tuple[PagedKVCache, int]:
        wanted = method.page_format
        if wanted == self._base_format:
            return self._base, self._seq
        if self._copy is None or self._copy[0] != wanted:
            self._copy = None  # the pages of the format before go first
            copy = new_paged_cache(self._model, full_cache(method.config).config, max_tokens=self._max_tokens)
            self._copy = (wanted, copy, copy.adopt(self._base, self._seq))
        return self._copy[1:]


def _sharing(pool: PagePool, like: PagedKVCache, config: Any) -> PagedKVCache:
    return PagedKVCache(
        like.num_layers,
        like.num_kv_heads,
        like.head_dim,
        config=config,
        dtype=like.dtype,
        device=like.device,
        fingerprint=like.fingerprint,
        pool=pool,
    )
