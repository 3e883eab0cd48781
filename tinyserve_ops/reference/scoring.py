"""How much a page could matter to a query, estimated from its summary alone.

The bounds of Quest (arXiv 2406.10774, section 3.3; TinyServe, arXiv 2509.12211, section 3): with the
channel-wise max M and min m of a page's keys, every key k has q.k <= sum_i max(q_i M_i, q_i m_i) = max(q,
0).M + min(q, 0).m. The other linear scorers replace the features of q and the vectors of the page. A low-rank
summary gives an estimate of every token's logit instead; their log-sum-exp is the logarithm of the page's
softmax mass but for a constant of the row, which is what the softmax over the row's pages takes out again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyserve_ops.reference import checks, low_rank
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
    num_kv_heads = page_summary.shape[1]
    page_scores = torch.full((q.shape[0], num_kv_heads, page_table.shape[1]), -torch.inf)
    for row in rows_of(cu_query_lens, seq_lens, window):
        queries = (
            q[row.token].float().unflatten(0, (num_kv_heads, -1))
        )  # [num_kv_heads, group_size, head_dim]
        visible = row.visible_pages(page_size)
        sealed = [page for page in visible if row.sealed(page, page_size)]
        if len(sealed) < len(visible):
            page_scores[row.token, :, visible[-1]] = torch.inf
        if sealed:
            summaries = page_summary[page_table[row.sequence, sealed].long()].transpose(0, 1)
            scores = head_scores(queries, summaries, page_size, scorer, group_reduction, sm_scale)
            page_scores[row.token][:, sealed] = reduce_group(scores, group_reduction)
    return page_scores


def head_scores(
    queries: Tensor, summaries: Tensor, page_size: int, scorer: str, group_reduction: str, sm_scale: float
) -> Tensor:
    """Scores of pages by each query head: [num_kv_heads, group_size, num_pages], or group_size 1 where the
    group's heads are averaged before.

    Args:
        queries: fp32 [num_kv_heads, group_size, head_dim].
        summaries: uint8 [num_kv_heads, num_pages, summary_bytes].
    """
    found, head_dim = find_op_scorer(scorer)[0], queries.shape[2]
    if found.encoding == "low_rank":
        sketch = low_rank.decode(summaries, found.rank, head_dim, page_size)
        # [num_kv_heads, num_pages, group_size, page_size]
        logits = low_rank.token_logits(queries[:, None], sketch, sm_scale)
        of_pages = logits.logsumexp(-1) if found.token_reduction == "logsumexp" else logits.amax(-1)
        return of_pages.transpose(1, 2)
    features = torch.stack([query_feature(queries, vector) for vector in found.vectors], 2)
    if group_reduction == "mean":
        features = features.mean(1, keepdim=True)
    scales, values = restore(summaries, scorer, head_dim)
    # Unscaled codes first: a scale near the largest float times a code may overflow, 0 * inf is NaN.
    dots = torch.einsum("hgvd,hpvd->hgpv", features, values)
    return sm_scale * (dots * scales[:, None]).sum(-1)


def reduce_group(scores: Tensor, group_reduction: str) -> Tensor:
    """One score per page, [num_kv_heads, num_pages], from those of the query heads [num_kv_heads, group_size,
    num_pages], which belong to all pages of a row that have a summary.

    "softmax" is log sum_g exp(score_gj - lse_g), lse_g the log-sum-exp of head g's scores over the pages. A
    NaN score makes its own page NaN and no other. A head that gives every page -inf adds nothing; one that
    gives some page +inf has all its mass there.
    """
    if group_reduction != "softmax":
        return scores.amax(1)
    lse = torch.where(scores.isnan(), -torch.inf, scores).logsumexp(-1, keepdim=True)
    shares = scores - lse
    shares = torch.where(scores == torch.inf, 0.0, shares)  # not inf - inf
    return torch.where(scores == -torch.inf, -torch.inf, shares).logsumexp(1)


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
