"""torch.library.opcheck on every compiled op: schema and mutation, fake results, dynamic shapes under AOT
dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyserve_ops import ops
from tinyserve_ops.testing import Batch, Implementation, make_batch


def finite_batch(cpu: Implementation, **options: Any) -> Batch:
    """opcheck compares arguments by value, so pools hold no NaN here."""
    batch = make_batch([20, 50, -2], [3, 1, 2], **options)
    for pool in batch.pools.values():
        if pool.is_floating_point():
            pool.nan_to_num_(nan=0.0)
    batch.page_summary.zero_()
    batch.seal(cpu.ops.seal_pages)
    return batch


def check(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    overload = getattr(torch.ops.tinyserve, function.__name__).default
    results = torch.library.opcheck(overload, (), arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("layout", ["token_major", "channel_major"])
@pytest.mark.parametrize(
    "op", ["append_kv", "score_pages", "attend_pages", "sparse_decode", "prefill_attention"]
)
def test_ops_on_batches_keep_their_contract(
    cpu: Implementation, op: str, layout: str, kv_dtype: torch.dtype
) -> None:
    batch = finite_batch(cpu, layout=layout, kv_dtype=kv_dtype)
    function = getattr(ops, op)
    check(function, batch.arguments(function))


def test_optional_arguments_keep_the_contract(cpu: Implementation) -> None:
    batch = finite_batch(cpu, dtype=torch.bfloat16)
    check(ops.append_kv, batch.arguments(ops.append_kv, page_summary=None))
    scores = batch.run(ops.score_pages)
    batch.selected_pages, batch.num_selected = batch.run(ops.select_pages, page_scores=scores)
    check(ops.attend_pages, batch.arguments(ops.attend_pages, return_page_lse=True))


def test_selection_keeps_the_contract(cpu: Implementation) -> None:
    batch = finite_batch(cpu)
    scores = batch.run(ops.score_pages)
    check(ops.select_pages, batch.arguments(ops.select_pages, page_scores=scores))


def test_merging_keeps_the_contract(cpu: Implementation) -> None:
    check(ops.merge_states, {"outs": torch.randn(2, 3, 4, 16), "lses": torch.randn(2, 3, 4)})


@pytest.mark.parametrize("with_summary", [True, False])
def test_moving_pages_keeps_the_contract(cpu: Implementation, with_summary: bool) -> None:
    batch = finite_batch(cpu)
    ids = torch.tensor([0, 2], dtype=torch.int32)
    summary = batch.page_summary if with_summary else None
    check(ops.seal_pages, batch.arguments(ops.seal_pages, page_ids=ids))
    copied = {"src_page_ids": ids, "dst_page_ids": ids + 1, "page_summary": summary}
    check(ops.copy_pages, batch.arguments(ops.copy_pages, **copied))
    gathered = {"page_ids": ids, "page_summary": summary}
    check(ops.gather_pages, batch.arguments(ops.gather_pages, **gathered))
    k, v, _, _, rows = batch.run(ops.gather_pages, **gathered)
    scattered = {
        "k": k, "v": v, "k_scales_in": None, "v_scales_in": None, "summary_in": rows if with_summary else None
    }  # fmt: skip
    check(ops.scatter_pages, batch.arguments(ops.scatter_pages, **gathered, **scattered))
