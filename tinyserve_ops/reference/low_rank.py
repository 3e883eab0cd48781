"""The low-rank page summary: the mean key in int8, a rank-r sketch of the centred keys in int4.

With basis codes b_i, coefficient codes c_i and one scale s_i per rank, key t of the page is about
mean_scale * mean_codes + sum_i s_i c_i[t] b_i, so the logits of all its tokens can be estimated from one dot
product with the mean and one per rank.

Row: mean codes int8 [head_dim]; basis int4 [rank][P / 2], P = head_dim in whole blocks of 16; coefficients
int4 [rank][C / 2], C = page_size in whole blocks of 16; scales bf16 [1 + rank]: the mean's, then s_i; zeros
up to a multiple of 16 bytes. An int4 block is 8 bytes, byte j holds code j in its low and code j + 8 in its
high half, each as code + 8; codes lie in [-7, 7] and are 0 beyond head_dim and page_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyserve_ops.reference.arithmetic import finite, round_to_nearest, round_up_to_bf16, sum_in_order

# Two weighted power iterations keep what a full decomposition keeps; without any, retrieval suffers.
NUM_POWER_ITERATIONS = 2

_MAX_MEAN_CODE = 127
_MAX_CODE = 7
_BLOCK = 16
_ROW_ALIGNMENT = 16
# The largest key of a page is scaled to [1, 2) before anything is multiplied. Residuals shorter than this may
# be rounding noise of the mean (64 additions, 256 channels), and the int8 mean is coarser by far.
_NOISE = 2.0**-16


@dataclass(frozen=True)
class Sketch:
    """A decoded summary; all tensors fp32, codes are integers.

    mean_scale [...], mean_codes [..., head_dim], scales [..., rank], basis [..., rank, head_dim],
    coefficients [..., rank, page_size].
    """

    mean_scale: Tensor
    mean_codes: Tensor
    scales: Tensor
    basis: Tensor
    coefficients: Tensor


def fit(keys: Tensor, rank: int) -> Sketch:
    """Fits the sketch of pages of keys [..., page_size, head_dim].

    One rank after the other fits what the ones before it, as quantised, have left (the residual): the basis
    vector is the leading right singular vector of the residual, rows weighted by (distance of the key from
    the mean)^1.5 (the cube in squares), found by power iterations from the farthest row; the coefficients are
    the least-squares ones on the quantised vector. NaN keys count as 0, infinite ones as the largest finite
    value; scaling by a power of two keeps every product in range and costs no bits.
    """
    normal, exponent = _normalise(finite(keys.float()).contiguous())
    mean = sum_in_order(normal.unbind(-2)) / normal.shape[-2]
    mean_scale = round_up_to_bf16(mean.abs().amax(-1) / _MAX_MEAN_CODE)
    mean_codes = _quantise(mean, mean_scale[..., None], _MAX_MEAN_CODE)

    residual = normal - mean[..., None, :]
    distance = residual.square().sum(-1).sqrt()  # [..., page_size]
    farthest = distance.amax(-1, keepdim=True)
    share = _divide(distance, farthest)
    weight = torch.where(farthest >= _NOISE, share * share.sqrt(), 0.0)

    scales, basis, coefficients = [], [], []
    for _ in range(rank):
        scale, vector, coefficient = _fit_one(residual, weight)
        residual = residual - (scale[..., None] * coefficient)[..., None] * vector[..., None, :]
        scales.append(scale)
        basis.append(vector)
        coefficients.append(coefficient)
    return Sketch(
        mean_scale=_to_bf16(torch.ldexp(mean_scale, exponent)),
        mean_codes=mean_codes,
        scales=_to_bf16(torch.ldexp(torch.stack(scales, -1), exponent[..., None])),
        basis=torch.stack(basis, -2),
        coefficients=torch.stack(coefficients, -2),
    )


def _fit_one(residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The quantised rank-1 fit of residual [..., page_size, head_dim] with weight [..., page_size]: scale
    [...], basis codes [..., head_dim], coefficient codes [..., page_size]."""
    rows = residual * weight[..., None]
    length = rows.square().sum(-1).sqrt()
    start = length.argmax(-1)  # the first of equals
    vector = rows.take_along_dim(start[..., None, None], -2).squeeze(-2)
    vector = torch.where(length.amax(-1, keepdim=True) >= _NOISE, vector, 0.0)
    for _ in range(NUM_POWER_ITERATIONS):
        vector = _divide(vector, vector.square().sum(-1, keepdim=True).sqrt())
        along = (rows * vector[..., None, :]).sum(-1)  # [..., page_size]
        vector = (rows * along[..., None]).sum(-2)
    largest = vector.abs().amax(-1, keepdim=True)
    codes = _quantise(vector, largest / _MAX_CODE, _MAX_CODE)
    coefficient = _divide((residual * codes[..., None, :]).sum(-1), codes.square().sum(-1, keepdim=True))
    scale = round_up_to_bf16(coefficient.abs().amax(-1) / _MAX_CODE)
    return scale, codes, _quantise(coefficient, scale[..., None], _MAX_CODE)


