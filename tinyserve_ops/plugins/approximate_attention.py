"""Pages that are not read are estimated by their means, and no more pages are read than hold a share p.

With k_j the mean key and v_j the mean value of page j and S its tokens, an unselected page is attended to as
if it held S tokens of key k_j and value v_j: the logit sm_scale q.k_j + ln S and the value v_j. By Jensen's
inequality that logit is never above the page's true log-sum-exp, and it is exact where the keys of a page are
equal. The estimates and the attention over the selected pages are merged by their log-sum-exp.

The TinyServe paper (arXiv 2509.12211) names approximate attention without a definition; this is the one here.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyserve_ops.arguments import check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.layer_pool import LayerPool
from tinyserve_ops.plugins.base import Plugin, PluginRun, Selection, StepRows
from tinyserve_ops.policies.base import Policy, TokenRows
from tinyserve_ops.policies.log_mass import check_log_mass, is_forced, keep_listed, page_shares

__all__ = ["ApproximateAttention"]

# Policies whose scores are those of the config's scorer.
_SCORER_POLICIES = ("query_aware", "soft_prune")


@dataclass(frozen=True, kw_only=True)
class ApproximateAttention(Plugin):
    """Estimates sealed pages that are not selected, and may select fewer than the budget.

    Means of all full pages are kept in fp32 for each sequence and read in each step: 1 / page_size of the
    bytes of fp32 keys and values. They come on top of the pages that a step counts as read.

    Args:
        top_p: of the budget's pages, reads the best until their estimated shares and those of the forced
            pages add up to `top_p`; 1 reads the budget. Below 1 it needs scores that are logarithms of mass
            (scorer `low_rank`, group reduction `softmax`).
        estimate: merge estimates of what is not read; False leaves the shorter lists alone.
    """

    name: ClassVar[str] = "approximate_attention"
    top_p: float = 1.0
    estimate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("top_p", self.top_p, 0.0, 1.0)
        if not isinstance(self.estimate, bool):
            raise TypeError(f"estimate: expected a bool, got {self.estimate!r}")

    def check(self, config: SparseConfig, policy: Policy | None) -> None:
        """Shares of the mass need scores that estimate it."""
        if self.top_p < 1.0:
            check_log_mass(config, "plugin approximate_attention with top_p below 1")
            if policy is not None and policy.name not in _SCORER_POLICIES:
                raise ValueError(
                    f"policy: expected None or one of {_SCORER_POLICIES} for plugin approximate_attention "
                    f"with top_p below 1, got {policy}"
                )

    def start(self) -> PluginRun:
        """Keeps means of pages."""
        return _ApproximateRun(self)


@dataclass(frozen=True)
class _PageMeans:
    """Of the first n pages of a sequence in a layer, fp32 [num_kv_heads, n, head_dim]."""

    keys: Tensor
    values: Tensor

    @property
    def num_pages(self) -> int:
        return self.keys.size(1)


class _ApproximateRun(PluginRun):
    def __init__(self, plugin: ApproximateAttention) -> None:
        self._plugin = plugin
        self._num_rows = self._num_left_out = self._num_estimated = 0

    def pages_selected(self, step: StepRows, page_scores: Tensor, selection: Selection) -> Selection:
        selected_pages, num_selected = selection.selected_pages, selection.num_selected
        self._num_rows += len(step.lengths)
        if self._plugin.top_p < 1.0:
            stays = _top_p(step.rows, page_scores, selected_pages, self._plugin.top_p)
            before = num_selected
            selected_pages, num_selected = keep_listed(selected_pages, stays)
            self._num_left_out += int((before - num_selected).sum())
        estimates = selection.estimates
        if self._plugin.estimate:
            estimates = (*estimates, self._estimate(step, selected_pages))
        return Selection(selected_pages, num_selected, estimates)

    def _estimate(self, step: StepRows, selected_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the means of the pages that are not selected: out and lse of all rows."""
        rows = step.rows
        page_size, num_kv_heads = rows.pool.page_size, rows.pool.num_kv_heads
        outs, lses = [], []
        for row, (length, memory) in enumerate(zip(step.lengths, step.memories, strict=True)):
            num_pages = (length + 1) // page_size  # sealed once the row's own token is there
            means = _means(memory, rows.layer_idx, rows.pool, rows.page_table[row, :num_pages])
            hidden = _listed(selected_pages[row], num_pages)
            if rows.window > 0:  # a page that reaches out of the window has no mean of what is in it
                first = -(-max(0, length - rows.window + 1) // page_size)
                hidden[:, :first] = True
            queries = rows.q[row].float().unflatten(0, (num_kv_heads, -1))  # [kv heads, group, head_dim]
            logits = rows.sm_scale * queries @ means.keys[:, :num_pages].transpose(1, 2)
            logits = (logits + math.log(page_size)).masked_fill(hidden[:, None], -torch.inf)
            lse = logits.logsumexp(-1)
            shares = (logits - lse[..., None]).exp().masked_fill(hidden[:, None], 0.0)
            outs.append((shares @ means.values[:, :num_pages]).flatten(0, 1))
            lses.append(lse.flatten())
            self._num_estimated += int((~hidden).sum())
        return torch.stack(outs).to(rows.q.dtype), torch.stack(lses)

    def resume(self, memory: Any, num_pages: int) -> Any:
        if memory.num_pages <= num_pages:
            return memory
        return _PageMeans(memory.keys[:, :num_pages], memory.values[:, :num_pages])

    def report(self) -> dict[str, Any]:
        """`rows` (a token in a layer), and `pages_left_out` by top_p and `pages_estimated`, of a kv head."""
        return {
            "rows": self._num_rows,
            "pages_left_out": self._num_left_out,
            "pages_estimated": self._num_estimated,
        }


def _top_p(rows: TokenRows, page_scores: Tensor, selected_pages: Tensor, top_p: float) -> Tensor:
    """Which listed pages stay: forced ones, those without an estimate, and the best of the others as long as
    those that stay hold less than `top_p`. Ties to the lower page.
    """
    shares, has_estimate = page_shares(page_scores)
    index = selected_pages.long().clamp(min=0)
    listed = shares.gather(-1, index).masked_fill(selected_pages < 0, 0.0)
    stays = is_forced(rows, selected_pages) | ~has_estimate.gather(-1, index)
    held = listed.masked_fill(~stays, 0.0).sum(-1, keepdim=True)
    others = listed.masked_fill(stays, 0.0)
    order = others.sort(dim=-1, descending=True, stable=True).indices
    sorted_shares = others.gather(-1, order)
    held_before = held + sorted_shares.cumsum(-1) - sorted_shares
    return stays | torch.zeros_like(stays).scatter(-1, order, held_before < top_p)


def _means(memory: MutableMapping[int, Any], layer_idx: int, pool: LayerPool, page_ids: Tensor) -> _PageMeans:
    """Means of the pages `page_ids` of a sequence and possibly later ones; what is missing is computed."""
    known: _PageMeans | None = memory.get(layer_idx)
    num_known = 0 if known is None else known.num_pages
    if known is not None and num_known >= page_ids.numel():
        return known
    missing = page_ids[num_known:].long()
    keys, values = _mean(pool.k_pages, pool.k_scales, missing), _mean(pool.v_pages, pool.v_scales, missing)
    if known is not None:
        keys, values = torch.cat([known.keys, keys], dim=1), torch.cat([known.values, values], dim=1)
    memory[layer_idx] = means = _PageMeans(keys, values)
    return means


def _mean(pages: Tensor, scales: Tensor | None, page_ids: Tensor) -> Tensor:
    """fp32 [num_kv_heads, n, head_dim]."""
    tokens = pages[page_ids].float()
    if scales is not None:
        tokens = tokens * scales[page_ids][..., None]
    return tokens.mean(2).transpose(0, 1)


def _listed(selected_pages: Tensor, num_pages: int) -> Tensor:
    """bool [num_kv_heads, num_pages], of lists [num_kv_heads, width]."""
    flags = torch.zeros(selected_pages.size(0), num_pages + 2, dtype=torch.bool, device=selected_pages.device)
    # Padding falls on flag 0, an open last page on the one behind the sealed ones.
    flags.scatter_(1, selected_pages.long() + 1, True)
    return flags[:, 1:-1]
