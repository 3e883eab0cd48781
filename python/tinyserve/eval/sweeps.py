"""Sweeps: one setting varied, everything else held, over the same samples.

A preset is a list of points. Each names the curve that it is on and where it stands on the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tinyserve.errors import UsageError
from tinyserve.eval.methods import Method, full_cache
from tinyserve_ops import SparseConfig, policies
from tinyserve_ops.policies import EvictionPolicy, FullCache, Oracle, QueryAware, SoftPrune, StreamingLLM
from tinyserve_ops.scorers import SCORERS, group_reductions

__all__ = ["ABLATION", "PRESETS", "Point", "Sweep", "preset"]

PAGE_SIZES = (4, 8, 16, 32, 64)
KEEP_RATIOS = (0.1, 0.2, 0.3, 0.5)
BUDGETS = (64, 128, 256, 512, 1024, 2048)
POLICY_BUDGETS = (128, 256, 512)
DENSE_LAYERS = (0, 1, 2, 4, 8)
COMPARED_RANKS = (1, 2, 8)  # beside the default
COMPARED_SCORERS = ("bounds", "low_rank")

ABLATION = "ablation"


@dataclass(frozen=True)
class Point:
    """One method of a sweep.

    Attributes:
        series: the curve that it is on.
        x: its place on the axis; None for a level that holds everywhere (dense).
    """

    method: Method
    series: str
    x: float | str | None


@dataclass(frozen=True)
class Sweep:
    """A preset with everything filled in.

    Attributes:
        axis: what varies, as the plot's label.
        logarithmic: whether the axis doubles from tick to tick.
    """

    name: str
    axis: str
    points: tuple[Point, ...]
    logarithmic: bool = False

    @property
    def methods(self) -> list[Method]:
        """Each method once."""
        return list(dict.fromkeys(point.method for point in self.points))


def preset(name: str, base: SparseConfig) -> Sweep:
    """The sweep of that name around `base`, whose budget, page size and scorer it takes where they do not
    vary.

    Raises:
        UsageError: no such preset, or `base` does not go with it.
    """
    if name not in PRESETS:
        raise UsageError(f"sweep: expected one of {', '.join(PRESETS)}, got {name!r}")
    axis, logarithmic, make = PRESETS[name]
    try:
        points = tuple(make(base))
    except ValueError as error:
        raise UsageError(f"sweep {name}: {error}") from error
    return Sweep(name, axis, points, logarithmic)


def _dense(base: SparseConfig) -> Point:
    return Point(full_cache(base), FullCache.name, None)


def _with_oracle(configs: Mapping[float, SparseConfig]) -> Iterator[Point]:
    """The compared scorers and the oracle, at every config."""
    for scorer in COMPARED_SCORERS:
        for x, config in configs.items():
            method = Method(config=config.replace(scorer=scorer, group_reduction=None))
            yield Point(method, f"{QueryAware.name}, {scorer}", x)
    for x, config in configs.items():
        yield Point(Method(policy=Oracle(), config=config), Oracle.name, x)


def _page_size(base: SparseConfig) -> Iterator[Point]:
    """The forced tokens stay as many as whole pages allow: large pages must have a budget to choose with."""
    yield _dense(base)
    sinks, recent = base.num_sink_pages * base.page_size, base.num_recent_pages * base.page_size
    yield from _with_oracle(
        {
            size: base.replace(
                page_size=size,
                num_sink_pages=-(-sinks // size),
                num_recent_pages=max(recent // size, 1),
            )
            for size in PAGE_SIZES
        }
    )


def _keep_ratio(base: SparseConfig) -> Iterator[Point]:
    yield _dense(base)
    yield from _with_oracle({ratio: base.replace(keep_ratio=ratio) for ratio in KEEP_RATIOS})


def _budget(base: SparseConfig) -> Iterator[Point]:
    yield _dense(base)
    yield from _with_oracle({budget: base.replace(token_budget=budget) for budget in BUDGETS})


def _scorer(base: SparseConfig) -> Iterator[Point]:
    yield _dense(base)
    ranked = [f"low_rank_{rank}" for rank in COMPARED_RANKS if rank < base.page_size]
    for scorer in (*SCORERS, *ranked):
        method = Method(config=base.replace(scorer=scorer, group_reduction=None))
        yield Point(method, QueryAware.name, scorer)
    yield Point(Method(policy=Oracle(), config=base), Oracle.name, None)


def _group_reduction(base: SparseConfig) -> Iterator[Point]:
    yield _dense(base)
    for scorer in COMPARED_SCORERS:
        for reduction in group_reductions(scorer):
            config = base.replace(scorer=scorer, group_reduction=reduction)
            yield Point(Method(config=config), f"{QueryAware.name}, {scorer}", reduction)


def _dense_layers(base: SparseConfig) -> Iterator[Point]:
    yield _dense(base)
    yield from _with_oracle({count: base.replace(dense_layers=count) for count in DENSE_LAYERS})


def _ablation(base: SparseConfig) -> Iterator[Point]:
    """What each part is worth, at the same number of tokens read.

    Without the query router, pages are chosen without looking at the query: the sinks, and the most recent
    pages. Without the page manager, tokens are chosen one by one: each is a page of its own, with its own key
    as its summary. Without the cache fusion, scoring, selection and attention are three calls: the same
    numbers, and what is left to compare is the time of a step.
    """
    if base.token_budget is None:
        raise ValueError(f"token_budget: expected a number of tokens, got keep_ratio {base.keep_ratio}")
    yield _dense(base)
    yield Point(Method(config=base), ABLATION, "everything on")
    yield Point(Method(policy=StreamingLLM(), config=base), ABLATION, "no query router")
    tokens = base.replace(
        page_size=1,
        scorer="mean",
        group_reduction=base.op_group_reduction,
        num_sink_pages=base.num_sink_pages * base.page_size,
        num_recent_pages=base.num_recent_pages * base.page_size,
    )
    yield Point(Method(config=tokens), ABLATION, "no page manager")
    yield Point(Method(config=base, staged=True), ABLATION, "no cache fusion")


def _policies(base: SparseConfig) -> Iterator[Point]:
    """Every policy with its defaults; the query-aware one with the compared scorers."""
    yield _dense(base)
    configs: dict[float, SparseConfig] = {
        budget: base.replace(token_budget=budget) for budget in POLICY_BUDGETS
    }
    yield from _with_oracle(configs)
    for name in policies.names():
        policy = policies.get(name)
        if name in (FullCache.name, QueryAware.name, Oracle.name):
            continue
        if policy.reads_all and not isinstance(policy, EvictionPolicy):  # no budget: a level, not a curve
            yield Point(Method(policy=policy, config=base), name, None)
            continue
        for budget, config in configs.items():
            if name == SoftPrune.name:  # its threshold is about estimated masses
                config = config.replace(scorer="low_rank", group_reduction=None)
            yield Point(Method(policy=policy, config=config), name, budget)


_Maker = Callable[[SparseConfig], Iterator[Point]]
# Name -> what varies, whether its axis is logarithmic, the points.
PRESETS: Mapping[str, tuple[str, bool, _Maker]] = MappingProxyType(
    {
        "page-size": ("tokens of a page", True, _page_size),
        "keep-ratio": ("fraction of the pages kept", False, _keep_ratio),
        "budget": ("token budget", True, _budget),
        "scorer": ("scorer", False, _scorer),
        "group-reduction": ("group reduction", False, _group_reduction),
        "dense-layers": ("dense layers", False, _dense_layers),
        ABLATION: ("switched off", False, _ablation),
        "policies": ("token budget", True, _policies),
    }
)
