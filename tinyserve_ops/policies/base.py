"""What a policy is, and what the executor shows it.

A policy answers one of two questions: which pages a new token reads (`SelectionPolicy`), or which stored
tokens stay (an eviction policy). Everything else is shared: pages, ops, forwards, counters. A policy is a
frozen value without state; budgets, forced pages and dense layers come from the cache's `SparseConfig`, so
that a comparison of policies at one config is one at equal budget.

The prompt of a sequence (its first forward, or as many as `PagedKVCache.begin` is told belong to it) is
attended to in full under every policy; a policy rules over the tokens after it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyserve_ops import ops
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.layer_pool import LayerPool

__all__ = ["Policy", "SelectionPolicy", "TokenRows"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies: a frozen dataclass of JSON values with a name.

    Attributes:
        name: key in the registry.
        reads_all: every step reads every token that is stored.
        reservable: reserved (compiled) decoding computes the same without asking the policy.
    """

    name: ClassVar[str] = ""
    reads_all: ClassVar[bool] = False
    reservable: ClassVar[bool] = False

    def check(self, config: SparseConfig) -> None:
        """Raises ValueError, by name, where the config of a cache does not go with this policy."""

    def plugins(self) -> tuple[dict[str, Any], ...]:
        """Plugins that belong to this policy, as `plugins.from_dict` takes them."""
        return ()

    def check_reservable(self) -> None:
        """Raises ValueError where reserved decoding can't honour this policy."""
        if not self.reservable:
            raise ValueError(
                f"policy: expected None, full_cache or query_aware with reserved decoding, got {self}"
            )

    def to_dict(self) -> dict[str, Any]:
        """`name` and the fields; accepted by `policies.from_dict`."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict())


@dataclass(frozen=True)
class TokenRows:
    """New tokens of one layer, each a row of its own, already appended to their pages.

    A forward of several tokens shows each of them as the step that it would be alone: its position is its
    entry of `seq_lens`, and nothing behind it counts as stored.

    Attributes:
        layer_idx: layer of the model.
        q: [rows, num_heads, head_dim].
        cu_query_lens: int32 [rows + 1], 0, 1, 2, ...
        seq_lens: int32 [rows], stored tokens before each row's own.
        page_table: int32 [rows, max_pages].
        page_budget, max_page_budget: int32 [rows] pages that a row may read by the config, and the largest.
        pool: keys, values and summaries of the layer.
        config: of the cache.
        sm_scale, window: of the attention call.
    """

    layer_idx: int
    q: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    page_budget: Tensor
    max_page_budget: int
    pool: LayerPool
    config: SparseConfig
    sm_scale: float
    window: int

    def score_pages(self) -> Tensor:
        """Page scores of the cache's scorer, fp32 [rows, num_kv_heads, max_pages]."""
        return ops.score_pages(
            self.q,
            self.cu_query_lens,
            self.seq_lens,
            self.page_table,
            self.pool.page_summary,
            self.pool.page_size,
            self.pool.scorer,
            self.config.op_group_reduction,
            self.sm_scale,
            self.window,
        )

    def select_pages(self, page_scores: Tensor, page_budget: int | None = None) -> tuple[Tensor, Tensor]:
        """The forced pages and the best of the others, as `ops.select_pages`.

        Args:
            page_scores: fp32 [rows, num_kv_heads, max_pages].
            page_budget: pages of every row in place of the config's.

        Returns:
            selected_pages int32 [rows, num_kv_heads, budget] and num_selected int32 [rows, num_kv_heads].
        """
        budgets, max_page_budget = self.page_budget, self.max_page_budget
        if page_budget is not None:
            budgets, max_page_budget = torch.full_like(budgets, page_budget), page_budget
        return ops.select_pages(
            page_scores,
            self.cu_query_lens,
            self.seq_lens,
            budgets,
            max_page_budget,
            self.pool.page_size,
            self.config.num_sink_pages,
            self.config.num_recent_pages,
            self.window,
        )


@dataclass(frozen=True, kw_only=True)
class SelectionPolicy(Policy):
    """Chooses the pages that a new token reads, for each kv head its own.

    Attributes:
        per_token: the rule holds for every token after the prompt, however many a forward brings; else only
            steps of one token are sparse.
        fused: `score` and `select` are those of `ops.sparse_decode`, so the executor may call that op.
        scans_summaries: `score` reads a page summary of each visible page (for the counters).
    """

    per_token: ClassVar[bool] = True
    fused: ClassVar[bool] = False
    scans_summaries: ClassVar[bool] = True

    def score(self, rows: TokenRows) -> Tensor:
        """How much each page matters to each row: fp32 [rows, num_kv_heads, max_pages]."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method score, got none")

    def select(self, rows: TokenRows, page_scores: Tensor) -> tuple[Tensor, Tensor]:
        """The pages to read: `selected_pages` int32 [rows, num_kv_heads, width], logical pages ascending, -1
        padded, and `num_selected` int32 [rows, num_kv_heads]. Default: the best of the budget.
        """
        return rows.select_pages(page_scores)
