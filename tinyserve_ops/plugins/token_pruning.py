"""Token-level pruning: tokens that queries have passed over are dropped from inside their pages.

What a token got: the attention probability that queries gave it since it came, summed over them and over the
query heads of its kv head. What it would have got if all tokens mattered alike: the same sum of 1 / n, n the
tokens that a query saw. A token is dropped when it got less than `threshold` times that. The kv heads of a
layer keep the same number of tokens: as many as the head that needs most, each its own best.

The TinyServe paper (arXiv 2509.12211) names token-level pruning without a definition; this is the one here.
Accumulated attention as the measure is that of H2O (Zhang et al., arXiv 2306.14048); pruning by a threshold
relative to uniform attention keeps as many tokens as matter where H2O keeps a budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyserve_ops.arguments import check_int, check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.plugins.base import PageEvicted, Plugin, PluginRun
from tinyserve_ops.policies.eviction import EvictionPolicy, Observed, SequenceTokens, add_attention

__all__ = ["TokenPruning"]


@dataclass(frozen=True, kw_only=True)
class TokenPruning(Plugin):
    """Drops tokens when a prompt is complete and after every `every` tokens, where that frees a page.

    Pruning takes place between forwards. The config's dense layers keep everything. Attention to all stored
    tokens is computed beside that of each step (in plain torch), so this saves memory and no time; only a
    whole sequence can be rolled back.

    Args:
        threshold: of uniform attention; 0 drops nothing.
        every: tokens between two rounds.
        num_first: tokens at the beginning that always stay.
        num_last: latest tokens that always stay.
    """

    name: ClassVar[str] = "token_pruning"
    threshold: float = 0.1
    every: int = 64
    num_first: int = 4
    num_last: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, 0.0, 1e9)
        check_int("every", self.every, 1)
        check_int("num_first", self.num_first, 0)
        check_int("num_last", self.num_last, 1)

    def start(self) -> PluginRun:
        """Counts what is dropped."""
        return _TokenPruningRun()

    def eviction(self) -> EvictionPolicy:
        """The rule, for the machinery that evicts for policies."""
        return _PruningRule(plugin=self)


class _TokenPruningRun(PluginRun):
    def __init__(self) -> None:
        self._num_rounds = self._num_tokens = self._num_pages = 0

    def page_evicted(self, event: PageEvicted) -> None:
        self._num_rounds += len(event.layer_idx)
        self._num_tokens += event.num_tokens * len(event.layer_idx)
        self._num_pages += event.num_pages * len(event.layer_idx)

    def report(self) -> dict[str, Any]:
        """`rounds` that dropped tokens of a layer, and `tokens_dropped` of a kv head and `pages_freed`,
        summed over layers.
        """
        return {
            "rounds": self._num_rounds,
            "tokens_dropped": self._num_tokens,
            "pages_freed": self._num_pages,
        }


@dataclass(frozen=True)
class _Memory:
    """Of a sequence in a layer, fp32 [num_kv_heads, stored]: what tokens got, and what uniform attention
    would have given them; and the tokens of the sequence at the last round.
    """

    got: Tensor
    uniform: Tensor
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class _PruningRule(EvictionPolicy):
    name: ClassVar[str] = "token_pruning"
    per_step: ClassVar[bool] = True
    plugin: TokenPruning

    def layer_groups(self, num_layers: int, config: SparseConfig) -> list[list[int]]:
        """Each layer keeps a number of its own."""
        num_dense = min(config.dense_layers, num_layers)
        return [[*range(num_dense)]] * bool(num_dense) + [[layer] for layer in range(num_dense, num_layers)]

    def observe(self, memory: Any, tokens: SequenceTokens) -> Observed:
        """Adds to the sums; drops tokens when it is time."""
        shape = (tokens.pool.num_kv_heads, tokens.length)
        got = torch.zeros(shape, device=tokens.q.device)
        uniform = torch.zeros(shape, device=tokens.q.device)
        last_round = 0
        if memory is not None:
            num_known = memory.got.size(1)  # a layer that an early exit left out has not seen the latest
            got[:, :num_known], uniform[:, :num_known] = memory.got, memory.uniform
            last_round = memory.num_tokens
        add_attention(got, tokens)
        _add_uniform(uniform, tokens)
        due = not tokens.in_prompt and tokens.num_tokens - last_round >= self.plugin.every
        if not (tokens.ends_prompt or due):
            return Observed(_Memory(got, uniform, last_round))
        kept = self._kept(got, uniform)
        page_size = tokens.pool.page_size
        if -(-kept.size(1) // page_size) == -(-tokens.length // page_size):
            return Observed(_Memory(got, uniform, tokens.num_tokens))
        return Observed(_Memory(got.gather(1, kept), uniform.gather(1, kept), tokens.num_tokens), kept)

    def _kept(self, got: Tensor, uniform: Tensor) -> Tensor:
        """int64 [num_kv_heads, n], ascending."""
        length, plugin = got.size(1), self.plugin
        stays = got >= plugin.threshold * uniform
        slots = torch.arange(length, device=got.device)
        stays |= (slots < plugin.num_first) | (slots >= length - plugin.num_last)
        num_kept = int(stays.sum(1).max())
        ratios = (got / uniform.clamp(min=torch.finfo(torch.float32).tiny)).masked_fill(stays, torch.inf)
        best = ratios.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
        return best.sort(dim=1).values


def _add_uniform(uniform: Tensor, tokens: SequenceTokens) -> None:
    """Adds to [num_kv_heads, length] what the new queries would give if all tokens they see got the same."""
    group_size = tokens.q.size(1) // tokens.pool.num_kv_heads
    num_seen = torch.arange(tokens.num_stored + 1, tokens.length + 1, device=uniform.device)
    # A token is seen by its own query and all later ones.
    from_query_on = (group_size / num_seen.double()).flip(0).cumsum(0).flip(0).float()
    uniform[:, : tokens.num_stored] += from_query_on[0]
    uniform[:, tokens.num_stored :] += from_query_on
