"""A sequence of one cache copied into the pages of another, whose format may differ.

The copy holds the same rows in the same order; full pages are sealed by the receiving cache's own scorer, so
it equals a sequence that was appended there from the beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinyserve_ops.pool_ops import append_tokens

if TYPE_CHECKING:
    from tinyserve_ops.cache import PagedKVCache

__all__ = ["copy_sequence"]


def copy_sequence(source: PagedKVCache, seq: int, target: PagedKVCache) -> int:
    """Handle in `target` of a copy of the committed tokens of `seq`, a sequence of `source`.

    Raises:
        ValueError: the caches differ in shape, or were made for other kinds of model.
        OutOfPagesError: nothing changed.
    """
    for name in ("num_layers", "num_kv_heads", "head_dim", "fingerprint"):
        expected, got = getattr(target, name), getattr(source, name)
        if expected != got:
            raise ValueError(f"{name}: expected {expected!r}, as in this cache, got {got!r}")
    handle = target.new_sequence()
    try:
        goes_on = [handle] if source.in_prompt(seq) else []
        forward = target.begin([(handle, source.length(seq))], prompt_goes_on=goes_on)
        for layer_idx in range(target.num_layers):
            k, v = (part.transpose(0, 1).to(target.device) for part in source.dense(layer_idx, seq))
            group = target.group_of_layer[layer_idx]
            tables = forward.cu_query_lens, forward.seq_lens(group), forward.page_table(group)
            with torch.no_grad():
                append_tokens(target.pool.layers[layer_idx], k, v, *tables)
        forward.commit(allow_missing_layers=True)
    except BaseException:
        target.free(handle)
        raise
    target.set_next_position(handle, source.next_position(seq))
    return handle
