"""Intervals by bootstrap: samples are drawn again with replacement, and the spread of the summary is what it
says about other samples of the same kind.

Paired where two methods are compared: both are drawn with the same samples, so that a hard sample counts on
both sides. The generator is seeded; the same records give the same intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "bootstrap", "paired_bootstrap"]

Scores = dict[str, float]
Statistic = Callable[[Sequence[Scores]], float]

_NUM_DRAWS = 2000
_SEED = 42


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is more than the samples' noise."""
        return self.low > 0 or self.high < 0


def bootstrap(scores: Sequence[Scores], statistic: Statistic) -> Interval:
    """The statistic of the samples' scores, with its interval.

    Args:
        scores: of each sample, at least one.
        statistic: of any choice of them, for example a mean or a perplexity.
    """
    draws = [statistic([scores[i] for i in indices]) for indices in _draws(len(scores))]
    return _interval(statistic(scores), draws)


def paired_bootstrap(ours: Sequence[Scores], theirs: Sequence[Scores], statistic: Statistic) -> Interval:
    """statistic(ours) - statistic(theirs) over the same samples, in the same order, with its interval.

    Raises:
        ValueError: another number of samples on the two sides.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"theirs: expected the scores of the same {len(ours)} samples, got {len(theirs)}")
    draws = []
    for indices in _draws(len(ours)):
        draws.append(statistic([ours[i] for i in indices]) - statistic([theirs[i] for i in indices]))
    return _interval(statistic(ours) - statistic(theirs), draws)


def _draws(num_samples: int) -> np.ndarray:
    """[draws, samples] indices."""
    generator = np.random.default_rng(_SEED)
    return generator.integers(num_samples, size=(_NUM_DRAWS, num_samples))


def _interval(value: float, draws: Sequence[float]) -> Interval:
    low, high = np.quantile(np.asarray(draws, dtype=np.float64), [0.025, 0.975])
    return Interval(value, float(low), float(high))
