"""score_pages against float64 scores of the summary bytes, the bound it promises, and its invariances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyserve_ops import testing
from tinyserve_ops.scorers import GROUP_REDUCTIONS, SCORERS, group_reductions
from tinyserve_ops.testing import Batch, Implementation, assert_close, make_batch

COMBINATIONS = [(scorer, name) for scorer in SCORERS for name in group_reductions(scorer)]


def assert_matches_oracle(impl: Implementation, batch: Batch) -> None:
    page_scores = batch.run(impl.ops.score_pages)
    assert page_scores.dtype == torch.float32
    assert_close(page_scores, testing.score_oracle(batch), atol=testing.score_tolerance(batch))


def sealed(impl: Implementation, *args: object, **kwargs: object) -> Batch:
    batch = make_batch(*args, **kwargs)  # type: ignore[arg-type]
    batch.seal(impl.ops.seal_pages)
    return batch


@pytest.mark.parametrize(("scorer", "group_reduction"), COMBINATIONS)
def test_every_scorer_equals_float64(impl: Implementation, scorer: str, group_reduction: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        batch = sealed(impl, [0, 15, 16, 100], [1, 1, 3, 1], num_heads=6, scorer=scorer, dtype=dtype)
        assert_matches_oracle(impl, replace(batch, group_reduction=group_reduction))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 112, 128, 160, 192, 256])
def test_every_head_dim_equals_float64(impl: Implementation, head_dim: int) -> None:
    for scorer in ("bounds", "bounds_mean", "bounds_full"):
        batch = sealed(impl, [40], head_dim=head_dim, scorer=scorer, dtype=torch.bfloat16)
        assert_matches_oracle(impl, batch)


@pytest.mark.parametrize("group_size", [1, 3, 5, 6, 7, 9, 16])
@pytest.mark.parametrize("group_reduction", GROUP_REDUCTIONS)
def test_every_group_size_equals_float64(impl: Implementation, group_size: int, group_reduction: str) -> None:
    batch = sealed(impl, [70], num_heads=3 * group_size, num_kv_heads=3)
    assert_matches_oracle(impl, replace(batch, group_reduction=group_reduction))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_every_page_size_and_boundary_equals_float64(impl: Implementation, page_size: int) -> None:
    lengths = [n - 1 for n in (1, 15, 16, 17, 31, 33, 255, 257)]
    assert_matches_oracle(impl, sealed(impl, lengths, page_size=page_size, num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40])
def test_pages_outside_the_window_are_not_visible(impl: Implementation, window: int) -> None:
    batch = sealed(impl, [0, 15, 47, 100], [1, 2, 1, 1], window=window)
    assert_matches_oracle(impl, batch)
    assert batch.run(impl.ops.score_pages)[4, 0, 0] == -torch.inf


def test_an_open_last_page_scores_infinity_and_hidden_pages_minus_infinity(impl: Implementation) -> None:
    batch = sealed(impl, [16, 31, -1, -5], [1, 1, 1, 2])
    scores = batch.run(impl.ops.score_pages)
    assert (scores[0, :, 1] == torch.inf).all()  # one token in page 1
    assert scores[1, :, :2].isfinite().all()  # page 1 just full
    assert (scores[0:2, :, 2:] == -torch.inf).all()
    assert (scores[2:] == -torch.inf).all()


def test_a_page_that_fills_later_in_the_same_call_is_open_for_earlier_rows(impl: Implementation) -> None:
    batch = sealed(impl, [14], [4])
    scores = batch.run(impl.ops.score_pages)
    assert (scores[0, :, 0] == torch.inf).all()
    assert scores[1:, :, 0].isfinite().all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (6, 2), (4, 4), (8, 1), (28, 4)])
def test_scores_of_a_kv_head_come_from_its_own_query_heads(
    impl: Implementation, num_heads: int, num_kv_heads: int
) -> None:
    batch = sealed(impl, [40], num_heads=num_heads, num_kv_heads=num_kv_heads)
    group_size = num_heads // num_kv_heads
    for kv_head in range(num_kv_heads):
        only = batch.q.clone()
        only[:, : kv_head * group_size] = 0
        only[:, (kv_head + 1) * group_size :] = 0
        scores = batch.run(impl.ops.score_pages, q=only)
        nonzero = (scores[0, :, :2] != 0).any(1)
        assert nonzero.tolist() == [head == kv_head for head in range(num_kv_heads)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 8), page_size=st.sampled_from([1, 4, 16]))
def test_the_bounds_score_is_never_below_a_true_logit(
    impl: Implementation, seed: int, spread: float, page_size: int
) -> None:
    for scorer in ("bounds", "bounds_full"):
        batch = make_batch([40], num_heads=6, num_kv_heads=2, page_size=page_size, scorer=scorer, seed=seed)
        batch.keys[0] *= torch.logspace(-spread, spread, 16)
        batch.store()
        batch.seal(impl.ops.seal_pages)
        scores = batch.run(impl.ops.score_pages, group_reduction="max").double()
        num_sealed = 41 // page_size
        keys = batch.keys[0][: num_sealed * page_size].double().unflatten(0, (num_sealed, page_size))
        queries = batch.sm_scale * batch.q[0].double().unflatten(0, (2, 3))
        logits = torch.einsum("hgd,pthd->hpgt", queries, keys)
        magnitudes = torch.einsum("hgd,pthd->hpgt", queries.abs(), keys.abs())
        # "max" keeps the best head, so the score bounds every head; the slack is fp32 rounding of the sum.
        assert (scores[0, :, :num_sealed, None, None] >= logits - 1e-5 * magnitudes).all()


@pytest.mark.parametrize("scorer", ["bounds", "bounds_full", "bounds_mean"])
def test_keys_near_the_fp16_range_give_finite_scores_and_the_right_ranking(
    impl: Implementation, scorer: str
) -> None:
    batch = make_batch([47], head_dim=64, num_heads=2, num_kv_heads=1, dtype=torch.float16, scorer=scorer)
    for page, magnitude in enumerate((30000.0, 60000.0, 45000.0)):
        batch.keys[0][page * 16 : (page + 1) * 16] = torch.where(
            torch.arange(16)[:, None, None] % 2 == 0, magnitude, -magnitude
        ).half()
    batch.store()
    batch.seal(impl.ops.seal_pages)
    batch.q.fill_(64.0)
    scores = batch.run(impl.ops.score_pages)[0, 0, :3]
    assert scores.isfinite().all()
    assert scores.argsort(descending=True).tolist() == [1, 2, 0]
    testing.assert_close(scores.double(), testing.score_oracle(batch)[0, 0, :3], atol=0, rtol=1e-5)


def test_pages_of_zeros_score_zero(impl: Implementation) -> None:
    batch = make_batch([47])
    batch.keys[0].zero_()
    batch.store()
    batch.seal(impl.ops.seal_pages)
    assert not batch.run(impl.ops.score_pages)[0, :, :3].any()


def test_the_paper_box_is_the_sum_over_channels_of_the_better_corner(impl: Implementation) -> None:
    batch = sealed(impl, [31], num_heads=1, num_kv_heads=1, scorer="bounds_full")
    q = batch.q[0, 0].double().numpy()
    scores = batch.run(impl.ops.score_pages)
    for page in range(2):
        keys = batch.keys[0][16 * page : 16 * (page + 1), 0].double().numpy()
        box = np.maximum(q * keys.max(0), q * keys.min(0)).sum()
        assert abs(scores[0, 0, page].item() - batch.sm_scale * box) < 1e-5


def test_a_sequence_alone_and_in_another_order_scores_the_same(impl: Implementation) -> None:
    batch = sealed(impl, [0, 5000, -2, 40, 300], [1, 1, 1, 3, 1], num_heads=6, scorer="bounds_mean")
    scores = batch.run(impl.ops.score_pages)
    for b in range(5):
        impl.assert_same(batch.take([b]).run(impl.ops.score_pages), scores[batch.new_tokens(b)])
    order = [4, 1, 0, 2, 3]
    rows = torch.cat([torch.arange(batch.new_tokens(b).start, batch.new_tokens(b).stop) for b in order])
    impl.assert_same(batch.take(order).run(impl.ops.score_pages), scores[rows])


def test_the_number_of_threads_changes_nothing(impl: Implementation) -> None:
    batch = sealed(impl, [5000, 3], num_heads=3, num_kv_heads=1)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(batch.run(impl.ops.score_pages))
    impl.assert_same(results[0], results[1])


def test_a_strided_query_equals_its_contiguous_copy(impl: Implementation) -> None:
    batch = sealed(impl, [40, 70])
    expected = batch.run(impl.ops.score_pages)
    fused, _, _ = testing.fused_views(batch.q, batch.k, batch.v)
    for view in [fused, *(view for _, view in testing.strided_views(batch.q))]:
        impl.assert_same(batch.run(impl.ops.score_pages, q=view), expected)


@pytest.mark.parametrize("seq_lens", [[], [20, 3]])
def test_a_batch_without_new_tokens_has_no_scores(impl: Implementation, seq_lens: list[int]) -> None:
    batch = make_batch(seq_lens, [0] * len(seq_lens))
    assert batch.run(impl.ops.score_pages).shape == (0, 2, batch.page_table.shape[1])
