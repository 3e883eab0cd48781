"""select_pages against a sort: forced pages, ties, NaN, windows, and the size of the set."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyserve_ops.testing import Implementation

SPECIAL = [0.0, -0.0, math.nan, -math.inf, math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def select(
    impl: Implementation,
    scores: torch.Tensor,
    budget: int,
    *,
    page_size: int = 4,
    position: int | None = None,
    sinks: int = 0,
    recent: int = 1,
    window: int = -1,
) -> list[list[int]]:
    """Selected pages per kv head of one row with scores [num_kv_heads, num_pages]."""
    position = scores.shape[1] * page_size - 1 if position is None else position
    selected, count = impl.ops.select_pages(
        scores[None], int32(0, 1), int32(position), int32(budget), budget, page_size, sinks, recent, window
    )
    assert selected.dtype == count.dtype == torch.int32
    assert selected.shape == (1, len(scores), budget)
    chosen = []
    for head in range(len(scores)):
        number = int(count[0, head])
        assert (selected[0, head, number:] == -1).all()
        chosen.append(selected[0, head, :number].tolist())
    return chosen


def sorted_choice(scores: list[float], visible: range, budget: int, sinks: int, recent: int) -> list[int]:
    """The definition: a stable sort by (forced, not NaN, score), lowest page first."""
    forced = [p for p in visible if p < sinks or p >= visible.stop - recent]
    rest = [p for p in visible if p not in forced]
    numbers = sorted((p for p in rest if not math.isnan(scores[p])), key=lambda p: (-scores[p], p))
    order = numbers + [p for p in rest if math.isnan(scores[p])]
    return sorted(forced + order[: max(0, budget - len(forced))])


def test_the_best_pages_come_back_in_ascending_order(impl: Implementation) -> None:
    scores = torch.tensor([[0.1, 5.0, -2.0, 3.0, 4.0, 0.0], [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]])
    assert select(impl, scores, 3) == [[1, 4, 5], [0, 1, 5]]


def test_forced_pages_are_part_of_the_budget(impl: Implementation) -> None:
    scores = torch.tensor([[0.0, 1.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert select(impl, scores, 4, sinks=1, recent=2) == [[0, 2, 6, 7]]
    assert select(impl, scores, 3, sinks=1, recent=2) == [[0, 6, 7]]


def test_forced_pages_that_overlap_count_once(impl: Implementation) -> None:
    assert select(impl, torch.zeros(1, 3), 6, sinks=2, recent=4) == [[0, 1, 2]]
    assert select(impl, torch.zeros(1, 1), 3, sinks=1, recent=2) == [[0]]


def test_a_budget_above_the_pages_selects_them_all(impl: Implementation) -> None:
    assert select(impl, torch.full((1, 3), math.nan), 10) == [[0, 1, 2]]


def test_ties_go_to_the_lowest_pages_in_every_run(impl: Implementation) -> None:
    for num_threads in (1, 2, 1, 2, 1):
        torch.set_num_threads(num_threads)
        assert select(impl, torch.full((2, 8), 1.5), 3) == [[0, 1, 7], [0, 1, 7]]


def test_minus_zero_ties_with_zero(impl: Implementation) -> None:
    assert select(impl, torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]]), 3) == [[0, 1, 4]]
    assert select(impl, torch.tensor([[-1.0, -0.0, 0.0, -0.0, -1.0]]), 3) == [[1, 2, 4]]


def test_nan_ranks_below_minus_infinity(impl: Implementation) -> None:
    nan, inf = math.nan, math.inf
    assert select(impl, torch.tensor([[nan, -inf, nan, 1.0, 0.0]]), 3) == [[1, 3, 4]]
    assert select(impl, torch.tensor([[nan, nan, nan, 0.0]]), 3) == [[0, 1, 3]]
    negative_nan = torch.tensor([[-1, -1, 0, 0]], dtype=torch.int32).view(torch.float32)
    assert select(impl, negative_nan, 2) == [[2, 3]]


def test_a_window_hides_sinks_and_old_pages(impl: Implementation) -> None:
    scores = torch.tensor([[9.0, 8.0, 1.0, 2.0, 3.0, 0.0]])
    assert select(impl, scores, 4, sinks=1, window=16) == [[2, 3, 4, 5]]
    assert select(impl, scores, 3, sinks=1, window=16) == [[3, 4, 5]]
    assert select(impl, scores, 3, sinks=1, window=17) == [[1, 4, 5]]
    assert select(impl, scores, 3, sinks=1, window=1) == [[5]]


def test_a_padding_row_selects_nothing(impl: Implementation) -> None:
    assert select(impl, torch.zeros(2, 4), 3, position=-1) == [[], []]


def test_budgets_and_lengths_differ_by_sequence(impl: Implementation) -> None:
    scores = torch.arange(8.0).expand(4, 1, 8).contiguous()
    starts, lengths, budgets = int32(0, 1, 1, 3, 4), int32(31, 7, 14, -1), int32(3, 2, 2, 5)
    selected, count = impl.ops.select_pages(scores, starts, lengths, budgets, 5, 4, 0, 1)
    rows = [[5, 6, 7, -1, -1], [2, 3, -1, -1, -1], [2, 3, -1, -1, -1], [-1] * 5]
    assert selected[:, 0].tolist() == rows
    assert count[:, 0].tolist() == [3, 2, 2, 0]


@pytest.mark.parametrize("batch_size", [0, 2])
def test_no_rows_give_empty_results(impl: Implementation, batch_size: int) -> None:
    zeros = torch.zeros(batch_size, dtype=torch.int32)
    selected, count = impl.ops.select_pages(
        torch.zeros(0, 2, 8), torch.zeros(batch_size + 1, dtype=torch.int32), zeros, zeros + 3, 3, 4, 0, 1
    )
    assert selected.shape == (0, 2, 3)
    assert count.shape == (0, 2)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_selection_equals_a_sort(impl: Implementation, data: st.DataObject) -> None:
    floats = st.floats(width=32) | st.sampled_from(SPECIAL) | st.integers(-3, 3).map(float)
    scores = data.draw(st.lists(floats, min_size=1, max_size=40))
    page_size = data.draw(st.integers(1, 5))
    position = data.draw(st.integers(-1, len(scores) * page_size - 1))
    sinks, recent = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    budget = data.draw(st.integers(sinks + recent, len(scores) + 9))
    window = data.draw(st.just(-1) | st.integers(1, len(scores) * page_size + 2))
    first = max(0, position - window + 1) // page_size if window > 0 else 0
    visible = range(first, position // page_size + 1) if position >= 0 else range(0)
    chosen = select(
        impl, torch.tensor([scores]), budget, page_size=page_size, position=position, sinks=sinks,
        recent=recent, window=window,
    )[0]  # fmt: skip
    assert len(chosen) == min(budget, len(visible))
    assert chosen == sorted_choice(scores, visible, budget, sinks, recent)


def test_long_rows_of_close_scores_equal_a_sort(impl: Implementation) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0x3F800000, 0x3F800400, (2, 3000), generator=generator, dtype=torch.int32)
    scores = bits.view(torch.float32)  # differ in the last ten bits only
    scores[:, ::7] *= -1
    for budget in (2, 64, 1500, 2999):
        for head, chosen in enumerate(select(impl, scores, budget)):
            expected = sorted_choice(scores[head].tolist(), range(3000), budget, 0, 1)
            assert chosen == expected


def test_permuting_the_batch_permutes_the_selection(impl: Implementation) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(5, 3, 50, generator=generator)
    lengths, budgets = int32(10, 199, 120, -1, 77), int32(3, 9, 20, 4, 5)
    order = torch.tensor([4, 2, 0, 3, 1])
    cu = torch.arange(6, dtype=torch.int32)
    expected = impl.ops.select_pages(scores, cu, lengths, budgets, 20, 4, 1, 2)
    actual = impl.ops.select_pages(scores[order], cu, lengths[order], budgets[order], 20, 4, 1, 2)
    for permuted, original in zip(actual, expected, strict=True):
        assert torch.equal(permuted, original[order])
