"""Makes sure that what will be timed is what was asked for. Each check raises `WrongPath`."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common import WrongPath, expect
from benchmarks.ops.harness.layers import Layers

# Largest error relative to the largest reference value, per type of the result.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check_output(
    what: str,
    layers: Layers,
    layer: int,
    out: Tensor,
    selected_pages: Tensor | None = None,
    *,
    tolerance: float | None = None,
) -> None:
    """Compares the first and last sequence with plain fp32 attention over the selected pages (None: all).

    Args:
        out: [batch, num_heads, head_dim].
        selected_pages: [batch, num_kv_heads, pages], no padding.
    """
    setup = layers.setup
    tolerance = tolerance or _TOLERANCE[out.dtype]
    for sequence in sorted({0, setup.batch - 1}):
        keys, values = layers.contiguous(layer, torch.float32, slice(sequence, sequence + 1))
        query = layers.queries[layer][sequence].float().unflatten(0, (setup.num_kv_heads, -1))
        logits = setup.sm_scale * query @ keys[0].transpose(1, 2)  # [num_kv_heads, group_size, length]
        if selected_pages is not None:
            is_read = torch.zeros(setup.num_kv_heads, setup.num_pages, dtype=torch.bool)
            is_read.scatter_(1, selected_pages[sequence].long(), True)
            tokens = is_read.repeat_interleave(setup.page_size, 1)[:, : setup.length]
            logits = logits.masked_fill(~tokens[:, None], -torch.inf)
        reference = (logits.softmax(2) @ values[0]).flatten(0, 1)
        error = float((out[sequence].float() - reference).abs().max() / reference.abs().max())
        if not error <= tolerance:
            pages = "all pages" if selected_pages is None else "the selected pages"
            raise WrongPath(
                f"{what}: expected attention over {pages} within {tolerance}, "
                f"got a relative error of {error:.2g} in sequence {sequence}"
            )


def check_selection(
    what: str, layers: Layers, budget_pages: int, selected: Tensor, num_selected: Tensor
) -> None:
    """The lists are as long as the budget, leave pages out, ascend and hold the forced pages."""
    setup = layers.setup
    if budget_pages >= setup.num_pages:
        raise WrongPath(
            f"{what}: expected a selection that leaves pages out, got a budget of {budget_pages} pages "
            f"that covers all {setup.num_pages}"
        )
    heads = setup.batch * setup.num_kv_heads
    expect(f"{what}: pages selected per head", [budget_pages] * heads, num_selected.flatten().tolist())
    expect(f"{what}: width of the page lists", budget_pages, selected.size(2))
    expect(f"{what}: ascending pages", True, bool((selected.diff(dim=2) > 0).all()))
    expect(f"{what}: the last page is read", setup.num_pages - 1, int(selected[..., -1].min()))


def counted_pages(what: str, layers: Layers, page_lse: Tensor) -> int:
    """Pages that `attend_pages` iterated over, counted from the log-sum-exp it returned for each of them."""
    setup = layers.setup
    iterated = (page_lse > -torch.inf).unflatten(1, (setup.num_kv_heads, -1))
    expect(f"{what}: a group's heads read the same pages", True, bool((iterated == iterated[:, :, :1]).all()))
    return int(iterated[:, :, 0].sum())


def counted_summaries(page_scores: Tensor) -> int:
    """Summaries that `score_pages` read: pages with a finite score."""
    return int(page_scores.isfinite().sum())
