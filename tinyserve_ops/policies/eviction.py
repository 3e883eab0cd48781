"""What an eviction policy is, and what the executor shows it.

It decides which stored tokens stay: once, when the prompt of a sequence is complete, or after every forward.
The kv heads of a layer keep the same number of tokens, each its own; steps then read all that is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyserve_ops.arguments import check_int
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.layer_pool import LayerPool
from tinyserve_ops.policies.base import Policy

__all__ = ["EvictionPolicy", "Observed", "SequenceTokens", "add_attention", "keep_best"]

# Queries whose attention to all keys is held at once.
_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class SequenceTokens:
    """The new tokens of one sequence in one layer, already appended and attended.

    Attributes:
        q: their queries, [num_new, num_heads, head_dim].
        num_stored: tokens stored before them.
        num_tokens: tokens of the sequence with them, evicted ones included.
        budget_of: tokens that the layer may keep of so many tokens of a sequence.
        in_prompt, ends_prompt: they belong to the prompt; they are its last.
        page_ids: int32, pages of stored and new tokens.
        pool: where they lie.
        sm_scale: of the attention call.
    """

    q: Tensor
    num_stored: int
    num_tokens: int
    budget_of: Callable[[int], int]
    in_prompt: bool
    ends_prompt: bool
    page_ids: Tensor
    pool: LayerPool
    sm_scale: float

    @property
    def num_new(self) -> int:
        """New tokens."""
        return self.q.size(0)

    @property
    def length(self) -> int:
        """Stored tokens, the new ones included."""
        return self.num_stored + self.num_new

    @property
    def budget(self) -> int:
        """Tokens that the layer may keep after the last of them."""
        return self.budget_of(self.num_tokens)

    def keys(self) -> Tensor:
        """Keys of all of them as attention reads them, fp32 [num_kv_heads, length, head_dim]."""
        return self._gather(self.pool.k_pages, self.pool.k_scales)

    def values(self) -> Tensor:
        """Values, likewise."""
        return self._gather(self.pool.v_pages, self.pool.v_scales)

    def grouped_queries(self, num_last: int | None = None) -> Tensor:
        """Queries of the last `num_last` new tokens, default all: fp32 [num_kv_heads, group_size, tokens,
        head_dim].
        """
        q = self.q if num_last is None else self.q[-num_last:]
        return q.float().unflatten(1, (self.pool.num_kv_heads, -1)).permute(1, 2, 0, 3)

    def _gather(self, pages: Tensor, scales: Tensor | None) -> Tensor:
        ids = self.page_ids.long()
        tokens = pages[ids].float()
        if scales is not None:
            tokens = tokens * scales[ids][..., None]
        return tokens.transpose(0, 1).flatten(1, 2)[:, : self.length]


@dataclass(frozen=True)
class Observed:
    """What a policy answers.

    Attributes:
        memory: handed back with the next tokens of this sequence and layer; None for nothing. Never changed
            in place: forks share it.
        kept: stored tokens that stay after this forward, int64 [num_kv_heads, n], ascending indices below
            `length`, n the same in all layers of a layer group; None for all.
        out: [num_new, num_heads, head_dim] in place of the attention over everything, where tokens are
            evicted between the new ones.
    """

    memory: Any = None
    kept: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class EvictionPolicy(Policy):
    """Keeps some of the stored tokens. Layers below the config's `dense_layers` keep all.

    Args:
        token_budget: tokens that a layer keeps; None takes the config's token budget, or its keep ratio of
            the tokens so far, rounded up.

    Attributes:
        per_step: it rules after every forward, not only when the prompt is complete.
    """

    reads_all: ClassVar[bool] = True
    per_step: ClassVar[bool] = False
    token_budget: int | None = None

    def __post_init__(self) -> None:
        if self.token_budget is not None:
            check_int("token_budget", self.token_budget, 1)

    def budget(self, config: SparseConfig, layer_idx: int, num_layers: int, num_tokens: int) -> int:
        """Tokens that a layer keeps of a sequence that was given `num_tokens`."""
        if self.token_budget is not None:
            return self.token_budget
        if config.ratio is not None:
            return math.ceil(config.ratio * num_tokens)
        assert config.token_budget is not None
        return config.token_budget

    def layer_groups(self, num_layers: int, config: SparseConfig) -> list[list[int]]:
        """Layers that keep the same number of tokens: the dense ones, and the others."""
        num_dense = min(config.dense_layers, num_layers)
        groups = [list(range(num_dense)), list(range(num_dense, num_layers))]
        return [group for group in groups if group]

    def observe(self, memory: Any, tokens: SequenceTokens) -> Observed:
        """Sees new tokens, and says what stays.

        Args:
            memory: of the last answer for this sequence and layer, None at its beginning.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method observe, got none")


def keep_best(scores: Tensor, num_best: int, length: int) -> Tensor:
    """Indices of the best tokens that have a score, and of all tokens behind them; ties to the earlier token.

    Args:
        scores: [num_kv_heads, m], of the first m tokens.
        num_best: how many of them stay.
        length: tokens in all.

    Returns:
        int64 [num_kv_heads, num_best + length - m], ascending.
    """
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_best].sort(dim=1).values
    last = torch.arange(scores.size(1), length, device=scores.device).expand(scores.size(0), -1)
    return torch.cat([best, last], dim=1)


def add_attention(scores: Tensor, tokens: SequenceTokens) -> None:
    """Adds to `scores` fp32 [num_kv_heads, length] the attention probabilities of the new queries over all
    tokens up to theirs, summed over queries and the query heads of a kv head; block by block.
    """
    keys, queries = tokens.keys(), tokens.grouped_queries()
    slots = torch.arange(tokens.length, device=scores.device)
    for start in range(0, tokens.num_new, _BLOCK):
        stop = min(start + _BLOCK, tokens.num_new)
        end = tokens.num_stored + stop  # keys behind the block's last query are seen by none of it
        hidden = slots[:end] > slots[tokens.num_stored + start : end, None]
        for head in range(scores.size(0)):
            logits = tokens.sm_scale * queries[head, :, start:stop] @ keys[head, :end].T
            scores[head, :end] += logits.masked_fill_(hidden, -torch.inf).softmax(-1).sum((0, 1))
