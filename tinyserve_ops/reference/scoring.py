"""How much a page could matter to a query, estimated from its summary alone.

The bounds of Quest (arXiv 2406.10774, section 3.3; TinyServe, arXiv 2509.12211, section 3): with the
channel-wise max M and min m of a page's keys, every key k has q.k <= sum_i max(q_i M_i, q_i m_i) = max(q,
0).M + min(q, 0).m. The other scorers replace the features of q and the vectors of the page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyserve_ops.reference import checks
from tinyserve_ops.reference.rows import rows_of
from tinyserve_ops.reference.summaries import restore
from tinyserve_ops.scorers import SummaryVector, find_op_scorer


def score_pages(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_summary: Tensor,
    page_size: int,
    scorer: str,
    group_reduction: str,
    sm_scale: float,
    window: int = -1,
) -> Tensor:
    """Scores every visible page of every row and kv head.

    Returns:
        page_scores, fp32 [num_tokens, num_kv_heads, max_pages], indexed by logical page: -inf where the page
        is not visible, +inf for the last page while it is open (it has no summary, and is always attended).
    """
    checks.check_score_pages(
        q, cu_query_lens, seq_lens, page_table, page_summary, page_size, scorer, group_reduction, window
    )
    num_kv_heads, head_dim = page_summary.shape[1], q.shape[2]
    vectors = find_op_scorer(scorer)[0].vectors
    page_scores = torch.full((q.shape[0], num_kv_heads, page_table.shape[1]), -torch.inf)
    for row in rows_of(cu_query_lens, seq_lens, window):
        queries = (
            q[row.token].float().unflatten(0, (num_kv_heads, -1))
        )  # [num_kv_heads, group_size, head_dim]
        features = torch.stack([query_feature(queries, vector) for vector in vectors], 2)
        if group_reduction == "mean":
            features = features.mean(1, keepdim=True)
        for page in row.visible_pages(page_size):
            if not row.sealed(page, page_size):
                page_scores[row.token, :, page] = torch.inf
                continue
            scales, values = restore(page_summary[page_table[row.sequence, page]], scorer, head_dim)
            # Unscaled codes first: a scale near the largest float times a code may overflow, 0 * inf is NaN.
            dots = torch.einsum("hgvd,hvd->hgv", features, values)
            scores = sm_scale * (dots * scales[:, None]).sum(-1)  # [num_kv_heads, group_size or 1]
            page_scores[row.token, :, page] = scores.amax(1)
    return page_scores


def query_feature(queries: Tensor, vector: SummaryVector) -> Tensor:
    """The weighted feature of the query that one summary vector is multiplied with."""
    if vector.feature == "positive_part":
        feature = queries.clamp(min=0.0)
    elif vector.feature == "negative_part":
        feature = queries.clamp(max=0.0)
    elif vector.feature == "absolute":
        feature = queries.abs()
    else:
        feature = queries
    return vector.weight * feature
