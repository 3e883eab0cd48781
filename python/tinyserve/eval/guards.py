"""Checks that stop a run: a harness that is not sparse where it says so, or not dense where it should be,
measures something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tinyserve.eval.methods import Method
from tinyserve.eval.samples import Output
from tinyserve_ops.policies import EvictionPolicy

if TYPE_CHECKING:
    from tinyserve_ops import PagedKVCache

__all__ = ["GuardError", "check_equal", "check_logprobs", "check_steps", "tolerance_of"]

# Natural-log probabilities that come out of the same arithmetic in another order. Wrong positions, masks or
# keys show as whole units.
_TOLERANCE = {torch.float32: 5e-3, torch.float16: 0.2, torch.bfloat16: 0.5}


class GuardError(RuntimeError):
    """The run can't be trusted, whatever its scores."""


def tolerance_of(dtype: torch.dtype) -> float:
    """How far log-probabilities of a model of this type may differ between equal methods."""
    return _TOLERANCE.get(dtype, 5e-3)


def check_steps(method: Method, kv: PagedKVCache, *, num_steps: int, num_prompt: int) -> float | None:
    """`sparse_steps / scored_tokens` per layer that selects pages: 1.0, or None where no layer does.

    Args:
        kv: the method's cache, whose counters are all of this sample.
        num_steps: tokens that were fed one at a time.
        num_prompt: tokens before them.

    Raises:
        GuardError: a token went another way, or nothing was evicted of a prompt beyond the budget.
    """
    stats = kv.stats()
    sparse_layers = max(kv.num_layers - kv.plan.dense_layers, 0)
    expected = (num_steps * sparse_layers, num_steps * (kv.num_layers - sparse_layers))
    got = (stats.sparse_steps, stats.dense_steps)
    if method.reads_logits(kv.num_layers):  # layers behind an exit take no step
        is_right = got[0] <= expected[0] and got[1] <= expected[1]
    else:
        is_right = got == expected
    if not is_right:
        raise GuardError(
            f"{method.label}: expected {expected[0]} sparse and {expected[1]} dense attention steps for "
            f"{num_steps} tokens, got {got[0]} and {got[1]}"
        )
    if isinstance(method.policy, EvictionPolicy) and kv.num_layers > method.config.dense_layers:
        beyond = num_prompt - method.budget_tokens(num_prompt)
        if (
            beyond > kv.num_layers and not stats.tokens_evicted
        ):  # budgets of single layers may differ a little
            raise GuardError(
                f"{method.label}: expected evictions from a prompt of {num_prompt} tokens, got none"
            )
    if not (num_steps and sparse_layers):
        return None
    return 1.0 if method.reads_logits(kv.num_layers) else stats.sparse_steps / expected[0]


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
