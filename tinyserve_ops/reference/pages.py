"""Moving keys and values into, out of and between pages; summaries move with their page.

A page is sealed (summarised) when its last slot is written. Every check runs before the first write, so an
op that raises has changed nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyserve_ops.reference import checks
from tinyserve_ops.reference.quantisation import dequantise, quantise_rows
from tinyserve_ops.reference.rows import rows_of
from tinyserve_ops.reference.summaries import summarise


def append_kv(
    k: Tensor,
    v: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
    scorer: str,
) -> None:
    """Writes new keys and values [num_tokens, num_kv_heads, head_dim] to their stored positions; seals full
    pages.

    Padding slots (negative positions) are skipped. Mutates the pages, their scales and page_summary.
    """
    checks.check_append_kv(
        k, v, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales, v_scales, page_summary, scorer
    )
    page_size = k_pages.shape[2]
    for row in rows_of(cu_query_lens, seq_lens):
        if row.position < 0:
            continue
        page, slot = divmod(row.position, page_size)
        page_id = int(page_table[row.sequence, page])
        for new, pages, scales in ((k, k_pages, k_scales), (v, v_pages, v_scales)):
            if scales is None:
                pages[page_id, :, slot] = new[row.token].to(pages.dtype)
            else:
                pages[page_id, :, slot], scales[page_id, :, slot] = quantise_rows(new[row.token])
        if page_summary is not None and row.sealed(page, page_size):
            page_summary[page_id] = _summary_of(page_id, k_pages, k_scales, scorer)


def seal_pages(
    page_ids: Tensor, k_pages: Tensor, k_scales: Tensor | None, page_summary: Tensor, scorer: str
) -> None:
    """(Re)computes the summaries of full pages. Mutates page_summary."""
    checks.check_seal_pages(page_ids, k_pages, k_scales, page_summary, scorer)
    for page_id in page_ids.tolist():
        page_summary[page_id] = _summary_of(page_id, k_pages, k_scales, scorer)


def copy_pages(
    src_page_ids: Tensor,
    dst_page_ids: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> None:
    """Copies page src_page_ids[i] to page dst_page_ids[i], no source and named once. Mutates all parts."""
    pools = _parts(k_pages, v_pages, k_scales, v_scales, page_summary)
    checks.check_copy_pages(src_page_ids, dst_page_ids, pools)
    for pool in pools.values():
        if pool is not None:
            pool[dst_page_ids.long()] = pool[src_page_ids.long()]


def gather_pages(
    page_ids: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns contiguous copies of pages, one tensor per part; absent parts come back with shape [0]."""
    pools = _parts(k_pages, v_pages, k_scales, v_scales, page_summary)
    checks.check_gather_pages(page_ids, pools)
    k, v, k_scale, v_scale, summary = (
        None if pool is None else pool[page_ids.long()].contiguous() for pool in pools.values()
    )
    assert k is not None
    assert v is not None
    return (
        k,
        v,
        torch.empty(0) if k_scale is None else k_scale,
        torch.empty(0) if v_scale is None else v_scale,
        torch.empty(0, dtype=torch.uint8) if summary is None else summary,
    )


def scatter_pages(
    page_ids: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales_in: Tensor | None,
    v_scales_in: Tensor | None,
    summary_in: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> None:
    """Writes what `gather_pages` returned to the pages `page_ids`. Mutates all parts that are given."""
    sources = {
        "k": k,
        "v": v,
        "k_scales_in": k_scales_in,
        "v_scales_in": v_scales_in,
        "summary_in": summary_in,
    }
    pools = _parts(k_pages, v_pages, k_scales, v_scales, page_summary)
    checks.check_scatter_pages(page_ids, sources, pools)
    for source, pool in zip(sources.values(), pools.values(), strict=True):
        if source is not None and pool is not None:
            pool[page_ids.long()] = source


def _summary_of(page_id: int, k_pages: Tensor, k_scales: Tensor | None, scorer: str) -> Tensor:
    if k_scales is None:
        return summarise(k_pages[page_id], scorer)
    return summarise(dequantise(k_pages[page_id], k_scales[page_id]), scorer)


def _parts(
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> dict[str, Tensor | None]:
    return {
        "k_pages": k_pages,
        "v_pages": v_pages,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "page_summary": page_summary,
    }
