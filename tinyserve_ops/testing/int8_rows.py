"""int8 pages by NumPy, from their description alone: what a test expects of codes and scales.

A row is one token and kv head: scale = amax / 127 in fp32, codes rint(value / scale); scale NaN and codes 0
where the row holds a NaN or an infinity.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def expected_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., head_dim] and scales fp32 [...] of rows [..., head_dim]."""
    rows = values.float().numpy().reshape(-1, values.shape[-1])
    codes = np.zeros(rows.shape, np.int8)
    scales = np.zeros(len(rows), np.float32)
    for index, row in enumerate(rows):
        if not np.isfinite(row).all():
            scales[index] = np.nan
            continue
        scales[index] = np.abs(row).max() / np.float32(127)
        if scales[index] > 0:
            codes[index] = np.clip(np.rint(row / scales[index]), -127, 127)
    shape = values.shape[:-1]
    return torch.from_numpy(codes).reshape(values.shape), torch.from_numpy(scales).reshape(shape)


def as_stored(values: Tensor) -> Tensor:
    """Rows as int8 pages give them back: scale * code, exact in float64."""
    codes, scales = expected_rows(values)
    return scales.double()[..., None] * codes.double()