def encode(sketch: Sketch) -> Tensor:
    """Rows uint8 [..., summary_bytes]."""
    scales = torch.cat([sketch.mean_scale[..., None], sketch.scales], -1).to(torch.bfloat16)
    parts = [
        sketch.mean_codes.to(torch.int8).view(torch.uint8),
        _pack(sketch.basis).flatten(-2),
        _pack(sketch.coefficients).flatten(-2),
        scales.view(torch.uint8),
    ]
    packed = torch.cat(parts, -1)
    return torch.nn.functional.pad(packed, (0, -packed.shape[-1] % _ROW_ALIGNMENT))


def decode(rows: Tensor, rank: int, head_dim: int, page_size: int) -> Sketch:
    """The sketch of rows uint8 [..., summary_bytes]."""
    basis_bytes = rank * (head_dim + -head_dim % _BLOCK) // 2
    coefficient_bytes = rank * (page_size + -page_size % _BLOCK) // 2
    sizes = [head_dim, basis_bytes, coefficient_bytes, 2 * (1 + rank)]
    sizes.append(rows.shape[-1] - sum(sizes))
    mean, basis, coefficients, scales, _ = (part.contiguous() for part in rows.split(sizes, -1))
    scale_values = scales.view(torch.bfloat16).float()
    return Sketch(
        mean_scale=scale_values[..., 0],
        mean_codes=mean.view(torch.int8).float(),
        scales=scale_values[..., 1:],
        basis=_unpack(basis.unflatten(-1, (rank, -1)))[..., :head_dim],
        coefficients=_unpack(coefficients.unflatten(-1, (rank, -1)))[..., :page_size],
    )


def token_logits(queries: Tensor, sketch: Sketch, sm_scale: float) -> Tensor:
    """Estimated logits [..., num_queries, page_size] of queries [..., num_queries, head_dim]."""
    # Unscaled codes first: a scale near the largest float times a code may overflow, 0 * inf is NaN.
    mean = (queries @ sketch.mean_codes[..., None]) * sketch.mean_scale[..., None, None]
    along = queries @ sketch.basis.transpose(-1, -2)  # [..., num_queries, rank]
    sketched = (along * sketch.scales[..., None, :]) @ sketch.coefficients
    return sm_scale * (mean + sketched)


def _normalise(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of each page over 2^exponent, so that the largest magnitude lies in [1, 2) (in [0, 4) at the ends
    of the range, where 2^exponent or its inverse would not be a normal number); exponent int32 [...]."""
    exponent = (keys.abs().amax((-2, -1)).frexp().exponent - 1).clamp(-126, 126)
    return torch.ldexp(keys, -exponent[..., None, None]), exponent


def _quantise(values: Tensor, scale: Tensor, max_code: int) -> Tensor:
    return round_to_nearest(_divide(values, scale)).clamp(-max_code, max_code)


def _divide(values: Tensor, divisor: Tensor) -> Tensor:
    """values / divisor, and 0 where the divisor is 0."""
    return torch.where(divisor > 0, values / divisor, 0.0)


def _to_bf16(values: Tensor) -> Tensor:
    # Exact unless the scale is subnormal: the scaling is by a power of two.
    return values.to(torch.bfloat16).float()


def _pack(codes: Tensor) -> Tensor:
    """int4 blocks uint8 [..., n / 2] of codes [..., n], n rounded up to whole blocks of code 0."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % _BLOCK))
    halves = (padded + 8).to(torch.uint8).unflatten(-1, (-1, 2, _BLOCK // 2))
    return (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)


def _unpack(blocks: Tensor) -> Tensor:
    """Codes fp32 [..., 2 n] of int4 blocks uint8 [..., n]."""
    bytes_ = blocks.unflatten(-1, (-1, _BLOCK // 2))
    return torch.stack([bytes_ & 15, bytes_ >> 4], -2).flatten(-3).float() - 8
