"""append_kv: where tokens land, that nothing else is touched, that pages are sealed when they fill."""

from __future__ import annotations

import pytest
import torch

from tinyserve_ops import testing
from tinyserve_ops.testing import Batch, Implementation, assert_same_bits, make_batch

KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])


def expected_after(batch: Batch) -> Batch:
    """The batch with its new tokens written by plain indexing."""
    after = batch.with_own_pools()
    after.store()
    return after


def assert_same_pools(actual: Batch, expected: Batch) -> None:
    assert actual.pools.keys() == expected.pools.keys()
    for name, pool in actual.pools.items():
        assert_same_bits(pool, expected.pools[name])


@KV_DTYPES
@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_new_tokens_land_in_their_slots_and_nowhere_else(
    impl: Implementation, page_size: int, layout: str, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [0, 5, 16, 31, 63], [1, 0, 40, 2, 65], page_size=page_size, kv_dtype=kv_dtype, layout=layout,
        only_stored=True,
    )  # fmt: skip
    expected = expected_after(batch)
    assert batch.run(impl.ops.append_kv, page_summary=None) is None
    assert_same_pools(batch, expected)  # NaN in every other slot included


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_are_rounded_to_the_dtype_of_the_pages(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([3], [30], dtype=dtype, kv_dtype=kv_dtype, only_stored=True, seed=1)
    batch.k[0, 0, :4] = torch.tensor([0.0, -0.0, 1e-7, -65504.0])
    batch.k[1, 0, :2] = torch.tensor(
        [1.00048828125, 1.00390625]
    )  # halfway between two fp16 and two bf16 numbers
    batch.keys[0][3:] = batch.k.to(kv_dtype)
    expected = expected_after(batch)
    batch.run(impl.ops.append_kv, page_summary=None)
    assert_same_bits(batch.k_pages, expected.k_pages)
    assert_same_bits(batch.v_pages, expected.v_pages)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize(
    ("scorer", "kv_dtype"),
    [
        *((scorer, torch.float32) for scorer in ("bounds", "bounds_full", "mean", "bounds_mean")),
        *((scorer, torch.int8) for scorer in ("bounds", "mean", "bounds_mean")),
    ],
)
def test_a_page_is_sealed_when_it_fills(
    impl: Implementation, scorer: str, kv_dtype: torch.dtype, layout: str
) -> None:
    batch = make_batch(
        [0, 15, 16, 31, 20], [1, 1, 15, 40, 12], kv_dtype=kv_dtype, scorer=scorer, layout=layout,
        only_stored=True,
    )  # fmt: skip
    expected = expected_after(batch)
    filled = [
        (1, 0),
        (3, 1),
        (3, 2),
        (3, 3),
        (4, 1),
    ]  # (sequence, page) whose last slot is written by this call
    page_ids = torch.stack([batch.page_table[b, page] for b, page in filled])
    expected.run(impl.ops.seal_pages, page_ids=page_ids)
    batch.run(impl.ops.append_kv)
    assert_same_bits(batch.page_summary, expected.page_summary)


@KV_DTYPES
def test_one_token_at_a_time_equals_all_at_once(impl: Implementation, kv_dtype: torch.dtype) -> None:
    batch = make_batch([0], [70], kv_dtype=kv_dtype, scorer="bounds_mean", only_stored=True, seed=2)
    one_by_one = batch.with_own_pools()
    batch.run(impl.ops.append_kv)
    for position in range(70):
        one_by_one.run(
            impl.ops.append_kv,
            k=batch.k[position : position + 1],
            v=batch.v[position : position + 1],
            cu_query_lens=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([position], dtype=torch.int32),
        )
    assert_same_pools(one_by_one, batch)


@KV_DTYPES
def test_a_page_rolled_back_and_refilled_has_a_fresh_summary(
    impl: Implementation, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([0], [16], kv_dtype=kv_dtype, only_stored=True, seed=3)
    batch.k[10:].mul_(100.0)  # large keys that the roll-back takes away
    batch.run(impl.ops.append_kv)
    batch.k[10:].mul_(1e-3)
    batch.keys[0] = batch.k.clone()
    batch.run(
        impl.ops.append_kv,
        k=batch.k[10:],
        v=batch.v[10:],
        cu_query_lens=torch.tensor([0, 6], dtype=torch.int32),
        seq_lens=torch.tensor([10], dtype=torch.int32),
    )
    refilled = batch.with_own_pools()
    batch.store()
    batch.seal(impl.ops.seal_pages)
    assert_same_pools(refilled, batch)


@KV_DTYPES
def test_padding_slots_are_not_stored(impl: Implementation, kv_dtype: torch.dtype) -> None:
    batch = make_batch([-4, -3, 2, -1], [4, 20, 1, 1], kv_dtype=kv_dtype, only_stored=True, seed=4)
    batch.k[:4] = torch.nan
    batch.k[4:7] = torch.nan
    expected = expected_after(batch)
    batch.run(impl.ops.append_kv, page_summary=None)
    assert_same_pools(batch, expected)


@pytest.mark.parametrize("seq_lens", [[], [20, 3]])
def test_nothing_new_changes_nothing(impl: Implementation, seq_lens: list[int]) -> None:
    batch = make_batch(seq_lens, [0] * len(seq_lens), only_stored=True)
    before = expected_after(batch)
    batch.run(impl.ops.append_kv)
    assert_same_pools(batch, before)


def test_sequence_lengths_are_not_changed(impl: Implementation) -> None:
    batch = make_batch([0, 20], [3, 4], only_stored=True)
    before = batch.seq_lens.clone()
    batch.run(impl.ops.append_kv)
    assert torch.equal(batch.seq_lens, before)


@KV_DTYPES
def test_strided_keys_and_values_equal_their_contiguous_copies(
    impl: Implementation, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([5, 30], [20, 3], kv_dtype=kv_dtype, only_stored=True, seed=5)
    expected = expected_after(batch)
    _, fused_k, fused_v = testing.fused_views(batch.q, batch.k, batch.v)
    pairs = zip(testing.strided_views(batch.k), testing.strided_views(batch.v), strict=True)
    for k, v in [(fused_k, fused_v), *((k, v) for (_, k), (_, v) in pairs)]:
        batch.store(only_stored=True)
        batch.run(impl.ops.append_kv, k=k, v=v, page_summary=None)
        assert_same_pools(batch, expected)


@KV_DTYPES
def test_the_number_of_threads_changes_nothing(impl: Implementation, kv_dtype: torch.dtype) -> None:
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        batch = make_batch(
            [3, 100, 0], [200, 1, 90], kv_dtype=kv_dtype, scorer="mean_std", only_stored=True, seed=6
        )
        batch.run(impl.ops.append_kv)
        results.append(batch)
    assert_same_pools(*results)


def test_page_offsets_beyond_2_to_the_31_elements_are_right(impl: Implementation) -> None:
    small = make_batch([0], [17], num_kv_heads=1, head_dim=64, dtype=torch.float16, only_stored=True, seed=7)
    num_pages = 2**31 // (2 * 16 * 64) + 8
    shared = torch.empty(
        num_pages, 2, 1, 16, 64, dtype=torch.float16
    )  # virtual: only the pages used are touched
    row_bytes = small.page_summary.shape[2]
    wide_rows = torch.empty(num_pages, 1, 2064, dtype=torch.uint8)
    page_summary = wide_rows[:, :, :row_bytes]
    assert (num_pages - 1) * page_summary.stride(0) > 2**31
    k_pages, v_pages = shared[:, 0], shared[:, 1]
    page_table = torch.tensor([[num_pages - 1, num_pages - 2]], dtype=torch.int32)
    small.run(
        impl.ops.append_kv, k_pages=k_pages, v_pages=v_pages, page_table=page_table, page_summary=page_summary
    )
    small.run(impl.ops.append_kv)
    for page, page_id in enumerate(page_table[0].tolist()):
        here = int(small.page_table[0, page])
        tokens = 16 if page == 0 else 1
        assert_same_bits(k_pages[page_id, :, :tokens], small.k_pages[here, :, :tokens])
        assert_same_bits(v_pages[page_id, :, :tokens], small.v_pages[here, :, :tokens])
    assert_same_bits(page_summary[num_pages - 1], small.page_summary[small.page_table[0, 0]])
