"""`seal_pages`: the summaries of a prompt's pages with every scorer, beside the prompt's own attention."""

from __future__ import annotations

import torch

from benchmarks.ops.harness.layers import Layers, Setup
from benchmarks.ops.harness.ours import token_bytes
from benchmarks.ops.harness.points import LLAMA, SMALL, Point
from benchmarks.ops.harness.prefill import add_prefill
from benchmarks.ops.harness.run import Run, make_layers, name_of, setup_facts
from benchmarks.ops.harness.scoring import Scoring, supported_scorings
from benchmarks.ops.harness.timing import Variant
from tinyserve_ops import ops

_CHUNK = 512
_LAYERS = 8


def seal(run: Run, setups: tuple[Setup, ...]) -> None:
    """One chunk of a prompt: its attention, and sealing its pages with each scorer."""
    setup = setups[0]
    scorings = {scoring.scorer: scoring for scoring in supported_scorings(setup.kv_dtype)}
    layers = make_layers(run.settings, setup, list(scorings.values()), max_layers=_LAYERS)
    attention = add_prefill(run, layers, _CHUNK)
    for scoring in scorings.values():
        _add_seal(run, layers, scoring, attention)


def _add_seal(run: Run, layers: Layers, scoring: Scoring, attention: Variant) -> None:
    setup, pools = layers.setup, layers.scored(scoring.scorer)
    page_ids = layers.page_table[:, -(_CHUNK // setup.page_size) :].flatten().contiguous()
    name = name_of(run, layers, f"seal {scoring.scorer}", run.settings.threads)

    def call(layer: int) -> None:
        pool = pools[layer]
        ops.seal_pages(page_ids, pool.k_pages, pool.k_scales, pool.page_summary, pool.scorer)

    before = pools[0].page_summary[page_ids.long()].clone()
    pools[0].page_summary[page_ids.long()] = 0xFF
    call(0)
    if not torch.equal(before, pools[0].page_summary[page_ids.long()]):
        raise AssertionError(f"{name}: sealing anew gives other summaries")
    heads = page_ids.numel() * setup.num_kv_heads
    keys = heads * setup.page_size * token_bytes(pools[0]) // 2
    num_bytes = keys + heads * pools[0].page_summary.size(2)
    facts = {"op": "seal_pages", "variant": "seal", **setup_facts(setup), "scorer": scoring.scorer}
    facts |= {"pages": heads, "new_tokens": setup.batch * _CHUNK}
    run.add(
        Variant(
            name,
            call,
            range(layers.num_layers),
            num_bytes,
            run.settings.threads,
            facts,
            compared_with=attention.name,
        )
    )


def points() -> list[Point]:
    return [
        Point("chunk of 512", (Setup(*shape, 2048),), seal, in_quick=shape == SMALL)
        for shape in (LLAMA, SMALL)
    ]
