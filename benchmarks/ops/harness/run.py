"""A run: the variants of one point, and the layers they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ops.harness.layers import Layers, Setup
from benchmarks.ops.harness.scoring import Budget, Scoring
from benchmarks.ops.harness.settings import Settings
from benchmarks.ops.harness.timing import Variant
from tinyserve_ops.layer_pool import kv_bytes_per_token


@dataclass
class Run:
    """The variants of one point, as they are put together.

    Attributes:
        hot: every variant stays on its first layer, which then comes from the cache.
    """

    settings: Settings
    variants: list[Variant]
    hot: bool = False
    calls_hot: int = 8

    def passes(self, layers: Layers, num_bytes: int) -> Sequence[int]:
        if self.hot:
            return [0] * self.calls_hot
        wanted = self.settings.layers_for(num_bytes, 1)
        return range(min(wanted, layers.num_layers))

    def add(self, variant: Variant) -> Variant:
        self.variants.append(variant)
        return variant


def setup_facts(setup: Setup) -> dict[str, Any]:
    """The fields of a record that a setup decides."""
    return {
        "num_heads": setup.num_heads,
        "num_kv_heads": setup.num_kv_heads,
        "head_dim": setup.head_dim,
        "page_size": setup.page_size,
        "length": setup.length,
        "batch": setup.batch,
        "dtype": setup.dtype,
        "page_order": setup.page_order,
    }


def layers_needed(settings: Settings, setup: Setup, smallest_bytes: int) -> int:
    """Layers whose share of `smallest_bytes` each exceeds the cache, within the memory for pools."""
    return settings.layers_for(max(1, smallest_bytes), _kv_bytes(setup, setup.num_pages))


def _kv_bytes(setup: Setup, pages: int) -> int:
    """Bytes of K, V and scales in `pages` pages of each sequence, all kv heads."""
    rows = setup.batch * pages * setup.page_size * setup.num_kv_heads
    return rows * kv_bytes_per_token(setup.head_dim, setup.kv_dtype)


def make_layers(
    settings: Settings,
    setup: Setup,
    scorings: Sequence[Scoring] = (),
    budgets: Sequence[Budget] = (),
    *,
    hot: bool = False,
    max_layers: int | None = None,
) -> Layers:
    """Enough layers for the variant that reads least: the smallest budget, or everything without budgets."""
    pages = min([setup.page_budget(budget) for budget in budgets], default=setup.num_pages)
    names = tuple(dict.fromkeys(scoring.scorer for scoring in scorings))
    num_layers = 1 if hot else layers_needed(settings, setup, _kv_bytes(setup, pages))
    num_layers = min(num_layers, max_layers or num_layers)
    return Layers(setup, num_layers, names, settings.seed)


def make_summaries(
    settings: Settings, setup: Setup, scorings: Sequence[Scoring], smallest_bytes: int
) -> Layers:
    """Layers of which only the summaries are read, `smallest_bytes` of each."""
    names = tuple(dict.fromkeys(scoring.scorer for scoring in scorings))
    num_layers = settings.layers_for(smallest_bytes, smallest_bytes)
    return Layers(setup, num_layers, names, settings.seed, only_summaries=True)


def name_of(run: Run, layers: Layers, what: str, threads: int) -> str:
    """Unique within a run."""
    suffix = "" if threads == run.settings.threads else f" on {threads} threads"
    return f"{what} [{layers.setup.label}]{suffix}"
