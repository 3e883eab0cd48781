"""Float64 answers from the plain tokens of a batch: no pages, no summaries code, no shared helper.

Attention is a dense softmax with a mask. Scores are computed from summary bytes read with NumPy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyserve_ops.scorers import find_op_scorer
from tinyserve_ops.testing.batches import Batch

_STATISTICS = {
    "bounds": ("max", "min"),
    "bounds_full_fp32": ("max", "min"),
    "bounds_full_fp16": ("max", "min"),
    "bounds_full_bf16": ("max", "min"),
    "mean": ("mean",),
    "mean_std": ("mean", "std"),
    "bounds_mean": ("max", "min", "mean"),
}


def attention_oracle(
    batch: Batch,
    *,
    selected_pages: Tensor | None = None,
    new_tokens_as_given: bool = False,
) -> tuple[Tensor, Tensor]:
    """Dense attention of every new token: out and lse in float64.

    Args:
        selected_pages: restricts each row and kv head to tokens of these logical pages (-1 is ignored).
        new_tokens_as_given: the new tokens are not read from the pages but from k and v, unrounded.
    """
    num_heads = batch.q.shape[1]
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    lse = torch.full((len(batch.q), num_heads), -torch.inf, dtype=torch.float64)
    for b, stored_len in enumerate(batch.seq_lens.tolist()):
        all_keys, all_values = batch.stored_tokens(b)
        tokens = batch.new_tokens(b)
        if new_tokens_as_given:
            new = slice(tokens.start + max(0, -stored_len), tokens.stop)
            all_keys = torch.cat([all_keys[: max(0, stored_len)], batch.k[new].double()])
            all_values = torch.cat([all_values[: max(0, stored_len)], batch.v[new].double()])
        for offset, token in enumerate(range(tokens.start, tokens.stop)):
            position = stored_len + offset
            if position < 0:
                continue
            positions = torch.arange(position + 1)
            for head in range(num_heads):
                kv_head = head * batch.num_kv_heads // num_heads
                allowed = torch.ones(position + 1, dtype=torch.bool)
                if batch.window > 0:
                    allowed &= positions > position - batch.window
                if selected_pages is not None:
                    listed = selected_pages[token, kv_head].long()
                    allowed &= torch.isin(positions // batch.page_size, listed[listed >= 0])
                if not allowed.any():
                    continue
                visible = positions[allowed]
                logits = batch.sm_scale * (all_keys[visible, kv_head] @ batch.q[token, head].double())
                lse[token, head] = torch.logsumexp(logits, 0)
                out[token, head] = torch.softmax(logits, 0) @ all_values[visible, kv_head]
    return out, lse


def attention_tolerance(batch: Batch) -> tuple[float, float]:
    """How far out and lse may lie from `attention_oracle` beyond fp32 rounding: 0 unless pages are int8.

    The compiled ops round the queries of a head to 16 bits, which moves a logit by at most 2^-16 of its
    largest channel times the sum of the key's magnitudes, and the probabilities of a page likewise, which
    moves the output by at most 2^-16 of page_size values. A logit off by x moves its probability by 2x.
    """
    if batch.k_scales is None or batch.q.numel() == 0:
        return 0.0, 0.0
    tokens = [part for b in range(len(batch.seq_lens)) for part in zip(*batch.stored_tokens(b), strict=True)]
    keys = max((float(k.abs().sum(-1).max()) for k, _ in tokens), default=0.0)
    values = max((float(v.abs().max()) for _, v in tokens), default=0.0)
    logit = abs(batch.sm_scale) * float(batch.q.double().abs().max()) * keys * 2.0**-16
    return (2 * logit + batch.page_size * 2.0**-16) * values, logit


def read_summary(row: Tensor, scorer: str, head_dim: int) -> dict[str, np.ndarray]:
    """Reads one row uint8 [summary_bytes] of a linear scorer: statistic name -> float64 [head_dim]."""
    data = row.contiguous().numpy().tobytes()
    names = _STATISTICS[scorer]
    if scorer.startswith("bounds_full"):
        full = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2"}[scorer.rpartition("_")[2]]
        values = np.frombuffer(data, full, len(names) * head_dim)
        if scorer.endswith("bf16"):
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return dict(zip(names, values.astype(np.float64).reshape(-1, head_dim), strict=True))
    scales = np.frombuffer(data, "<f4", 4)
    codes = np.frombuffer(data, "i1", len(names) * head_dim, 16).reshape(-1, head_dim)
    # The restored value is an fp32 product: rounding up or down is promised for it.
    restored = (scales[: len(names), None] * codes.astype(np.float32)).astype(np.float64)
    return dict(zip(names, restored, strict=True))


def read_low_rank(row: Tensor, rank: int, head_dim: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads one low-rank summary row uint8 [summary_bytes]: mean float64 [head_dim] and the sketch of the
    centred keys float64 [page_size, head_dim]."""
    data = row.contiguous().numpy().tobytes()

    def codes(start: int, count: int) -> np.ndarray:
        found = []
        for index in range(count):
            byte = data[start + index // 16 * 8 + index % 8]
            found.append((byte >> 4 if index % 16 >= 8 else byte & 15) - 8)
        return np.array(found, dtype=np.float64)

    basis_bytes, coefficient_bytes = -(-head_dim // 16) * 8, -(-page_size // 16) * 8
    basis_start = head_dim
    coefficient_start = basis_start + rank * basis_bytes
    scale_start = coefficient_start + rank * coefficient_bytes
    halves = np.frombuffer(data, "<u2", 1 + rank, scale_start)
    scales = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    sketch = np.zeros((page_size, head_dim))
    for index in range(rank):
        basis = codes(basis_start + index * basis_bytes, head_dim)
        coefficients = codes(coefficient_start + index * coefficient_bytes, page_size)
        sketch += scales[1 + index] * np.outer(coefficients, basis)
    return scales[0] * np.frombuffer(data, "i1", head_dim).astype(np.float64), sketch


def score_tolerance(batch: Batch) -> float:
    """How far page scores may lie from `score_oracle`, absolute and relative."""
    # The compiled ops round queries to 16 bits before they multiply them with a sketch's codes.
    return 2e-5 if find_op_scorer(batch.scorer, allow_public=True)[0].is_linear else 3e-4


def score_oracle(batch: Batch) -> Tensor:
    """Page scores in float64 [num_tokens, num_kv_heads, max_pages] from the batch's summaries."""
    num_heads = batch.q.shape[1]
    group_size = num_heads // batch.num_kv_heads
    scores = torch.full(
        (len(batch.q), batch.num_kv_heads, batch.page_table.shape[1]), -torch.inf, dtype=torch.float64
    )
    for b, stored_len in enumerate(batch.seq_lens.tolist()):
        tokens = batch.new_tokens(b)
        for offset, token in enumerate(range(tokens.start, tokens.stop)):
            length = stored_len + offset + 1
            first = max(0, length - batch.window) if batch.window > 0 else 0
            sealed: list[int] = []
            for page in range(batch.page_table.shape[1]):
                begin, end = page * batch.page_size, (page + 1) * batch.page_size
                if begin >= length or end <= first:
                    continue
                if end > length:
                    scores[token, :, page] = torch.inf
                else:
                    sealed.append(page)
            for kv_head in range(batch.num_kv_heads if sealed else 0):
                rows = [batch.page_summary[int(batch.page_table[b, page]), kv_head] for page in sealed]
                queries = batch.q[token, kv_head * group_size : (kv_head + 1) * group_size].double().numpy()
                each = np.array([[_score(batch, query, row) for row in rows] for query in queries])
                scores[token, kv_head, sealed] = torch.from_numpy(_reduce(each, batch.group_reduction))
    return scores


def _reduce(scores: np.ndarray, group_reduction: str) -> np.ndarray:
    """[group_size, num_pages] -> [num_pages]."""
    if group_reduction == "max":
        return scores.max(0)
    if group_reduction == "mean":
        return scores.mean(0)
    peaks = scores.max(1, keepdims=True)
    # Summed as logarithms: a page far below the best one has a share that no float64 holds.
    shares = scores - peaks - np.log(np.exp(scores - peaks).sum(1, keepdims=True))
    best = shares.max(0)
    return best + np.log(np.exp(shares - best).sum(0))


def _score(batch: Batch, q: np.ndarray, row: Tensor) -> float:
    """The score of one page by one query head, `sm_scale` included."""
    scorer = batch.scorer
    if scorer.startswith("low_rank"):
        mean, sketch = read_low_rank(row, int(scorer.rpartition("_")[2]), len(q), batch.page_size)
        logits = batch.sm_scale * (q @ mean + sketch @ q)
        peak = logits.max()
        return float(peak if "max" in scorer else peak + np.log(np.exp(logits - peak).sum()))
    vectors = read_summary(row, scorer, len(q))
    if scorer == "mean":
        return batch.sm_scale * float(q @ vectors["mean"])
    if scorer == "mean_std":
        return batch.sm_scale * float(q @ vectors["mean"] + np.abs(q) @ vectors["std"])
    box = float(np.where(q > 0, q, 0) @ vectors["max"] + np.where(q < 0, q, 0) @ vectors["min"])
    return batch.sm_scale * (0.7 * box + 0.3 * float(q @ vectors["mean"]) if scorer == "bounds_mean" else box)
