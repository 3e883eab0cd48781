"""prefill_attention against dense causal float64 attention: first prompts, chunks, ragged mixtures,
windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinyserve_ops import testing
from tinyserve_ops.testing import Batch, Implementation, assert_close, make_batch

KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])


def assert_matches_oracle(impl: Implementation, batch: Batch) -> None:
    out, lse = batch.run(impl.ops.prefill_attention)
    expected_out, expected_lse = testing.attention_oracle(batch, new_tokens_as_given=True)
    assert out.dtype == batch.q.dtype
    assert lse.dtype == torch.float32
    assert_close(out, expected_out)
    assert_close(lse, expected_lse, atol=1e-4 if batch.q.dtype == torch.float32 else 2e-2, rtol=1e-5)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), testing.DTYPE_PAIRS)
def test_a_ragged_mixture_equals_float64(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype, layout: str
) -> None:
    # first prompt, one decode token, nothing new, a chunk on a page boundary, one across pages
    batch = make_batch([0, 33, 20, 32, 13], [40, 1, 0, 16, 37], num_heads=6, dtype=dtype,
                       kv_dtype=kv_dtype, layout=layout, only_stored=True, seed=1)  # fmt: skip
    assert_matches_oracle(impl, batch)


@KV_DTYPES
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_every_page_boundary_equals_float64(
    impl: Implementation, page_size: int, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [1, 15, 16, 17, 65], [2, 1, 15, 16, 17], page_size=page_size, kv_dtype=kv_dtype, only_stored=True,
        seed=2,
    )  # fmt: skip
    assert_matches_oracle(impl, batch)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 112, 128, 160, 192, 256])
@KV_DTYPES
def test_every_head_dim_equals_float64(impl: Implementation, head_dim: int, kv_dtype: torch.dtype) -> None:
    batch = make_batch([0, 20], [9, 5], head_dim=head_dim, kv_dtype=kv_dtype, only_stored=True, seed=3)
    assert_matches_oracle(impl, batch)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (5, 1), (4, 4), (8, 1), (28, 4), (7, 7)])
def test_every_grouping_equals_float64(impl: Implementation, num_heads: int, num_kv_heads: int) -> None:
    batch = make_batch(
        [0, 20], [9, 5], num_heads=num_heads, num_kv_heads=num_kv_heads, only_stored=True, seed=4
    )
    assert_matches_oracle(impl, batch)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 40, 1000])
@KV_DTYPES
def test_a_window_hides_what_lies_before_it(impl: Implementation, window: int, kv_dtype: torch.dtype) -> None:
    batch = make_batch(
        [0, 15, 50, 3], [30, 3, 20, 1], kv_dtype=kv_dtype, window=window, only_stored=True, seed=5
    )
    assert_matches_oracle(impl, batch)


def test_padding_in_front_of_a_prompt_is_ignored(impl: Implementation) -> None:
    batch = make_batch([-4, 0, -5, -2, -1], [20, 24, 5, 3, 1], only_stored=True, seed=6)
    batch.k[:4] = torch.nan
    batch.v[:4] = torch.nan
    assert_matches_oracle(impl, batch)
    out, lse = batch.run(impl.ops.prefill_attention)
    empty = torch.tensor([*range(4), *range(44, 49), 49, 50, 52])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    solo_out, solo_lse = batch.take([1]).run(impl.ops.prefill_attention)
    assert_close(solo_out, out[20:44])
    assert_close(solo_lse, lse[20:44])


def test_a_later_token_changes_no_earlier_row(impl: Implementation) -> None:
    batch = make_batch([7], [24], only_stored=True, seed=7)
    before, _ = batch.run(impl.ops.prefill_attention)
    batch.k[20], batch.v[20] = 9.0, -9.0
    after, _ = batch.run(impl.ops.prefill_attention)
    assert_close(after[:20], before[:20], atol=1e-6)
    assert (after[20:] - before[20:]).abs().max() > 0.1


def test_chunks_equal_one_prefill(impl: Implementation) -> None:
    whole = make_batch([0], [50], only_stored=True, seed=8)
    expected, _ = whole.run(impl.ops.prefill_attention)
    begin = 0
    for size in (1, 15, 16, 18):
        tokens = slice(begin, begin + size)
        chunk = replace(
            whole,
            q=whole.q[tokens],
            k=whole.k[tokens],
            v=whole.v[tokens],
            cu_query_lens=torch.tensor([0, size], dtype=torch.int32),
            seq_lens=torch.tensor([begin], dtype=torch.int32),
        )
        out, _ = chunk.run(impl.ops.prefill_attention)
        assert_close(out, expected[tokens])
        chunk.run(impl.ops.append_kv)
        begin += size


@KV_DTYPES
def test_new_keys_come_from_the_arguments_not_from_the_pages(
    impl: Implementation, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([10, 0], [20, 30], kv_dtype=kv_dtype, only_stored=True, seed=9)
    before, _ = batch.run(impl.ops.prefill_attention)
    batch.store()  # as after append_kv
    impl.assert_same(batch.run(impl.ops.prefill_attention)[0], before)


def test_it_equals_attention_over_pages_after_the_append(impl: Implementation) -> None:
    batch = make_batch([10, 0, 100], [20, 30, 1], num_heads=9, num_kv_heads=3, only_stored=True, seed=10)
    out, lse = batch.run(impl.ops.prefill_attention)
    batch.run(impl.ops.append_kv)
    paged_out, paged_lse, _ = batch.run(impl.ops.attend_pages)
    assert_close(out, paged_out)
    assert_close(lse, paged_lse)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.int8)],
)
def test_pages_of_another_dtype_keep_the_new_tokens_unrounded(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([30], [10], dtype=dtype, kv_dtype=kv_dtype, only_stored=True, seed=11)
    expected, _ = testing.attention_oracle(batch, new_tokens_as_given=True)
    assert_close(batch.run(impl.ops.prefill_attention)[0], expected)


def test_a_zero_query_gives_running_means_of_the_values(impl: Implementation) -> None:
    batch = make_batch([5], [30], num_heads=2, num_kv_heads=1, only_stored=True, seed=12)
    batch.q.zero_()
    out, _ = batch.run(impl.ops.prefill_attention)
    means = batch.values[0].double().cumsum(0) / torch.arange(1, 36)[:, None, None]
    assert_close(out, means[5:].expand(-1, 2, -1), atol=2e-6)


def test_softmax_is_invariant_to_a_shift_of_all_scores(impl: Implementation) -> None:
    batch = make_batch([20], [10], only_stored=True, seed=13)
    batch.sm_scale = 1.0
    batch.q.zero_()
    batch.q[:, :, 0] = 1024.0
    batch.k.zero_()
    batch.k[:, :, 0] = -1024.0
    batch.keys[0][:] = batch.k[0]
    batch.store(only_stored=True)
    assert_close(batch.run(impl.ops.prefill_attention)[0], testing.attention_oracle(batch)[0])


def test_fp16_products_beyond_the_fp16_range_stay_finite(impl: Implementation) -> None:
    batch = make_batch([20], [10], head_dim=64, dtype=torch.float16, only_stored=True, seed=14)
    batch.q.fill_(64.0)
    batch.k.fill_(64.0)
    batch.keys[0].fill_(64.0)
    batch.sm_scale = 1.0
    batch.store(only_stored=True)
    assert_close(batch.run(impl.ops.prefill_attention)[0], testing.attention_oracle(batch)[0])


def test_strided_inputs_equal_their_contiguous_copies(impl: Implementation) -> None:
    batch = make_batch([30, 0], [10, 20], only_stored=True, seed=15)
    expected, _ = batch.run(impl.ops.prefill_attention)
    fused = testing.fused_views(batch.q, batch.k, batch.v)
    views = zip(*(testing.strided_views(tensor) for tensor in (batch.q, batch.k, batch.v)), strict=True)
    for q, k, v in [fused, *(tuple(view for _, view in three) for three in views)]:
        assert_close(batch.run(impl.ops.prefill_attention, q=q, k=k, v=v)[0], expected, atol=1e-6)


@pytest.mark.parametrize("seq_lens", [[], [20, 3]])
def test_a_batch_without_new_tokens_gives_empty_results(impl: Implementation, seq_lens: list[int]) -> None:
    batch = make_batch(seq_lens, [0] * len(seq_lens), dtype=torch.bfloat16)
    out, lse = batch.run(impl.ops.prefill_attention)
    assert out.shape == (0, 4, 16)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_stays_out_of_the_rows_that_do_not_see_it(
    impl: Implementation, value: float, window: int
) -> None:
    batch = make_batch([0], [40], only_stored=True, seed=21)
    batch.window = window
    clean, _ = batch.run(impl.ops.prefill_attention)
    batch.v[17] = value
    out, _ = batch.run(impl.ops.prefill_attention)
    sees = torch.arange(40) >= 17
    if window > 0:
        sees &= torch.arange(40) < 17 + window
    assert torch.equal(out[~sees], clean[~sees])
    assert not out[sees].isfinite().all(-1).any()
