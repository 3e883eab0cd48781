"""Bootstrap intervals against closed forms and by their coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tinyserve.eval.statistics import bootstrap, paired_bootstrap


def mean(scores: Sequence[dict[str, float]]) -> float:
    return sum(score["x"] for score in scores) / len(scores)


def as_scores(values: Sequence[float]) -> list[dict[str, float]]:
    return [{"x": float(value)} for value in values]


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=200)
    found = bootstrap(as_scores(values), mean)
    half = 1.96 * values.std() / math.sqrt(200)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_pairing_cancels_what_both_methods_find_hard() -> None:
    generator = np.random.default_rng(1)
    difficulty = generator.normal(0, 10, size=50)
    ours, theirs = difficulty + 0.5, difficulty + generator.normal(0, 0.1, size=50)
    paired = paired_bootstrap(as_scores(ours), as_scores(theirs), mean)
    assert paired.value == pytest.approx((ours - theirs).mean())
    assert 0.3 < paired.low < paired.high < 0.7
    assert paired.excludes_zero
    assert bootstrap(as_scores(ours), mean).low < bootstrap(as_scores(theirs), mean).high


def test_ninety_five_of_a_hundred_intervals_hold_the_true_mean() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(100):
        found = bootstrap(as_scores(generator.normal(1.0, 1.0, size=30)), mean)
        hits += found.low <= 1.0 <= found.high
    assert 87 <= hits <= 99


def test_a_statistic_need_not_be_a_mean() -> None:
    def perplexity(scores: Sequence[dict[str, float]]) -> float:
        return math.exp(mean(scores))

    found = bootstrap(as_scores([1.0, 2.0, 3.0]), perplexity)
    assert found.value == pytest.approx(math.exp(2.0))
    assert math.exp(1.0) <= found.low < found.value < found.high <= math.exp(3.0)


def test_equal_scores_have_no_difference_and_one_sample_has_no_spread() -> None:
    scores = as_scores([0.0, 1.0, 1.0])
    same = paired_bootstrap(scores, scores, mean)
    assert (same.value, same.low, same.high, same.excludes_zero) == (0.0, 0.0, 0.0, False)
    alone = bootstrap(as_scores([4.0]), mean)
    assert (alone.value, alone.low, alone.high) == (4.0, 4.0, 4.0)


def test_unequal_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the scores of the same 2 samples, got 1"):
        paired_bootstrap(as_scores([1, 2]), as_scores([1]), mean)
