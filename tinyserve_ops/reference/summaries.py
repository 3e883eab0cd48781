"""Page summaries: statistics over the keys of a page, and their byte layout (low-rank: `low_rank`).

int8 rows: four fp32 scales (one per vector, unused ones 0), then the codes vector by vector; scale * code
restores a channel. Max codes are rounded up and min codes down, so that in fp32 scale * code stays a bound;
the other vectors are rounded to nearest, halves away from zero. Full-precision rows hold the vectors in the
element type of the pages. Rows are padded with zero bytes. Keys that are not finite: max and min leave NaN
out; an infinite statistic becomes the largest finite value and an undefined one 0, so no summary holds
either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyserve_ops.reference import low_rank
from tinyserve_ops.reference.arithmetic import finite, round_to_nearest, sum_in_order
from tinyserve_ops.scorers import SummaryVector, find_op_scorer, summary_bytes

_MAX_CODE = 127
_NUM_HEADER_SCALES = 4
_HEADER_BYTES = 4 * _NUM_HEADER_SCALES


def summarise(keys: Tensor, scorer: str) -> Tensor:
    """Encodes pages of keys [..., page_size, head_dim] as rows uint8 [..., summary_bytes]."""
    found, full_dtype = find_op_scorer(scorer)
    if found.encoding == "low_rank":
        return low_rank.encode(low_rank.fit(keys, found.rank))
    page_size, head_dim = keys.shape[-2:]
    vectors = [statistic(keys, vector) for vector in found.vectors]
    if full_dtype is not None:
        limit = torch.finfo(full_dtype).max
        parts = [
            vector.clamp(-limit, limit).to(full_dtype).contiguous().view(torch.uint8) for vector in vectors
        ]
    else:
        header = torch.zeros(*keys.shape[:-2], _NUM_HEADER_SCALES)
        codes = []
        for index, (values, vector) in enumerate(zip(vectors, found.vectors, strict=True)):
            scale = quantisation_scale(values)
            header[..., index] = scale
            codes.append(quantise(values, scale[..., None], vector))
        parts = [header.view(torch.uint8), *(code.to(torch.int8).view(torch.uint8) for code in codes)]
    packed = torch.cat(parts, -1)
    padding = summary_bytes(scorer, head_dim, page_size) - packed.shape[-1]
    return torch.nn.functional.pad(packed, (0, padding))


def restore(rows: Tensor, scorer: str, head_dim: int) -> tuple[Tensor, Tensor]:
    """Decodes rows uint8 [..., summary_bytes] of a linear scorer: scales [..., v] and unscaled vectors
    [..., v, head_dim]."""
    found, full_dtype = find_op_scorer(scorer)
    num_vectors = len(found.vectors)
    if full_dtype is not None:
        num_bytes = num_vectors * head_dim * full_dtype.itemsize
        values = rows[..., :num_bytes].contiguous().view(full_dtype).float()
        scales = torch.ones(*rows.shape[:-1], num_vectors)
    else:
        scales = rows[..., :_HEADER_BYTES].contiguous().view(torch.float32)[..., :num_vectors]
        codes = rows[..., _HEADER_BYTES : _HEADER_BYTES + num_vectors * head_dim]
        values = codes.contiguous().view(torch.int8).float()
    return scales, values.unflatten(-1, (num_vectors, head_dim))


def statistic(keys: Tensor, vector: SummaryVector) -> Tensor:
    """One statistic per channel over the tokens: [..., page_size, head_dim] -> fp32 [..., head_dim]."""
    tokens = keys.float().unbind(-2)
    if vector.statistic == "max":
        return finite(_largest_ignoring_nan(tokens))
    if vector.statistic == "min":
        return finite(-_largest_ignoring_nan([-token for token in tokens]))
    mean = sum_in_order(tokens) / len(tokens)
    if vector.statistic == "mean":
        return finite(mean)
    return finite((sum_in_order([(token - mean) ** 2 for token in tokens]) / len(tokens)).sqrt())


def quantisation_scale(values: Tensor) -> Tensor:
    """[..., head_dim] -> [...]: amax / 127, one float up where 127 * scale would round below amax."""
    amax = values.abs().amax(-1)
    scale = amax / _MAX_CODE
    above = torch.nextafter(scale, torch.full((), torch.inf))
    return torch.where(_MAX_CODE * scale >= amax, scale, above)


def quantise(values: Tensor, scale: Tensor, vector: SummaryVector) -> Tensor:
    """Integer codes in [-127, 127] of `values`; a zero vector (scale 0) gets zeros."""
    if vector.statistic == "max":
        codes = _smallest_code_at_least(values, scale)
    elif vector.statistic == "min":
        codes = -_smallest_code_at_least(-values, scale)
    else:
        codes = round_to_nearest(values / scale)
    return torch.where(scale > 0, codes, 0.0).clamp(-_MAX_CODE, _MAX_CODE)


def _smallest_code_at_least(values: Tensor, scale: Tensor) -> Tensor:
    codes = (values / scale).ceil()
    codes = torch.where(scale * (codes - 1) >= values, codes - 1, codes)
    return torch.where(scale * codes >= values, codes, codes + 1)


def _largest_ignoring_nan(tokens: Sequence[Tensor]) -> Tensor:
    largest = tokens[0]
    for token in tokens[1:]:
        largest = torch.fmax(largest, token)
    return largest
