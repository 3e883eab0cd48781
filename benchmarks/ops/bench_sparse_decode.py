"""`sparse_decode` against our dense kernel and against torch: lengths, budgets, scorers, dtypes, batch."""

from __future__ import annotations

from benchmarks.ops.harness.baselines import add_torch_dense, add_torch_selection
from benchmarks.ops.harness.layers import Setup, supported_dtypes
from benchmarks.ops.harness.ours import add_dense, add_sparse
from benchmarks.ops.harness.points import LLAMA, SHAPES, SMALL, Point
from benchmarks.ops.harness.probe_variants import add_stream
from benchmarks.ops.harness.run import Run, make_layers
from benchmarks.ops.harness.scoring import SCORINGS, Budget, supported_scorings
from benchmarks.ops.harness.timing import Variant

_2K, _8K, _32K, _128K = 2048, 8192, 32768, 131072
_KEEP_RATIO = 0.3
_TOKENS = 2048


def compare(run: Run, setups: tuple[Setup, ...]) -> None:
    """Dense, sparse with every scorer, and torch, on one setup."""
    setup = setups[0]
    budgets = _budgets(setup)
    scorings = supported_scorings(setup.kv_dtype)
    layers = make_layers(run.settings, setup, scorings, budgets)
    dense = add_dense(run, layers)
    add_stream(run, layers)
    for scoring in scorings:
        for budget in budgets:
            add_sparse(run, layers, budget, scoring, compared_with=dense)
    add_torch_dense(run, layers, compared_with=dense)
    add_torch_selection(run, layers, _KEEP_RATIO, compared_with=dense)


def dtypes(run: Run, setups: tuple[Setup, ...]) -> None:
    """Dense and sparse of every dtype in one run, each compared with the same variant of the first dtype."""
    first: dict[str | Budget, Variant] = {}
    for setup in setups:
        scoring = SCORINGS[0]
        layers = make_layers(run.settings, setup, [scoring], _budgets(setup))
        dense = add_dense(run, layers)
        sparse = [add_sparse(run, layers, b, scoring, compared_with=dense) for b in _budgets(setup)]
        for key, variant in zip(("dense", *_budgets(setup)), (dense, *sparse), strict=True):
            variant.compared_with = first.setdefault(key, variant).name


def budgets(run: Run, setups: tuple[Setup, ...]) -> None:
    """Many budgets."""
    setup, scoring = setups[0], SCORINGS[0]
    wanted: tuple[Budget, ...] = tuple(
        tokens for tokens in (512, 1024, 2048, 4096, 8192, 16384) if tokens < setup.length
    )
    layers = make_layers(run.settings, setup, [scoring], wanted)
    dense = add_dense(run, layers)
    for budget in wanted:
        add_sparse(run, layers, budget, scoring, compared_with=dense, reader=False)


def growth(run: Run, setups: tuple[Setup, ...]) -> None:
    """Two lengths in one run, with the same budget of tokens: what a longer context costs."""
    for setup in setups:
        scorings = supported_scorings(setup.kv_dtype)
        layers = make_layers(run.settings, setup, scorings, (_TOKENS,))
        dense = add_dense(run, layers)
        for scoring in scorings:
            add_sparse(run, layers, _TOKENS, scoring, compared_with=dense, reader=False)


def _budgets(setup: Setup) -> tuple[Budget, ...]:
    tokens = _TOKENS if setup.length >= 2 * _TOKENS else setup.length // 4
    return (_KEEP_RATIO, tokens)


def points() -> list[Point]:
    found = [
        Point("decode", (Setup(*shape, length),), compare, in_quick=(shape, length) == (LLAMA, _32K))
        for shape in SHAPES
        for length in (_2K, _8K, _32K)
    ]
    found += [Point("decode", (Setup(*shape, _128K),), compare) for shape in (LLAMA, SMALL)]
    found += [Point("decode", (Setup(*LLAMA, _32K, dtype="float32"),), compare)]
    found += [Point("batch 16", (Setup(*shape, _8K, batch=16),), compare) for shape in (LLAMA, SMALL)]
    both = tuple(Setup(*LLAMA, _32K, dtype=dtype) for dtype in supported_dtypes(("bfloat16", "int8")))
    found += [Point("dtypes", both, dtypes, in_quick=True)]
    found += [Point("budgets", (Setup(*LLAMA, _32K),), budgets)]
    found += [
        Point("growth", (Setup(*shape, _8K), Setup(*shape, _128K)), growth, in_quick=shape == SMALL)
        for shape in (LLAMA, SMALL)
    ]
    return found
