"""copy_pages, gather_pages and scatter_pages: bytes of K, V and summaries move together and nothing else
changes."""

from __future__ import annotations

import pytest
import torch

from tinyserve_ops import testing
from tinyserve_ops.testing import Batch, Implementation, assert_same_bits, make_batch

PARTS = ("k_pages", "v_pages", "page_summary")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(
    impl: Implementation, layout: str, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> Batch:
    batch = make_batch([100, 40], layout=layout, dtype=dtype, kv_dtype=kv_dtype)
    batch.seal(impl.ops.seal_pages)
    return batch


def snapshot(batch: Batch) -> dict[str, torch.Tensor]:
    return {part: getattr(batch, part).clone() for part in PARTS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_copies_are_exact_and_leave_other_pages_alone(
    impl: Implementation, layout: str, dtype: torch.dtype
) -> None:
    batch = filled(impl, layout, dtype)
    before = snapshot(batch)
    assert batch.run(impl.ops.copy_pages, src_page_ids=int32(0, 3, 3), dst_page_ids=int32(5, 1, 8)) is None
    for part in PARTS:
        expected = before[part].clone()
        for src, dst in ((0, 5), (3, 1), (3, 8)):
            expected[dst] = before[part][src]
        assert_same_bits(getattr(batch, part), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_scales_move_with_their_pages(impl: Implementation, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    k_pages, v_pages = (torch.randint(-9, 9, (6, 2, 5, 8), generator=generator).to(dtype) for _ in range(2))
    k_scales, v_scales = (torch.rand(6, 2, 5, generator=generator) for _ in range(2))
    pools = [k_pages, v_pages.mT.contiguous().mT, k_scales, v_scales]
    before = [pool.clone() for pool in pools]
    impl.ops.copy_pages(int32(0, 4), int32(3, 1), *pools, None)
    gathered = impl.ops.gather_pages(int32(1, 0), *pools, None)
    impl.ops.scatter_pages(int32(5, 2), *gathered[:4], None, *pools, None)
    for pool, old, copy in zip(pools, before, gathered, strict=False):
        assert_same_bits(copy, old[[4, 0]])
        expected = old.clone()
        expected[[3, 1, 5, 2]] = old[[0, 4, 4, 0]]
        assert_same_bits(pool, expected)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_gathered_pages_are_contiguous_copies(impl: Implementation, layout: str) -> None:
    batch = filled(impl, layout)
    ids = [4, 0, 4, 7]
    k, v, k_scales, v_scales, summary = batch.run(impl.ops.gather_pages, page_ids=int32(*ids))
    for got, part in zip((k, v, summary), PARTS, strict=True):
        assert got.is_contiguous()
        assert_same_bits(got, getattr(batch, part)[ids].contiguous())
    k.zero_()
    assert batch.k_pages[4].any()
    for scales in (k_scales, v_scales):
        assert scales.shape == (0,)
        assert scales.dtype == torch.float32


def test_a_missing_summary_is_gathered_as_empty(impl: Implementation) -> None:
    batch = filled(impl, "token_major")
    *_, summary = batch.run(impl.ops.gather_pages, page_ids=int32(1), page_summary=None)
    assert summary.shape == (0,)
    assert summary.dtype == torch.uint8


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_scattering_what_was_gathered_restores_it_bit_for_bit(impl: Implementation, layout: str) -> None:
    source, target = filled(impl, "token_major"), filled(impl, layout)
    for part in PARTS:
        getattr(target, part).fill_(7)
    before = snapshot(target)
    ids = [6, 2, 0]
    k, v, _, _, summary = source.run(impl.ops.gather_pages, page_ids=int32(*ids))
    result = target.run(
        impl.ops.scatter_pages, page_ids=int32(5, 1, 3), k=k, v=v, k_scales_in=None, v_scales_in=None,
        summary_in=summary,
    )  # fmt: skip
    assert result is None
    for part in PARTS:
        expected = before[part].clone()
        expected[[5, 1, 3]] = getattr(source, part)[ids]
        assert_same_bits(getattr(target, part), expected)


def test_without_summaries_only_keys_and_values_move(impl: Implementation) -> None:
    batch = filled(impl, "token_major")
    before = snapshot(batch)
    batch.run(impl.ops.copy_pages, src_page_ids=int32(0), dst_page_ids=int32(5), page_summary=None)
    k, v, _, _, _ = batch.run(impl.ops.gather_pages, page_ids=int32(1), page_summary=None)
    batch.run(
        impl.ops.scatter_pages, page_ids=int32(6), k=k, v=v, k_scales_in=None, v_scales_in=None,
        summary_in=None, page_summary=None,
    )  # fmt: skip
    assert_same_bits(batch.page_summary, before["page_summary"])
    assert_same_bits(batch.k_pages[5], before["k_pages"][0])
    assert_same_bits(batch.v_pages[6], before["v_pages"][1])


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_a_strided_source_is_scattered_like_its_contiguous_copy(impl: Implementation, layout: str) -> None:
    batch = filled(impl, layout)
    wide_k, wide_v = testing.make_pools(4, 2, 16, 16, torch.float32, "channel_major")
    wide_k.normal_()
    wide_v.normal_()
    batch.run(
        impl.ops.scatter_pages, page_ids=int32(2, 3), k=wide_k[::2], v=wide_v[1::2], k_scales_in=None,
        v_scales_in=None, summary_in=None, page_summary=None,
    )  # fmt: skip
    assert torch.equal(batch.k_pages[2:4], wide_k[::2])
    assert torch.equal(batch.v_pages[2:4], wide_v[1::2])


def test_no_page_ids_move_nothing(impl: Implementation) -> None:
    batch = filled(impl, "token_major")
    before = snapshot(batch)
    none = torch.empty(0, dtype=torch.int32)
    batch.run(impl.ops.copy_pages, src_page_ids=none, dst_page_ids=none)
    k, v, _, _, summary = batch.run(impl.ops.gather_pages, page_ids=none)
    assert k.shape == (0, 2, 16, 16)
    assert summary.shape == (0, 2, batch.page_summary.shape[2])
    batch.run(
        impl.ops.scatter_pages,
        page_ids=none,
        k=k,
        v=v,
        k_scales_in=None,
        v_scales_in=None,
        summary_in=summary,
    )
    for part in PARTS:
        assert_same_bits(getattr(batch, part), before[part])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_copied_page_is_attended_like_the_original(impl: Implementation, kv_dtype: torch.dtype) -> None:
    batch = filled(impl, "channel_major", kv_dtype=kv_dtype)
    expected = batch.run(impl.ops.sparse_decode)
    spare = sorted(set(range(len(batch.k_pages))) - set(batch.page_table.flatten().tolist()))[:2]
    batch.run(impl.ops.copy_pages, src_page_ids=batch.page_table[0, 1:3].clone(), dst_page_ids=int32(*spare))
    batch.page_table[0, 1:3] = int32(*spare)
    for actual, want in zip(batch.run(impl.ops.sparse_decode), expected, strict=True):
        impl.assert_same(actual, want)
