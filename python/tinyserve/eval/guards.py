"""Checks that stop a run: a harness that is not sparse where it says so, or not dense where it should be,
measures something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tinyserve.eval.samples import Output

if TYPE_CHECKING:
    from tinyserve_ops import CacheStats

__all__ = ["GuardError", "check_equal", "check_logprobs", "check_sparse", "tolerance_of"]

# Natural-log probabilities that come out of the same arithmetic in another order. Wrong positions, masks or
# keys show as whole units.
_TOLERANCE = {torch.float32: 5e-3, torch.float16: 0.2, torch.bfloat16: 0.5}


class GuardError(RuntimeError):
    """The run can't be trusted, whatever its scores."""


def tolerance_of(dtype: torch.dtype) -> float:
    """How far log-probabilities of a model of this type may differ between equal methods."""
    return _TOLERANCE.get(dtype, 5e-3)


def check_sparse(
    label: str, stats: CacheStats, *, num_steps: int, num_layers: int, dense_layers: int
) -> float | None:
    """`sparse_steps / scored_tokens` per layer that selects pages: 1.0, or None where no layer does.

    Args:
        num_steps: tokens that were fed one at a time.

    Raises:
        GuardError: a token went another way.
    """
    sparse_layers = max(num_layers - dense_layers, 0)
    expected = (num_steps * sparse_layers, num_steps * (num_layers - sparse_layers))
    got = (stats.sparse_steps, stats.dense_steps)
    if got != expected:
        raise GuardError(
            f"{label}: expected {expected[0]} sparse and {expected[1]} dense attention steps for {num_steps} "
            f"tokens, got {got[0]} and {got[1]}"
        )
    return stats.sparse_steps / (num_steps * sparse_layers) if num_steps and sparse_layers else None


def check_logprobs(label: str, expected: Sequence[float], got: Sequence[float], tolerance: float) -> None:
    """Raises GuardError where log-probabilities differ by more than `tolerance`."""
    worst = max((abs(a - b) for a, b in zip(expected, got, strict=True)), default=0.0)
    if not worst <= tolerance:  # a NaN is a difference
        raise GuardError(
            f"{label}: expected the log-probabilities of dense attention within {tolerance}, got a "
            f"difference of {worst}"
        )


def check_equal(label: str, dense: Output, got: Output, *, bit_for_bit: bool, tolerance: float) -> None:
    """A budget that covers everything gives what dense attention gives.

    Args:
        bit_for_bit: both read the same pages; else log-probabilities may differ by `tolerance`, and greedy
            tokens after a near-tie.

    Raises:
        GuardError: it does not.
    """
    if bit_for_bit and (dense.token_ids, dense.logprobs) != (got.token_ids, got.logprobs):
        raise GuardError(
            f"{label}: expected the output of dense attention bit for bit (the budget covers everything), "
            f"got tokens {got.token_ids[:8]} for {dense.token_ids[:8]}, log-probabilities {got.logprobs} for "
            f"{dense.logprobs}"
        )
    for expected, found in zip(dense.logprobs, got.logprobs, strict=True):
        check_logprobs(label, expected, found, tolerance)
