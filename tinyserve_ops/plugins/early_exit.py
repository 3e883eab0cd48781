"""Entropy-based early exit: a token that the model is sure of leaves it before the last layer.

After chosen layers the hidden state is read as the last one would be, through final norm and head (the "logit
lens"). If the entropy of that distribution, in nats, lies below a threshold, the token leaves: the hidden
state it has is the one the model answers from. Each layer that is left out still stores what it would make of
that hidden state (norm, key and value projection, position), so later tokens find keys and values everywhere.

The TinyServe paper (arXiv 2509.12211) names entropy-based early exit without a definition; this is the one
here. Storing the state of the exit layer in the layers behind it is what Elbayad et al., Depth-Adaptive
Transformer (arXiv 1910.10073), do; entropy as the criterion is that of BranchyNet (arXiv 1709.01686).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyserve_ops.arguments import check_int, check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.plugins.base import LayerLogits, Plugin, PluginRun
from tinyserve_ops.policies.base import Policy
from tinyserve_ops.policies.eviction import EvictionPolicy

__all__ = ["EarlyExit"]


@dataclass(frozen=True, kw_only=True)
class EarlyExit(Plugin):
    """Lets tokens after the prompt leave where the entropy is below `threshold`.

    A look at the logits costs a pass through the model's head, in models with large vocabularies as much as
    several layers: `every` and `min_layers` say where it is worth it. Layers are left out in a forward whose
    tokens have all left; where others of the batch go on, the token's state is kept and the rest dropped.

    Args:
        threshold: in nats. 0 lets nothing leave.
        min_layers: layers that every token goes through; None for half of them, rounded up.
        every: looks at every so many layers from there on.
    """

    name: ClassVar[str] = "early_exit"
    threshold: float = 0.5
    min_layers: int | None = None
    every: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, 0.0, 1e9)
        if self.min_layers is not None:
            check_int("min_layers", self.min_layers, 1)
        check_int("every", self.every, 1)

    def check(self, config: SparseConfig, policy: Policy | None) -> None:
        """A policy that must see every query would miss those of the layers left out."""
        if isinstance(policy, EvictionPolicy) and policy.per_step:
            raise ValueError(
                f"policy: expected one that need not see every query with plugin early_exit, got {policy}"
            )

    def start(self) -> PluginRun:
        """Counts exits."""
        return _EarlyExitRun(self)


class _EarlyExitRun(PluginRun):
    def __init__(self, plugin: EarlyExit) -> None:
        self._plugin = plugin
        self._num_looks = self._num_frozen = self._num_skipped = 0
        self._exits: Counter[int] = Counter()

    def logit_layers(self, num_layers: int) -> frozenset[int]:
        first = self._plugin.min_layers
        if first is None:
            first = -(-num_layers // 2)
        return frozenset(range(first - 1, num_layers, self._plugin.every))

    def logits_ready(self, event: LayerLogits) -> Tensor | None:
        self._num_looks += event.logits.size(0)
        leaving = _entropy(event.logits) < self._plugin.threshold
        num_leaving = int(leaving.sum())
        if not num_leaving:
            return None
        self._exits[event.layer_idx] += num_leaving
        return leaving

    def tokens_left(self, num_frozen: int, num_skipped: int) -> None:
        self._num_frozen += num_frozen
        self._num_skipped += num_skipped

    def report(self) -> dict[str, Any]:
        """`exits` (tokens), `exits_by_layer` (behind which), `looks` (tokens whose logits were asked for),
        `layers_skipped` (summed over tokens) and `layers_dropped` (computed although the token had left).
        """
        return {
            "exits": self._exits.total(),
            "exits_by_layer": {str(layer_idx): self._exits[layer_idx] for layer_idx in sorted(self._exits)},
            "looks": self._num_looks,
            "layers_skipped": self._num_skipped,
            "layers_dropped": self._num_frozen,
        }


def _entropy(logits: Tensor) -> Tensor:
    """[n] in nats, of logits [n, vocabulary]; NaN where a logit is NaN, which is below no threshold."""
    log_shares = logits.float().log_softmax(-1)
    # 0 * -inf is NaN: a token that is ruled out adds nothing.
    return -torch.where(log_shares == -torch.inf, 0.0, log_shares.exp() * log_shares).sum(-1)
