"""Ops run on another device by `ops_on_device` do to the arguments what they do at home.

With the CPU as the other device: tensors are copied, whichever it is.
"""

from __future__ import annotations

import pytest
import torch

from tinyserve_ops import ops, testing
from tinyserve_ops.testing import assert_refused, assert_same_bits, make_batch
from tinyserve_ops.testing.on_device import ops_on_device

THERE = ops_on_device(ops, "cpu")


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_written_pools_come_back_and_results_are_the_same(layout: str, kv_dtype: torch.dtype) -> None:
    at_home, away = (
        make_batch([15, 40], [20, 1], layout=layout, kv_dtype=kv_dtype, only_stored=True) for _ in range(2)
    )
    at_home.run(ops.append_kv)
    assert away.run(THERE.append_kv) is None
    for name, pool in away.pools.items():
        assert_same_bits(pool, at_home.pools[name])
    for got, want in zip(away.run(THERE.sparse_decode), at_home.run(ops.sparse_decode), strict=True):
        assert_same_bits(got, want)


def test_views_keep_their_strides_there() -> None:
    batch = make_batch([40, 200])
    expected = batch.run(ops.attend_pages)[0]
    for _, view in testing.strided_views(batch.q):
        assert_same_bits(batch.run(THERE.attend_pages, q=view)[0], expected)
    wide = batch.k_pages.repeat(1, 1, 2, 2)[:, :, ::2, ::2]
    assert_refused(THERE.attend_pages, batch.arguments(ops.attend_pages, k_pages=wide), "k_pages")


def test_a_tensor_that_requires_grad_still_does_there() -> None:
    batch = make_batch([40])
    arguments = batch.arguments(ops.attend_pages, q=batch.q.clone().requires_grad_())
    assert_refused(THERE.attend_pages, arguments, "q")
