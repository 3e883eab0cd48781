"""Rounding and summing as page summaries define them; the compiled ops do the same in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


def round_to_nearest(values: Tensor) -> Tensor:
    """To the nearest integer, halves away from zero."""
    return values.sign() * (values.abs() + 0.5).trunc()


def round_up_to_bf16(values: Tensor) -> Tensor:
    """The smallest bf16 number that is not below `values` (fp32, finite, not negative), as fp32."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def finite(values: Tensor) -> Tensor:
    """NaN becomes 0, infinities the largest finite value of their sign."""
    return values.nan_to_num(nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


def sum_in_order(tokens: Sequence[Tensor]) -> Tensor:
    """The sum of the tokens, added one after the other."""
    # Token order is part of the definition: the compiled ops add in the same order and round the same way.
    total = torch.zeros_like(tokens[0])
    for token in tokens:
        total = total + token
    return total
