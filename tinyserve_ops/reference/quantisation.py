"""int8 pages: symmetric codes with one fp32 scale per token and head, value = scale * code.

The scale is the largest magnitude / 127, so a value is off by at most half a scale. A row that holds a NaN or
an infinity gets scale NaN and codes 0: whoever attends to it reads NaN, and nobody else does.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_CODE = 127


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] -> codes int8 [..., head_dim] and scales fp32 [...].

    A row of zeros, or one so small that its scale is 0 in fp32, gets scale 0 and codes 0.
    """
    values = values.float()
    amax = values.abs().amax(-1)
    scales = torch.where(amax.isfinite(), amax / _MAX_CODE, torch.nan)
    codes = (values / scales[..., None]).round().clamp(-_MAX_CODE, _MAX_CODE)  # halves to even
    return torch.where(scales[..., None] > 0, codes, 0.0).to(torch.int8), scales


def dequantise(pages: Tensor, scales: Tensor | None) -> Tensor:
    """Pages [..., head_dim] as the ops read them, in fp32; `scales` [...] is None unless they are int8."""
    return pages.float() if scales is None else scales[..., None] * pages.float()
