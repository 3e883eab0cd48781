"""SnapKV with more tokens in the first layers than in the last (Cai et al., PyramidKV, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinyserve_ops.arguments import check_choice, check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.snapkv import SnapKV

__all__ = ["PyramidKV"]


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Budgets fall linearly from layer to layer and are the token budget on average, so the total is that of
    SnapKV. Each layer has page tables of its own. Layers below `dense_layers` are no part of the pyramid.

    With e the budget less the window, the first layer keeps 2 e - e / beta tokens beside the window and the
    last e / beta. A first layer that would keep more than there is gives the surplus to the others.

    Args:
        beta: how steep the pyramid is, at least 1 (no slope).
        rule: "paper" is that of the paper's code, as above. "kvpress" lets the pyramid run over all tokens
            that are kept, the window among them, and has none where its last layer would keep less than the
            window (budgets below beta windows).
    """

    name: ClassVar[str] = "pyramidkv"
    beta: float = 20.0
    rule: str = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, 1.0, 1e9)
        check_choice("rule", self.rule, ("paper", "kvpress"))

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
        beside = self.window if self.rule == "paper" else 0  # kept in every layer, beside the pyramid
        available = num_tokens - self.window
        share = max(mean, self.window) - beside
        last = share / self.beta
        first = 2 * share - last
        if first >= available:
            first = available
            last = 2 * share - first
        if self.rule == "kvpress" and not num_tokens >= first >= last >= self.window:
            return mean
        num_steps = num_layers - config.dense_layers - 1
        step = (first - last) / num_steps if num_steps else 0.0
        return beside + round(first - (layer_idx - config.dense_layers) * step)
