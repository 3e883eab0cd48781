"""Argument checks of the reference: ValueError or TypeError with the argument's name, expected and got.

All checks of an op run before it computes anything. They read shapes, strides, dtypes and the small integer
tensors, never keys or values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinyserve_ops.reference.rows import rows_of
from tinyserve_ops.scorers import HEAD_DIMS, PAGE_SIZES, check_group_reduction, find_op_scorer, summary_bytes

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PAGES = (*_FLOATS, torch.int8)
_INT32 = (torch.int32,)
_FP32 = (torch.float32,)
_UINT8 = (torch.uint8,)


def require(condition: bool, argument: str, expected: object, got: object) -> None:
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def check_tensor(
    argument: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> None:
    """Type, device, dtype and shape; None in `shape` stands for any size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
    # New tensors are made there, so it is the only device on which an op works.
    device = torch.get_default_device().type
    require(
        tensor.device.type == device,
        argument,
        "a tensor on the CPU" if device == "cpu" else f"a tensor on {device}",
        tensor.device,
    )
    if tensor.dtype not in dtypes:
        raise TypeError(f"{argument}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{argument}: expected a tensor that does not require grad (the op has no autograd), "
            f"got requires_grad=True; use torch.no_grad() or detach()"
        )
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    text = "[" + ", ".join("*" if want is None else str(want) for want in shape) + "]"
    require(fits, argument, f"shape {text}", list(tensor.shape))


def check_batch(num_tokens: int, cu_query_lens: Tensor, seq_lens: Tensor) -> None:
    check_tensor("seq_lens", seq_lens, _INT32, (None,))
    check_tensor("cu_query_lens", cu_query_lens, _INT32, (seq_lens.shape[0] + 1,))
    starts = cu_query_lens.tolist()
    require(
        starts == sorted(starts) and starts[0] == 0 and starts[-1] == num_tokens,
        "cu_query_lens",
        f"ascending offsets from 0 to the {num_tokens} packed tokens",
        starts,
    )


def check_heads(q: Tensor, num_kv_heads: int, head_dim: int) -> None:
    check_tensor("q", q, _FLOATS, (None, None, head_dim))
    require(
        q.shape[1] > 0 and q.shape[1] % num_kv_heads == 0,
        "q",
        f"a number of heads that is a multiple of the {num_kv_heads} kv heads",
        q.shape[1],
    )


def check_options(window: int, softcap: float = 0.0) -> None:
    require(window == -1 or window > 0, "window", "-1 (none) or at least 1", window)
    require(softcap == 0.0, "softcap", "0.0 (soft-capping is not implemented)", softcap)


