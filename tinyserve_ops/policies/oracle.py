"""Pages chosen by the attention they truly get: what no estimate can beat at the same budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tinyserve_ops import ops
from tinyserve_ops.policies.base import SelectionPolicy, TokenRows

__all__ = ["Oracle"]


@dataclass(frozen=True, kw_only=True)
class Oracle(SelectionPolicy):
    """Scores a page by its share of the softmax mass, summed over the query heads of a kv head.

    It reads all keys to find out, which the counters of pages read leave out: a ceiling for the quality of a
    choice, not a method. Forced pages are those of the config, as for every other policy.
    """

    name: ClassVar[str] = "oracle"
    scans_summaries: ClassVar[bool] = False

    def score(self, rows: TokenRows) -> Tensor:
        """True mass of each page, 0 to the number of query heads of a kv head; -inf where it is not seen."""
        pool = rows.pool
        _, lse, page_lse = ops.attend_pages(
            rows.q,
            rows.cu_query_lens,
            rows.seq_lens,
            rows.page_table,
            pool.k_pages,
            pool.v_pages,
            pool.k_scales,
            pool.v_scales,
            None,
            None,
            rows.sm_scale,
            rows.window,
            return_page_lse=True,
        )
        mass = (page_lse - lse[..., None]).exp().unflatten(1, (pool.num_kv_heads, -1)).sum(2)
        if rows.window < 0:
            return mass
        # Entry i of a row is its i-th visible page.
        first_pages = (rows.seq_lens.long() - rows.window + 1).clamp(min=0) // pool.page_size
        pages = torch.arange(mass.size(2), device=mass.device) - first_pages[:, None]
        index = pages.clamp(min=0)[:, None].expand_as(mass)
        return mass.gather(2, index).masked_fill((pages < 0)[:, None], -torch.inf)
