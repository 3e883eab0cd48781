"""Float64 answers from the plain tokens of a batch: no pages, no summaries code, no shared helper.

Attention is a dense softmax with a mask. Scores are computed from summary bytes read with NumPy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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


def read_summary(row: Tensor, scorer: str, head_dim: int) -> dict[str, np.ndarray]:
    """Reads one summary row uint8 [summary_bytes]: statistic name -> float64 [head_dim]."""
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


def score_oracle(batch: Batch) -> Tensor:
    """Page scores in float64 [num_tokens, num_kv_heads, max_pages] from the batch's summaries."""
    num_heads, head_dim = batch.q.shape[1:]
    group_size = num_heads // batch.num_kv_heads
    scores = torch.full(
        (len(batch.q), batch.num_kv_heads, batch.page_table.shape[1]), -torch.inf, dtype=torch.float64
    )
    for b, stored_len in enumerate(batch.seq_lens.tolist()):
        tokens = batch.new_tokens(b)
        for offset, token in enumerate(range(tokens.start, tokens.stop)):
            length = stored_len + offset + 1
            first = max(0, length - batch.window) if batch.window > 0 else 0
            for page in range(batch.page_table.shape[1]):
                begin, end = page * batch.page_size, (page + 1) * batch.page_size
                if begin >= length or end <= first:
                    continue
                for kv_head in range(batch.num_kv_heads):
                    if end > length:
                        scores[token, kv_head, page] = torch.inf
                        continue
                    row = batch.page_summary[int(batch.page_table[b, page]), kv_head]
                    vectors = read_summary(row, batch.scorer, head_dim)
                    heads = range(kv_head * group_size, (kv_head + 1) * group_size)
                    each = [
                        _score(batch.scorer, batch.q[token, head].double().numpy(), vectors) for head in heads
                    ]
                    reduced = max(each) if batch.group_reduction == "max" else sum(each) / group_size
                    scores[token, kv_head, page] = batch.sm_scale * reduced
    return scores


def _score(scorer: str, q: np.ndarray, vectors: dict[str, np.ndarray]) -> float:
    if scorer == "mean":
        return float(q @ vectors["mean"])
    if scorer == "mean_std":
        return float(q @ vectors["mean"] + np.abs(q) @ vectors["std"])
    box = float(np.where(q > 0, q, 0) @ vectors["max"] + np.where(q < 0, q, 0) @ vectors["min"])
    return 0.7 * box + 0.3 * float(q @ vectors["mean"]) if scorer == "bounds_mean" else box
