"""`select_pages`: top-K of page scores that were just computed, against the sparse step it is a part of."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common import expect
from benchmarks.ops.harness import checks
from benchmarks.ops.harness.layers import Layers, Setup
from benchmarks.ops.harness.ours import add_dense, add_sparse, score, select
from benchmarks.ops.harness.points import LLAMA, SMALL, Point
from benchmarks.ops.harness.run import Run, make_layers, name_of, setup_facts
from benchmarks.ops.harness.scoring import SCORINGS, Budget
from benchmarks.ops.harness.timing import Variant

_32K, _128K = 32768, 131072
_BUDGETS: tuple[Budget, ...] = (2048, 0.3)


def top_k(run: Run, setups: tuple[Setup, ...]) -> None:
    """Selection, torch's top-K and the whole step, for each budget."""
    setup, scoring = setups[0], SCORINGS[0]
    layers = make_layers(run.settings, setup, [scoring], _BUDGETS)
    scores = [score(layers, pool, layer, scoring) for layer, pool in enumerate(layers.scored(scoring.scorer))]
    dense = add_dense(run, layers, reader=False)
    for budget in _BUDGETS:
        step = add_sparse(run, layers, budget, scoring, compared_with=dense, reader=False)
        for name in ("select", "torch topk"):
            _add_selection(run, layers, scores, budget, name, step)


def _add_selection(
    run: Run, layers: Layers, scores: list[Tensor], budget: Budget, what: str, step: Variant
) -> None:
    setup = layers.setup
    budget_pages = setup.page_budget(budget)
    page_budget = torch.full((setup.batch,), budget_pages, dtype=torch.int32)
    name = name_of(run, layers, f"{what} {budget}", run.settings.threads)

    def ours(layer: int) -> tuple[Tensor, Tensor]:
        return select(layers, scores[layer], page_budget, budget_pages)

    def torchs(layer: int) -> Tensor:
        return scores[layer].topk(budget_pages, sorted=False).indices.sort().values

    selected, num_selected = ours(0)
    checks.check_selection(name, layers, budget_pages, selected, num_selected)
    is_forced = selected[..., 0] == 0
    expect(f"{name}: the first page is read", True, bool(is_forced.all()))
    num_bytes = scores[0].numel() * scores[0].element_size() + selected.numel() * selected.element_size()
    facts = {
        "op": "select_pages" if what == "select" else "torch_topk",
        "variant": what,
        **setup_facts(setup),
        "budget": budget,
        "budget_pages": budget_pages,
        "num_pages": setup.num_pages,
    }
    variant = Variant(
        name,
        ours if what == "select" else torchs,
        step.layers,
        num_bytes,
        run.settings.threads,
        facts,
        compared_with=step.name,
        prepare=lambda layer: scores[layer].sum(),  # inside a step the scores come from the cache
    )
    run.add(variant)


def points() -> list[Point]:
    return [
        Point("top-k", (Setup(*shape, length),), top_k, in_quick=(shape, length) == (LLAMA, _32K))
        for shape, length in ((LLAMA, _32K), (LLAMA, _128K), (SMALL, _32K), (SMALL, _128K))
    ]
