"""`score_pages` of every scorer: the scan of all summaries that a sparse step begins with."""

from __future__ import annotations

from torch import Tensor

from benchmarks.common import expect
from benchmarks.ops.harness import checks, probe
from benchmarks.ops.harness.layers import Layers, Setup
from benchmarks.ops.harness.ours import score
from benchmarks.ops.harness.points import LLAMA, MHA, SMALL, Point
from benchmarks.ops.harness.probe_variants import add_probe
from benchmarks.ops.harness.run import Run, make_summaries, name_of, setup_facts
from benchmarks.ops.harness.scoring import Scoring, supported_scorings
from benchmarks.ops.harness.timing import Variant

_32K, _128K = 32768, 131072

# Every other scan is compared with the paper's box in the keys' own type, one score per query head.
REFERENCE = Scoring("bounds_full", "max")


def scan(run: Run, setups: tuple[Setup, ...]) -> None:
    setup = setups[0]
    found = supported_scorings(setup.kv_dtype)
    # No summary is smaller than a byte per channel.
    smallest = setup.batch * setup.num_pages * setup.num_kv_heads * setup.head_dim
    layers = make_summaries(run.settings, setup, found, smallest)
    variants = {scoring: add_scan(run, layers, scoring) for scoring in found}
    for scoring, variant in variants.items():
        if REFERENCE in variants and scoring != REFERENCE:
            variant.compared_with = variants[REFERENCE].name


def add_scan(run: Run, layers: Layers, scoring: Scoring) -> Variant:
    """`score_pages` with one scorer, and the probe over its summaries."""
    setup, pools = layers.setup, layers.scored(scoring.scorer)
    name = name_of(run, layers, f"scan {scoring.label}", run.settings.threads)

    def call(layer: int) -> Tensor:
        return score(layers, pools[layer], layer, scoring)

    scanned = checks.counted_summaries(call(0))
    expect(f"{name}: summaries read", setup.batch * setup.num_kv_heads * layers.sealed_pages, scanned)
    num_bytes = scanned * pools[0].page_summary.size(2)
    facts = {"op": "score_pages", "variant": "scan", **setup_facts(setup), "scorer": scoring.scorer}
    facts |= {
        "group_reduction": scoring.group_reduction,
        "summaries_read": scanned,
        "summary_bytes": num_bytes,
    }
    variant = Variant(name, call, run.passes(layers, num_bytes), num_bytes, run.settings.threads, facts)
    variant.probe = add_probe(run, variant, lambda layer, order: probe.summary_segments(pools[layer]))
    return run.add(variant)


def points() -> list[Point]:
    found = [Point("scan", (Setup(*LLAMA, _32K),), scan, in_quick=True)]
    found += [Point("scan", (Setup(*shape, _128K),), scan) for shape in (LLAMA, MHA, SMALL)]
    found += [Point("scan", (Setup(*LLAMA, 8192, batch=16),), scan)]
    return found