def check_kv_pages(
    k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> None:
    _check_pool("k_pages", k_pages, (None, None, None, None))
    _check_scales("k_scales", k_scales, k_pages)
    _check_pool("v_pages", v_pages, tuple(k_pages.shape))
    if v_pages.dtype != k_pages.dtype:
        raise TypeError(f"v_pages: expected the dtype of k_pages, {k_pages.dtype}, got {v_pages.dtype}")
    require(v_pages.stride(3) == 1, "v_pages", "stride 1 along head_dim", v_pages.stride())
    _check_scales("v_scales", v_scales, v_pages)


def check_summary(
    page_summary: Tensor,
    scorer: str,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_pages: int | None,
) -> None:
    _check_head_dim("page_summary", head_dim)
    num_bytes = summary_bytes(scorer, head_dim, page_size)
    check_tensor("page_summary", page_summary, _UINT8, (num_pages, num_kv_heads, num_bytes))
    require(page_summary.stride(2) == 1, "page_summary", "stride 1 along its bytes", page_summary.stride())


def check_page_ids(argument: str, page_ids: Tensor, num_pages: int) -> None:
    check_tensor(argument, page_ids, _INT32, (None,))
    for page_id in page_ids.tolist():
        require(0 <= page_id < num_pages, argument, f"page ids in [0, {num_pages})", page_id)


def check_visible_pages(
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    num_pages: int,
    window: int = -1,
) -> None:
    """The page table names a page of the pool for every page that a row sees."""
    check_tensor("page_table", page_table, _INT32, (seq_lens.shape[0], None))
    table = page_table.tolist()
    for row in rows_of(cu_query_lens, seq_lens, window):
        for page in row.visible_pages(page_size):
            _check_table_entry(table, row.sequence, page, num_pages)


def check_append_kv(
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
    check_kv_pages(k_pages, v_pages, k_scales, v_scales)
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    check_tensor("k", k, _FLOATS, (None, num_kv_heads, head_dim))
    check_tensor("v", v, _FLOATS, tuple(k.shape))
    check_batch(k.shape[0], cu_query_lens, seq_lens)
    check_tensor("page_table", page_table, _INT32, (seq_lens.shape[0], None))
    if page_summary is not None:
        check_scorer_dtype(scorer, k_pages)
        check_summary(page_summary, scorer, num_kv_heads, head_dim, page_size, num_pages)
    table = page_table.tolist()
    for row in rows_of(cu_query_lens, seq_lens):
        if row.position >= 0:
            _check_table_entry(table, row.sequence, row.position // page_size, num_pages)


def check_seal_pages(
    page_ids: Tensor, k_pages: Tensor, k_scales: Tensor | None, page_summary: Tensor, scorer: str
) -> None:
    _check_pool("k_pages", k_pages, (None, None, None, None))
    _check_scales("k_scales", k_scales, k_pages)
    check_scorer_dtype(scorer, k_pages)
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    check_summary(page_summary, scorer, num_kv_heads, head_dim, page_size, num_pages)
    check_page_ids("page_ids", page_ids, num_pages)


def check_score_pages(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_summary: Tensor,
    page_size: int,
    scorer: str,
    group_reduction: str,
    window: int,
) -> None:
    check_options(window)
    find_op_scorer(scorer)
    check_group_reduction(group_reduction, scorer)
    require(page_size in PAGE_SIZES, "page_size", "1 to 64", page_size)
    check_tensor("q", q, _FLOATS, (None, None, None))
    _check_head_dim("q", q.shape[2])
    check_tensor("page_summary", page_summary, _UINT8, (None, None, None))
    check_summary(page_summary, scorer, page_summary.shape[1], q.shape[2], page_size, None)
    check_heads(q, page_summary.shape[1], q.shape[2])
    check_batch(q.shape[0], cu_query_lens, seq_lens)
    check_visible_pages(cu_query_lens, seq_lens, page_table, page_size, page_summary.shape[0], window)


def check_select_pages(
    page_scores: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_budget: Tensor,
    max_page_budget: int,
    page_size: int,
    num_sink_pages: int,
    num_recent_pages: int,
    window: int,
) -> None:
    check_options(window)
    require(page_size in PAGE_SIZES, "page_size", "1 to 64", page_size)
    require(num_sink_pages >= 0, "num_sink_pages", "at least 0", num_sink_pages)
    require(num_recent_pages >= 1, "num_recent_pages", "at least 1", num_recent_pages)
    check_tensor("page_scores", page_scores, _FP32, (None, None, None))
    check_batch(page_scores.shape[0], cu_query_lens, seq_lens)
    check_tensor("page_budget", page_budget, _INT32, (seq_lens.shape[0],))
    num_forced = num_sink_pages + num_recent_pages
    allowed = f"from the {num_forced} forced pages to max_page_budget {max_page_budget}"
    for budget in page_budget.tolist():
        require(num_forced <= budget <= max_page_budget, "page_budget", allowed, budget)
    for row in rows_of(cu_query_lens, seq_lens, window):
        end = row.visible_pages(page_size).stop
        columns = page_scores.shape[2]
        require(end <= columns, "page_scores", f"scores of {end} pages", columns)


def check_attend_pages(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    selected_pages: Tensor | None,
    num_selected: Tensor | None,
    window: int,
    softcap: float,
) -> None:
    check_options(window, softcap)
    check_kv_pages(k_pages, v_pages, k_scales, v_scales)
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    check_heads(q, num_kv_heads, head_dim)
    check_batch(q.shape[0], cu_query_lens, seq_lens)
    if selected_pages is None:
        require(num_selected is None, "num_selected", "None, as selected_pages", "a tensor")
        check_visible_pages(cu_query_lens, seq_lens, page_table, page_size, num_pages, window)
        return
    require(num_selected is not None, "num_selected", "a tensor, as selected_pages", None)
    assert num_selected is not None
    check_tensor("page_table", page_table, _INT32, (seq_lens.shape[0], None))
    check_tensor("selected_pages", selected_pages, _INT32, (q.shape[0], num_kv_heads, None))
    check_tensor("num_selected", num_selected, _INT32, (q.shape[0], num_kv_heads))
    table = page_table.tolist()
    for row in rows_of(cu_query_lens, seq_lens, window):
        end = row.visible_pages(page_size).stop
        for head in range(num_kv_heads):
            count = int(num_selected[row.token, head])
            require(
                0 <= count <= selected_pages.shape[2],
                "num_selected",
                f"0 to {selected_pages.shape[2]}",
                count,
            )
            previous = -1
            for page in selected_pages[row.token, head, :count].tolist():
                expected = f"ascending pages in [0, {end}) for row {row.token}"
                require(previous < page < end, "selected_pages", expected, page)
                previous = page
                _check_table_entry(table, row.sequence, page, num_pages)


def check_merge_states(outs: Tensor, lses: Tensor) -> None:
    check_tensor("outs", outs, _FLOATS, (None, None, None, None))
    require(outs.shape[0] > 0, "outs", "at least one state", list(outs.shape))
    check_tensor("lses", lses, _FP32, tuple(outs.shape[:3]))


def check_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    window: int,
    softcap: float,
) -> None:
    check_options(window, softcap)
    check_kv_pages(k_pages, v_pages, k_scales, v_scales)
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    check_heads(q, num_kv_heads, head_dim)
    for argument, new in (("k", k), ("v", v)):
        check_tensor(argument, new, (q.dtype,), (q.shape[0], num_kv_heads, head_dim))
    check_batch(q.shape[0], cu_query_lens, seq_lens)
    check_tensor("page_table", page_table, _INT32, (seq_lens.shape[0], None))
    table = page_table.tolist()
    for sequence, stored_len in enumerate(seq_lens.tolist()):
        first_position = max(0, stored_len - window + 1) if window > 0 else 0
        if cu_query_lens[sequence] < cu_query_lens[sequence + 1]:
            for page in range(first_position // page_size, -(-max(stored_len, 0) // page_size)):
                _check_table_entry(table, sequence, page, num_pages)


# The parts of a pool that move together; the ops that move them copy bits and so take every element type and
# layout.
Parts = Mapping[str, Tensor | None]


def check_copy_pages(src_page_ids: Tensor, dst_page_ids: Tensor, pools: Parts) -> None:
    num_pages = _check_parts(pools)
    check_page_ids("src_page_ids", src_page_ids, num_pages)
    check_page_ids("dst_page_ids", dst_page_ids, num_pages)
    num_ids = src_page_ids.shape[0]
    require(
        dst_page_ids.shape[0] == num_ids,
        "dst_page_ids",
        f"{num_ids} ids like src_page_ids",
        dst_page_ids.shape[0],
    )
    _check_distinct("dst_page_ids", dst_page_ids)
    both = sorted(set(src_page_ids.tolist()) & set(dst_page_ids.tolist()))
    require(not both, "dst_page_ids", "pages that are not sources", both)


def check_gather_pages(page_ids: Tensor, pools: Parts) -> None:
    check_page_ids("page_ids", page_ids, _check_parts(pools))


def check_scatter_pages(page_ids: Tensor, sources: Parts, pools: Parts) -> None:
    check_page_ids("page_ids", page_ids, _check_parts(pools))
    _check_distinct("page_ids", page_ids)
    for (name, source), (pool_name, pool) in zip(sources.items(), pools.items(), strict=True):
        expected = "None" if pool is None else "a tensor"
        got = "None" if source is None else "a tensor"
        require(expected == got, name, f"{expected} as {pool_name}", got)
        if source is not None and pool is not None:
            check_tensor(name, source, (pool.dtype,), (page_ids.shape[0], *pool.shape[1:]))


def _check_parts(pools: Parts) -> int:
    num_pages, num_kv_heads = -1, -1
    for name, pool in pools.items():
        if pool is None:
            continue
        shape = (None, None) if num_pages < 0 else (num_pages, num_kv_heads)
        rest = (None, None) if name in ("k_pages", "v_pages") else (None,)
        check_tensor(name, pool, (*_PAGES, torch.uint8), (*shape, *rest))
        num_pages, num_kv_heads = pool.shape[:2]
    return num_pages


def _check_distinct(argument: str, page_ids: Tensor) -> None:
    ids = page_ids.tolist()
    require(len(set(ids)) == len(ids), argument, "no page twice", ids)


def _check_head_dim(argument: str, head_dim: int) -> None:
    require(head_dim in HEAD_DIMS, argument, "a head_dim that is a multiple of 8 from 8 to 256", head_dim)


def _check_pool(argument: str, pool: Tensor, shape: tuple[int | None, ...]) -> None:
    check_tensor(argument, pool, _PAGES, shape)
    require(pool.shape[1] > 0, argument, "at least one kv head", list(pool.shape))
    require(pool.shape[2] in PAGE_SIZES, argument, "a page_size of 1 to 64", pool.shape[2])
    _check_head_dim(argument, pool.shape[3])
    strides = pool.stride()
    require(1 in strides[2:], argument, "stride 1 along head_dim or along the tokens of a page", strides)


def _check_scales(argument: str, scales: Tensor | None, pages: Tensor) -> None:
    """There exactly where the pages are int8."""
    if pages.dtype != torch.int8:
        require(scales is None, argument, f"None beside pages of {pages.dtype}", "a tensor")
        return
    require(scales is not None, argument, "a tensor of scales beside int8 pages", None)
    assert scales is not None
    check_tensor(argument, scales, _FP32, tuple(pages.shape[:3]))
    require(
        scales.shape[2] == 1 or scales.stride(2) == 1, argument, "stride 1 along the tokens", scales.stride()
    )


def check_scorer_dtype(scorer: str, k_pages: Tensor) -> None:
    dtype = find_op_scorer(scorer)[1]
    require(
        dtype is None or k_pages.dtype != torch.int8,
        "scorer",
        "bounds or another scorer with int8 summaries for int8 pages",
        repr(scorer),
    )
    require(
        dtype in (None, k_pages.dtype), "scorer", f"the variant for k_pages of {k_pages.dtype}", repr(scorer)
    )


def _check_table_entry(table: list[list[int]], sequence: int, page: int, num_pages: int) -> None:
    columns = len(table[sequence])
    require(page < columns, "page_table", f"at least {page + 1} pages for sequence {sequence}", columns)
    page_id = table[sequence][page]
    require(
        0 <= page_id < num_pages,
        "page_table",
        f"page ids in [0, {num_pages}) at [{sequence}, {page}]",
        page_id,
    )
