"""Where the tensors of a layer lie in memory: what the speed of reading them rests on."""

from __future__ import annotations

import sys

import pytest
import torch

from tinyserve_ops.layer_pool import LayerPool

HUGE_PAGE_BYTES = 2 << 20


def _pool(num_pages: int, dtype: torch.dtype) -> LayerPool:
    return LayerPool(
        num_pages,
        3,
        16,
        64,
        dtype=dtype,
        device=torch.device("cpu"),
        scorer="bounds",
        channel_major=True,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="2 MiB memory pages are asked for on Linux")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_large_tensors_begin_at_a_2_mib_page_and_own_it_to_its_end(dtype):
    pool = _pool(20_000, dtype)
    large = [part for part in pool.parts if part is not None]
    assert all(part.numel() * part.element_size() >= HUGE_PAGE_BYTES for part in large)
    for part in large:
        assert part.data_ptr() % HUGE_PAGE_BYTES == 0
        storage = part.untyped_storage()
        last_page_end = (
            part.data_ptr() + -(-part.numel() * part.element_size() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        )
        assert last_page_end <= storage.data_ptr() + storage.nbytes()


@pytest.mark.parametrize("num_pages", [4, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_part_has_its_shape_and_only_the_keys_are_a_view(num_pages, dtype):
    pool = _pool(num_pages, dtype)
    assert pool.k_pages.shape == pool.v_pages.shape == (num_pages, 3, 16, 64)
    assert pool.k_pages.stride()[2:] == (1, 16)
    assert pool.v_pages.is_contiguous()
    assert pool.page_summary.shape == (num_pages, 3, pool.summary_bytes)
    # A compiled step copies what it writes through a view of a tensor that it does not own.
    assert not any(part._is_view() for part in pool.parts[1:] if part is not None)
    pool.v_pages[-1].fill_(1)
    pool.page_summary[-1].fill_(2)
    assert pool.v_pages[-1].eq(1).all()
    assert pool.page_summary[-1].eq(2).all()


def test_growing_keeps_the_live_pages_across_the_size_from_which_memory_is_aligned():
    pool = _pool(300, torch.bfloat16)
    pool.k_pages[:300].normal_()
    pool.v_pages[:300].normal_()
    before = [pool.k_pages[:300].clone(), pool.v_pages[:300].clone()]
    pool.grow(5_000, 300)
    assert pool.num_pages == 5_000
    assert torch.equal(pool.k_pages[:300], before[0])
    assert torch.equal(pool.v_pages[:300], before[1])
