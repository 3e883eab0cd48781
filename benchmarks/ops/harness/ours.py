"""Our ops as variants: each is called once before it is timed, to check its path and count what it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common import expect
from benchmarks.ops.harness import checks, probe
from benchmarks.ops.harness.layers import Layers
from benchmarks.ops.harness.probe_variants import add_probe
from benchmarks.ops.harness.run import Run, name_of, setup_facts
from benchmarks.ops.harness.scoring import RECENT_PAGES, SINK_PAGES, Budget, Scoring
from benchmarks.ops.harness.timing import Variant
from tinyserve_ops import ops
from tinyserve_ops.layer_pool import LayerPool


def add_dense(run: Run, layers: Layers, *, threads: int | None = None, reader: bool = True) -> Variant:
    """`attend_pages` over all pages, and the probe over the same pages."""
    threads = threads or run.settings.threads
    name = name_of(run, layers, "dense", threads)
    setup, pools = layers.setup, layers.pools

    def call(layer: int) -> tuple[Tensor, Tensor, Tensor]:
        pool = pools[layer]
        return ops.attend_pages(
            layers.queries[layer], layers.cu_query_lens, layers.seq_lens, layers.page_table, pool.k_pages,
            pool.v_pages, pool.k_scales, pool.v_scales, None, None, setup.sm_scale,
        )  # fmt: skip

    pool = pools[0]
    out, _, page_lse = ops.attend_pages(
        layers.queries[0], layers.cu_query_lens, layers.seq_lens, layers.page_table, pool.k_pages,
        pool.v_pages, pool.k_scales, pool.v_scales, None, None, setup.sm_scale, return_page_lse=True,
    )  # fmt: skip
    pages = checks.counted_pages(name, layers, page_lse)
    expect(f"{name}: pages read", setup.batch * setup.num_kv_heads * setup.num_pages, pages)
    checks.check_output(name, layers, 0, out)
    num_bytes = kv_bytes(layers, pages)
    facts = {"op": "attend_pages", "variant": "dense", **setup_facts(setup), "pages_read": pages}
    variant = Variant(name, call, run.passes(layers, num_bytes), num_bytes, threads, facts)
    if reader:
        every_page = torch.arange(setup.num_pages).expand(setup.batch, setup.num_kv_heads, -1)
        variant.probe = add_probe(
            run, variant, lambda layer, order: probe.page_segments(layers, pools[layer], every_page, order)
        )
    return run.add(variant)


def add_sparse(
    run: Run, layers: Layers, budget: Budget, scoring: Scoring, *, compared_with: Variant, reader: bool = True
) -> Variant:
    """`sparse_decode`, checked against its parts, and the probe over the summaries and pages it reads."""
    setup, threads = layers.setup, run.settings.threads
    name = name_of(run, layers, f"sparse {budget} {scoring.label}", threads)
    pools = layers.scored(scoring.scorer)
    budget_pages = setup.page_budget(budget)
    page_budget = torch.full((setup.batch,), budget_pages, dtype=torch.int32)

    def call(layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pool = pools[layer]
        return ops.sparse_decode(
            layers.queries[layer], layers.cu_query_lens, layers.seq_lens, layers.page_table, pool.k_pages,
            pool.v_pages, pool.k_scales, pool.v_scales, pool.page_summary, page_budget, budget_pages,
            pool.scorer, scoring.group_reduction, setup.sm_scale, SINK_PAGES, RECENT_PAGES,
        )  # fmt: skip

    scores = score(layers, pools[0], 0, scoring)
    expected_pages, _ = select(layers, scores, page_budget, budget_pages)
    out, _, selected, num_selected = call(0)
    checks.check_selection(name, layers, budget_pages, selected, num_selected)
    expect(f"{name}: equals score_pages and select_pages", True, torch.equal(expected_pages, selected))
    checks.check_output(name, layers, 0, out, selected)
    pages, scanned = int(num_selected.sum()), checks.counted_summaries(scores)
    summary_bytes = scanned * pools[0].page_summary.size(2)
    num_bytes = kv_bytes(layers, pages) + summary_bytes
    facts = {
        "op": "sparse_decode",
        "variant": "sparse",
        **setup_facts(setup),
        "scorer": scoring.scorer,
        "group_reduction": scoring.group_reduction,
        "budget": budget,
        "budget_pages": budget_pages,
        "pages_read": pages,
        "summaries_read": scanned,
        "summary_bytes": summary_bytes,
    }
    variant = Variant(
        name, call, run.passes(layers, num_bytes), num_bytes, threads, facts, compared_with=compared_with.name
    )
    if reader:
        lists = {layer: call(layer)[2] for layer in set(variant.layers)}

        def segments_of(layer: int, order: str) -> probe.Segments:
            pages = probe.page_segments(layers, pools[layer], lists[layer], order)
            return probe.joined(probe.summary_segments(pools[layer]), pages)

        variant.probe = add_probe(run, variant, segments_of)
    return run.add(variant)


def score(layers: Layers, pool: LayerPool, layer: int, scoring: Scoring) -> Tensor:
    """`score_pages` of a layer: [batch, num_kv_heads, pages]."""
    return ops.score_pages(
        layers.queries[layer], layers.cu_query_lens, layers.seq_lens, layers.page_table, pool.page_summary,
        layers.setup.page_size, pool.scorer, scoring.group_reduction, layers.setup.sm_scale,
    )  # fmt: skip


def select(layers: Layers, scores: Tensor, page_budget: Tensor, budget_pages: int) -> tuple[Tensor, Tensor]:
    """`select_pages` of a layer's scores."""
    return ops.select_pages(
        scores, layers.cu_query_lens, layers.seq_lens, page_budget, budget_pages, layers.setup.page_size,
        SINK_PAGES, RECENT_PAGES,
    )  # fmt: skip


def kv_bytes(layers: Layers, pages: int) -> int:
    """Bytes of `pages` pages of one kv head, less the empty slots of each sequence's last page."""
    setup = layers.setup
    missing = setup.num_pages * setup.page_size - setup.length
    tokens = pages * setup.page_size - missing * setup.batch * setup.num_kv_heads
    return tokens * token_bytes(layers.pools[0])


def token_bytes(pool: LayerPool) -> int:
    """Bytes of K and V (and scales) of one token and kv head, from the tensors themselves."""
    parts = [pool.k_pages, pool.v_pages]
    num_bytes = sum(part[0, 0, 0].numel() * part.element_size() for part in parts)
    return num_bytes + sum(
        scales.element_size() for scales in (pool.k_scales, pool.v_scales) if scales is not None
    )
