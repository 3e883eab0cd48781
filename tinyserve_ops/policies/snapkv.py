"""Tokens chosen once, by the attention of the prompt's end (Li et al., SnapKV, arXiv 2404.14469).

The last queries of the prompt are taken as a sample of what the answer will look for. Their attention to each
earlier token, averaged over them, smoothed over neighbours and averaged over the query heads of a kv head, is
the token's score; kvpress computes the same, which a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from tinyserve_ops.arguments import check_choice, check_int
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.eviction import EvictionPolicy, Observed, SequenceTokens, keep_best

__all__ = ["SnapKV"]


@dataclass(frozen=True, kw_only=True)
class SnapKV(EvictionPolicy):
    """Keeps the observation window and, of the prompt before it, the tokens of the best scores.

    What follows the prompt is kept and comes on top of the budget.

    Args:
        window: observation window, tokens at the prompt's end; it counts in the budget, which never falls
            below it.
        kernel_size: neighbours that the scores are pooled over, the token among them (the "cluster size" of
            the TinyServe paper). An even number reaches one token further back than ahead.
        pooling: "avg" or "max".
    """

    name: ClassVar[str] = "snapkv"
    window: int = 32
    kernel_size: int = 5
    pooling: str = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("window", self.window, 1)
        check_int("kernel_size", self.kernel_size, 1)
        check_choice("pooling", self.pooling, ("avg", "max"))
        if self.token_budget is not None:
            self._check_budget("token_budget", self.token_budget)

    def check(self, config: SparseConfig) -> None:
        """A token budget must hold the observation window."""
        if self.token_budget is None and config.ratio is None:
            assert config.token_budget is not None
            self._check_budget("token_budget of the config", config.token_budget)

    def _check_budget(self, name: str, budget: int) -> None:
        if budget < self.window:
            raise ValueError(f"{name}: expected at least the window of {self.window} tokens, got {budget}")

    def observe(self, memory: Any, tokens: SequenceTokens) -> Observed:
        """Remembers the last queries of the prompt; chooses when it is complete.

        Raises:
            ValueError: the policy has not seen the observation window (the prompt began in another cache).
        """
        queries = tokens.grouped_queries(self.window)
        if memory is not None:
            queries = torch.cat([memory, queries], dim=2)
        queries = queries[:, :, -self.window :]
        if not tokens.ends_prompt:
            return Observed(queries.clone())
        length = tokens.length
        budget = max(tokens.budget, self.window)
        if length <= budget:
            return Observed()
        if queries.size(2) < self.window:
            raise ValueError(
                f"window: expected the last {self.window} tokens of the prompt under this policy, "
                f"got {queries.size(2)}"
            )
        scores = self._scores(queries, tokens.keys(), tokens.sm_scale)
        return Observed(kept=keep_best(scores, budget - self.window, length))

    def _scores(self, queries: Tensor, keys: Tensor, sm_scale: float) -> Tensor:
        """[num_kv_heads, length - window], of the tokens before the window.

        Args:
            queries: [num_kv_heads, group_size, window, head_dim].
            keys: [num_kv_heads, length, head_dim].
        """
        length, window = keys.size(1), queries.size(2)
        positions = torch.arange(length, device=keys.device)
        hidden = positions > positions[-window:, None]
        scores = []
        for head_queries, head_keys in zip(
            queries, keys, strict=True
        ):  # [group_size, window, length] at once
            logits = (sm_scale * head_queries @ head_keys.T).masked_fill(hidden, -torch.inf)
            scores.append(self._pool(logits.softmax(-1)[..., : length - window].mean(1)).mean(0))
        return torch.stack(scores)

    def _pool(self, scores: Tensor) -> Tensor:
        """Smooths [group_size, n] over `kernel_size` neighbours; beyond the ends lie zeros."""
        before = self.kernel_size // 2
        padded = functional.pad(scores[:, None], (before, self.kernel_size - 1 - before))
        pool = functional.avg_pool1d if self.pooling == "avg" else functional.max_pool1d
        return pool(padded, self.kernel_size, stride=1)[:, 0]
