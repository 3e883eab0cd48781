"""What the CUDA ops do with lengths, tables, lists and budgets that hold wrong numbers.

The host cannot look at them, so nothing is refused. On the emulator, and on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyserve_ops.testing import Batch, Implementation, assert_refused, assert_same_bits, make_batch


@pytest.fixture
def cuda(impl: Implementation) -> Implementation:
    if not impl.is_cuda:
        pytest.skip("refuses them by name (test_bad_input.py)")
    return impl


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sealed(impl: Implementation, *args: Any, **kwargs: Any) -> Batch:
    batch = make_batch(*args, **kwargs)
    batch.seal(impl.ops.seal_pages)
    return batch


def test_a_page_without_an_id_is_not_attended_nor_scored(cuda: Implementation) -> None:
    batch = sealed(cuda, [100], page_budget=7)
    holes = batch.page_table.clone()
    holes[0, 2] = -1
    assert (batch.run(cuda.ops.score_pages, page_table=holes)[0, :, 2] == -torch.inf).all()
    others = torch.tensor([[[0, 1, 3, 4, 5, 6]]], dtype=torch.int32).repeat(1, 2, 1)
    listed = replace(batch, selected_pages=others, num_selected=torch.full((1, 2), 6, dtype=torch.int32))
    expected = listed.run(cuda.ops.attend_pages)[0]
    for op in (cuda.ops.attend_pages, cuda.ops.sparse_decode):
        torch.testing.assert_close(batch.run(op, page_table=holes)[0], expected)


def test_new_tokens_without_a_page_are_dropped(cuda: Implementation) -> None:
    batch = make_batch([10], [30], only_stored=True)
    short = batch.page_table[:, :2].clone()
    whole = batch.with_own_pools()
    batch.run(cuda.ops.append_kv, page_table=short)
    whole.run(cuda.ops.append_kv)
    ids = short[0].long()
    assert_same_bits(batch.k_pages[ids], whole.k_pages[ids])
    third = int(whole.page_table[0, 2])
    assert batch.k_pages[third].isnan().all()


def test_lengths_beyond_the_page_table_are_cut_to_it(cuda: Implementation) -> None:
    batch = sealed(cuda, [63])
    wide = batch.page_table[:, :4].contiguous()
    expected = batch.run(cuda.ops.sparse_decode, page_table=wide)
    longer = batch.run(cuda.ops.sparse_decode, page_table=wide, seq_lens=int32(1000))
    for actual, want in zip(longer, expected, strict=True):
        assert_same_bits(actual, want)


def test_tokens_behind_the_last_sequence_are_padding(cuda: Implementation) -> None:
    batch = sealed(cuda, [20, 50], [3, 1])
    ends = int32(0, 2, 3)  # one of the four packed tokens belongs to nobody
    for op in (cuda.ops.sparse_decode, cuda.ops.attend_pages, cuda.ops.prefill_attention):
        out, lse = batch.run(op, cu_query_lens=ends)[:2]
        assert not out[3].any()
        assert (lse[3] == -torch.inf).all()
        assert out[:3].any()


@pytest.mark.parametrize(("budget", "num_pages"), [(-5, 3), (0, 3), (2, 3), (99, 4)])
def test_a_budget_is_kept_between_the_forced_pages_and_the_width(
    cuda: Implementation, budget: int, num_pages: int
) -> None:
    batch = sealed(cuda, [400], page_budget=4)
    *_, selected, counts = batch.run(cuda.ops.sparse_decode, page_budget=int32(budget))
    assert counts.tolist() == [[num_pages] * 2]
    assert {0, 24, 25} <= set(selected[0, 0].tolist())


@pytest.mark.parametrize("count", [-3, 9])
def test_a_count_outside_of_its_list_is_cut_to_it(cuda: Implementation, count: int) -> None:
    batch = make_batch([100])
    pages = torch.tensor([[[0, 3, 6]]], dtype=torch.int32).repeat(1, 2, 1)
    kept = min(max(count, 0), 3)
    results = [
        replace(batch, selected_pages=pages, num_selected=torch.full((1, 2), n, dtype=torch.int32)).run(
            cuda.ops.attend_pages
        )
        for n in (count, kept)
    ]
    for actual, want in zip(*results, strict=True):
        assert_same_bits(actual, want)


@pytest.mark.parametrize("page", [-1, 5, 7, 1000])
def test_a_listed_page_that_the_row_does_not_see_adds_nothing(cuda: Implementation, page: int) -> None:
    batch = make_batch([70])
    lists = [torch.tensor([[pages]], dtype=torch.int32).repeat(1, 2, 1) for pages in ([0, 4, page], [0, 4])]
    results = []
    for pages in lists:
        counts = torch.full((1, 2), pages.shape[2], dtype=torch.int32)
        listed = replace(batch, selected_pages=pages, num_selected=counts)
        results.append(listed.run(cuda.ops.attend_pages)[0])
    assert_same_bits(*results)


def _one_byte_later(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.numel() + 1)[1:].view(rows.shape).copy_(rows)


def _rows_of_a_wider_tensor(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 8))[..., : rows.shape[2]]


@pytest.mark.parametrize("change", [_one_byte_later, _rows_of_a_wider_tensor])
@pytest.mark.parametrize("op", ["append_kv", "seal_pages", "score_pages", "sparse_decode"])
def test_summary_rows_that_are_not_aligned_are_refused(
    cuda: Implementation, op: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    batch = sealed(cuda, [40])
    function = getattr(cuda.ops, op)
    extra: dict[str, Any] = {"page_ids": int32(0)} if op == "seal_pages" else {}
    arguments = batch.arguments(function, page_summary=change(batch.page_summary), **extra)
    assert_refused(function, arguments, "page_summary")
