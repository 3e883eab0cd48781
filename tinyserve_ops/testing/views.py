"""Views of tensors as models hand them over: the same values behind other strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def fused_views(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [num_tokens, heads, head_dim] as slices of one fused projection."""
    fused = torch.cat([q, k, v], 1).flatten(1)
    widths = [like.shape[1] * like.shape[2] for like in (q, k, v)]
    parts = fused.split(widths, 1)
    views = [part.unflatten(1, (like.shape[1], -1)) for part, like in zip(parts, (q, k, v), strict=True)]
    return views[0], views[1], views[2]


def strided_views(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields names and non-contiguous views with the values of `tensor` [num_tokens, heads, head_dim]."""
    yield "heads first", tensor.transpose(0, 1).contiguous().transpose(0, 1)
    yield "channels first", tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    padded = tensor.new_full((tensor.shape[0] + 1, tensor.shape[1] + 2, tensor.shape[2] + 3), torch.nan)
    padded[1:, 1:-1, 1:-2] = tensor
    yield "inside a larger tensor", padded[1:, 1:-1, 1:-2]
    every_other = tensor.new_full((2 * tensor.shape[0], *tensor.shape[1:]), torch.nan)
    every_other[::2] = tensor
    yield "every other token", every_other[::2]
