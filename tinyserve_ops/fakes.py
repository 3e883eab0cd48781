"""Shapes, dtypes and strides of every op's results, for torch.compile, export and FakeTensor.

Ops that only mutate their arguments need none.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []


def _attention_results(q: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def _selection_results(like: Tensor, num_tokens: int, num_kv_heads: int, width: int) -> tuple[Tensor, Tensor]:
    selected_pages = like.new_empty((num_tokens, num_kv_heads, width), dtype=torch.int32)
    return selected_pages, like.new_empty((num_tokens, num_kv_heads), dtype=torch.int32)


@torch.library.register_fake("tinyserve::score_pages")
def _score_pages(q, cu_query_lens, seq_lens, page_table, page_summary, *args, **kwargs):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], page_summary.shape[1], page_table.shape[1]), dtype=torch.float32)


@torch.library.register_fake("tinyserve::select_pages")
def _select_pages(page_scores, cu_query_lens, seq_lens, page_budget, max_page_budget, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _selection_results(page_scores, page_scores.shape[0], page_scores.shape[1], max_page_budget)


@torch.library.register_fake("tinyserve::attend_pages")
def _attend_pages(  # type: ignore[no-untyped-def]
    q, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales, v_scales, selected_pages,
    num_selected, sm_scale, window=-1, softcap=0.0, return_page_lse=False,
):  # fmt: skip
    out, lse = _attention_results(q)
    width = page_table.shape[1] if selected_pages is None else selected_pages.shape[2]
    shape = (*q.shape[:2], width) if return_page_lse else (0,)
    return out, lse, q.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("tinyserve::sparse_decode")
def _sparse_decode(  # type: ignore[no-untyped-def]
    q, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales, v_scales, page_summary,
    page_budget, max_page_budget, *args, **kwargs,
):  # fmt: skip
    return (*_attention_results(q), *_selection_results(q, q.shape[0], k_pages.shape[1], max_page_budget))


@torch.library.register_fake("tinyserve::merge_states")
def _merge_states(outs, lses):  # type: ignore[no-untyped-def]
    return _attention_results(outs[0])


@torch.library.register_fake("tinyserve::prefill_attention")
def _prefill_attention(q, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _attention_results(q)


@torch.library.register_fake("tinyserve::gather_pages")
def _gather_pages(page_ids, k_pages, v_pages, k_scales, v_scales, page_summary):  # type: ignore[no-untyped-def]
    def gathered(pages):  # type: ignore[no-untyped-def]
        if pages is None:
            return k_pages.new_empty((0,), dtype=torch.float32)
        return pages.new_empty((page_ids.shape[0], *pages.shape[1:]))

    summary = k_pages.new_empty((0,), dtype=torch.uint8) if page_summary is None else gathered(page_summary)
    return gathered(k_pages), gathered(v_pages), gathered(k_scales), gathered(v_scales), summary
