"""`attend_pages` over all pages: every dtype, page order, cache level, batch and number of threads."""

from __future__ import annotations

from benchmarks.ops.harness.baselines import add_torch_dense
from benchmarks.ops.harness.layers import Setup, supported_dtypes
from benchmarks.ops.harness.ours import add_dense
from benchmarks.ops.harness.points import LLAMA, MHA, SHAPES, SMALL, Point
from benchmarks.ops.harness.probe_variants import add_stream
from benchmarks.ops.harness.run import Run, make_layers

_8K, _32K = 8192, 32768


def dense(run: Run, setups: tuple[Setup, ...]) -> None:
    """Dense over each setup, against torch in the first one's."""
    first = None
    for setup in setups:
        layers = make_layers(run.settings, setup, hot=run.hot)
        variant = add_dense(run, layers)
        if first is None:
            first = variant
            add_stream(run, layers)
            add_torch_dense(run, layers, compared_with=first)
        else:
            variant.compared_with = first.name


def threads(run: Run, setups: tuple[Setup, ...]) -> None:
    """One thread against all."""
    layers = make_layers(run.settings, setups[0])
    one = add_dense(run, layers, threads=1)
    if run.settings.threads > 1:
        add_dense(run, layers).compared_with = one.name


def points() -> list[Point]:
    dtypes = supported_dtypes(("bfloat16", "int8", "float16", "float32"))
    found = [Point("dtypes", tuple(Setup(*LLAMA, _32K, dtype=dtype) for dtype in dtypes), dense)]
    found += [Point("page order", (Setup(*LLAMA, _32K), Setup(*LLAMA, _32K, page_order="random")), dense)]
    found += [Point("in cache", (Setup(*shape, 2048),), dense, hot=True) for shape in (SMALL, MHA)]
    found += [Point("batch 16", (Setup(*shape, _8K // 2, batch=16),), dense) for shape in SHAPES]
    found += [
        Point("threads", (Setup(*SMALL, length),), threads, in_quick=length == _8K) for length in (_8K, _32K)
    ]
    return found
