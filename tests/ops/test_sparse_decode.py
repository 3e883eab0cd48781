"""sparse_decode: the three stages in one call, dense at a full budget, and right against float64 below it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinyserve_ops import testing
from tinyserve_ops.scorers import SCORERS, group_reductions
from tinyserve_ops.testing import Batch, Implementation, assert_close, make_batch

LENGTHS = [0, 15, 16, 255, 700]
COMBINATIONS = [(scorer, name) for scorer in SCORERS for name in group_reductions(scorer)]
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])


def sealed(impl: Implementation, *args: object, **kwargs: object) -> Batch:
    batch = make_batch(*args, **kwargs)  # type: ignore[arg-type]
    batch.seal(impl.ops.seal_pages)
    return batch


def stages(impl: Implementation, batch: Batch) -> tuple[torch.Tensor, ...]:
    """The same through the three ops one after the other."""
    page_scores = batch.run(impl.ops.score_pages)
    selected_pages, num_selected = batch.run(impl.ops.select_pages, page_scores=page_scores)
    chosen = replace(batch, selected_pages=selected_pages, num_selected=num_selected)
    out, lse, _ = chosen.run(impl.ops.attend_pages)
    return out, lse, selected_pages, num_selected


@pytest.mark.parametrize(("scorer", "group_reduction"), COMBINATIONS)
def test_it_equals_score_then_select_then_attend(
    impl: Implementation, scorer: str, group_reduction: str
) -> None:
    for dtype, kv_dtype, layout, window in (
        (torch.float32, torch.float32, "token_major", -1),
        (torch.bfloat16, torch.bfloat16, "channel_major", 300),
        (torch.float16, torch.float16, "interleaved", -1),
        (torch.float16, torch.int8, "channel_major", 300),
        (torch.float32, torch.int8, "interleaved", -1),
    ):
        if kv_dtype == torch.int8 and scorer == "bounds_full":
            continue
        batch = sealed(
            impl, LENGTHS, num_heads=6, scorer=scorer, dtype=dtype, kv_dtype=kv_dtype, layout=layout,
            window=window,
        )  # fmt: skip
        batch.group_reduction = group_reduction
        results = zip(batch.run(impl.ops.sparse_decode), stages(impl, batch), strict=True)
        for fused, separate in results:
            impl.assert_same(fused, separate)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("window", [-1, 40])
@KV_DTYPES
def test_a_budget_that_covers_everything_equals_dense_attention(
    impl: Implementation, layout: str, window: int, kv_dtype: torch.dtype
) -> None:
    batch = sealed(impl, LENGTHS, kv_dtype=kv_dtype, layout=layout, window=window, page_budget=60)
    out, lse, _, num_selected = batch.run(impl.ops.sparse_decode)
    dense_out, dense_lse, _ = batch.run(impl.ops.attend_pages)
    impl.assert_same(out, dense_out)
    impl.assert_same(lse, dense_lse)
    first = [max(0, n - window + 1) // 16 if window > 0 else 0 for n in LENGTHS]
    assert num_selected[:, 0].tolist() == [
        n // 16 + 1 - begin for n, begin in zip(LENGTHS, first, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "kv_dtype"), testing.DTYPE_PAIRS)
def test_a_small_budget_equals_float64_attention_to_the_same_pages(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = sealed(impl, LENGTHS, num_heads=9, num_kv_heads=3, dtype=dtype, kv_dtype=kv_dtype, page_budget=5)
    out, lse, selected_pages, num_selected = batch.run(impl.ops.sparse_decode)
    expected_out, expected_lse = testing.attention_oracle(batch, selected_pages=selected_pages)
    out_rounding, lse_rounding = testing.attention_tolerance(batch)
    assert_close(out, expected_out, atol=testing.tolerance(out.dtype) + out_rounding)
    assert_close(lse, expected_lse, atol=2e-5 + lse_rounding, rtol=2e-5)
    assert num_selected.tolist() == [[min(5, n // 16 + 1)] * 3 for n in LENGTHS]
    dense_out, _ = testing.attention_oracle(batch)
    assert (out.double() - dense_out).abs().max() > 0.01  # pages were left out


def test_the_best_page_of_each_kv_head_is_found(impl: Implementation) -> None:
    batch = make_batch([400], num_heads=4, num_kv_heads=2, page_budget=4)
    for kv_head, position in ((0, 100), (1, 250)):
        batch.keys[0][position, kv_head] = 4.0 * batch.q[0, 2 * kv_head : 2 * kv_head + 2].sum(0)
    batch.store()
    batch.seal(impl.ops.seal_pages)
    _, _, selected_pages, _ = batch.run(impl.ops.sparse_decode)
    assert 100 // 16 in selected_pages[0, 0]
    assert 250 // 16 in selected_pages[0, 1]
    for head in range(2):
        assert {0, 24, 25} <= set(selected_pages[0, head].tolist())  # the sink page and the two recent ones


def test_a_summary_of_nan_does_not_hide_the_forced_pages(impl: Implementation) -> None:
    batch = make_batch([400])  # never sealed: every scale is NaN
    out, _, selected_pages, _ = batch.run(impl.ops.sparse_decode)
    assert selected_pages.tolist() == [[[0, 1, 24, 25]] * 2]
    assert out.isfinite().all()


def test_padding_rows_give_zeros_and_leave_the_others_alone(impl: Implementation) -> None:
    batch = sealed(impl, [-1, 300, -3, 20], [1, 1, 2, 1])
    out, lse, selected_pages, num_selected = batch.run(impl.ops.sparse_decode)
    empty = torch.tensor([0, 2, 3])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    assert (selected_pages[empty] == -1).all()
    assert not num_selected[empty].any()
    for b in (1, 3):
        solo = batch.take([b]).run(impl.ops.sparse_decode)
        for alone, together in zip(solo, (out, lse, selected_pages, num_selected), strict=True):
            impl.assert_same(alone, together[batch.new_tokens(b)])


@KV_DTYPES
def test_a_sequence_alone_and_in_another_order_gives_the_same(
    impl: Implementation, kv_dtype: torch.dtype
) -> None:
    batch = sealed(impl, LENGTHS, num_heads=6, kv_dtype=kv_dtype)
    batch.page_budget = torch.tensor([3, 8, 4, 5, 7], dtype=torch.int32)
    batch.max_page_budget = 8
    together = batch.run(impl.ops.sparse_decode)
    for b in range(len(LENGTHS)):
        for alone, expected in zip(batch.take([b]).run(impl.ops.sparse_decode), together, strict=True):
            impl.assert_same(alone, expected[b : b + 1])
    order = [2, 4, 0, 1, 3]
    for permuted, expected in zip(batch.take(order).run(impl.ops.sparse_decode), together, strict=True):
        impl.assert_same(permuted, expected[torch.tensor(order)])


@KV_DTYPES
def test_the_number_of_threads_changes_nothing(impl: Implementation, kv_dtype: torch.dtype) -> None:
    batch = sealed(impl, [3000, 40], num_heads=9, num_kv_heads=3, kv_dtype=kv_dtype, page_budget=40)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(batch.run(impl.ops.sparse_decode))
    for one, two in zip(*results, strict=True):
        impl.assert_same(one, two)


def test_a_strided_query_equals_its_contiguous_copy(impl: Implementation) -> None:
    batch = sealed(impl, LENGTHS)
    expected = batch.run(impl.ops.sparse_decode)
    fused, _, _ = testing.fused_views(batch.q, batch.k, batch.v)
    for view in [fused, *(view for _, view in testing.strided_views(batch.q))]:
        for actual, want in zip(batch.run(impl.ops.sparse_decode, q=view), expected, strict=True):
            impl.assert_same(actual, want)


def test_equal_keys_select_the_lowest_pages(impl: Implementation) -> None:
    batch = make_batch([127], page_size=16, page_budget=3)
    batch.num_sink_pages, batch.num_recent_pages = 0, 1
    batch.keys[0][:] = batch.keys[0][:1]
    batch.store()
    batch.seal(impl.ops.seal_pages)
    for num_threads in (1, 2, 1, 2, 1):
        torch.set_num_threads(num_threads)
        assert batch.run(impl.ops.sparse_decode)[2].tolist() == [[[0, 1, 7]] * 2]


@pytest.mark.parametrize("seq_lens", [[], [20, 3]])
def test_a_batch_without_new_tokens_gives_empty_results(impl: Implementation, seq_lens: list[int]) -> None:
    batch = make_batch(seq_lens, [0] * len(seq_lens))
    shapes = [tuple(result.shape) for result in batch.run(impl.ops.sparse_decode)]
    assert shapes == [(0, 4, 16), (0, 4), (0, 2, 4), (0, 2)]


@pytest.mark.parametrize("scorer", ["bounds", "bounds_full", "low_rank"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [pair for pair in testing.DTYPE_PAIRS if pair[0] == pair[1] or pair[0].itemsize == 4],
)
def test_pools_and_summaries_may_begin_at_any_element(
    impl: Implementation, scorer: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    if kv_dtype == torch.int8 and scorer == "bounds_full":
        return
    batch = sealed(impl, LENGTHS, num_heads=6, scorer=scorer, dtype=dtype, kv_dtype=kv_dtype, page_budget=6)
    expected = batch.run(impl.ops.sparse_decode)
    shifted = {
        name: _one_element_later(getattr(batch, name))
        for name in ("q", "k_pages", "v_pages", "k_scales", "v_scales", "page_summary")
        if getattr(batch, name) is not None and not (impl.is_cuda and name == "page_summary")
    }
    for actual, want in zip(batch.run(impl.ops.sparse_decode, **shifted), expected, strict=True):
        impl.assert_same(actual, want)


def _one_element_later(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element behind an aligned address."""
    storage = tensor.new_empty(tensor.numel() + 1)
    view = storage[1:].as_strided(tensor.shape, tensor.stride())
    return view.copy_(tensor)
