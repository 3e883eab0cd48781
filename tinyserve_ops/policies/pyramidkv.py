"""SnapKV with more tokens in the first layers than in the last (Cai et al., PyramidKV, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinyserve_ops.arguments import check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.snapkv import SnapKV

__all__ = ["PyramidKV"]


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Budgets fall linearly from layer to layer and are the token budget on average, so the total is that of
    SnapKV. Each layer has page tables of its own. Layers below `dense_layers` are no part of the pyramid.

    With b the budget, the last layer keeps b / beta and the first 2 b - b / beta. A first layer that would
    keep more than lies before the window gives the surplus to the others. Where the last layer could not keep
    the window, all layers keep b (the rule of kvpress, which a test compares).

    Args:
        beta: how steep the pyramid is, at least 1 (no slope).
    """

    name: ClassVar[str] = "pyramidkv"
    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, 1.0, 1e9)

    def layer_groups(self, num_layers: int, config: SparseConfig) -> list[list[int]]:
        """Every layer by itself, but the dense ones."""
        dense, *rest = super().layer_groups(num_layers, config)
        if not config.dense_layers:
            dense, rest = [], [dense]
        groups = [[layer] for group in rest for layer in group]
        return [dense, *groups] if dense else groups

    def budget(self, config: SparseConfig, layer_idx: int, num_layers: int, num_tokens: int) -> int:
        """Tokens that a layer keeps of a prompt of `num_tokens`."""
        mean = super().budget(config, layer_idx, num_layers, num_tokens)
        last = mean / self.beta
        first = 2 * mean - last
        if first >= num_tokens - self.window:
            first = num_tokens - self.window
            last = 2 * mean - first
        if not num_tokens >= first >= last >= self.window:
            return mean
        num_steps = num_layers - config.dense_layers - 1
        step = (first - last) / num_steps if num_steps else 0.0
        return round(first - (layer_idx - config.dense_layers) * step)
