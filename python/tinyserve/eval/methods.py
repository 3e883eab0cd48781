"""`Method`: a policy with its settings, one line of a comparison.

Two methods are the same when `facts` is; results name the method by it, so that a run can be taken up again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinyserve.errors import UsageError
from tinyserve_ops import SparseConfig
from tinyserve_ops.scorers import resolve

__all__ = ["FULL_CACHE", "POLICIES", "QUERY_AWARE", "Method", "PageFormat", "full_cache", "grid"]

FULL_CACHE = "full_cache"
QUERY_AWARE = "query_aware"
POLICIES = (FULL_CACHE, QUERY_AWARE)


@dataclass(frozen=True)
class PageFormat:
    """What two methods must have in common to share pages."""

    page_size: int
    scorer: str
    kv_dtype: str | None

    @property
    def is_exact(self) -> bool:
        """Whether pages hold keys and values in the model's own type."""
        return self.kv_dtype is None


@dataclass(frozen=True, kw_only=True)
class Method:
    """How decode steps attend.

    Attributes:
        policy: name of the policy. `full_cache` reads every page: its budget is not looked at.
        config: page size, budget, scorer and the rest.
        staged: scoring, selection and attention as three ops in place of one (the same numbers, slower).
    """

    policy: str = QUERY_AWARE
    config: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    staged: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"--policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.policy == FULL_CACHE and self.config.keep_ratio != 1.0:
            raise UsageError(f"--policy: expected keep_ratio 1.0 with {FULL_CACHE}, got {self.config}")

    @property
    def page_format(self) -> PageFormat:
        """The format of the pages it reads."""
        config = self.config
        # The dtype matters to the name of a full-precision scorer only, and is compared beside it.
        scorer = resolve(config.scorer, config.kv_dtype or "float32")
        return PageFormat(config.page_size, scorer, config.kv_dtype)

    def budget_tokens(self, num_tokens: int) -> int:
        """Tokens a step may read per layer and kv head with `num_tokens` stored, in whole pages."""
        page_size = self.config.page_size
        num_pages = -(-num_tokens // page_size)
        return min(self.config.page_budget(num_pages), num_pages) * page_size

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that distinguishes this method from others, as JSON values."""
        config = self.config.to_dict()
        for name in ("max_kv_bytes", "record_selection"):  # change nothing of what is computed
            del config[name]
        config["token_budget"] = self.config.token_budget
        config["group_reduction"] = self.config.op_group_reduction
        if self.policy == FULL_CACHE:  # reads everything, however it would choose
            config = {name: config[name] for name in ("page_size", "kv_dtype")}
        return {"policy": self.policy, **config, "staged": self.staged}

    @property
    def label(self) -> str:
        """A name for tables and bars: the policy, its budget, and every setting that is not the default."""
        config, default = self.config, SparseConfig()
        words = [self.policy]
        if self.policy != FULL_CACHE:
            budget = str(config.token_budget) if config.keep_ratio is None else f"{config.keep_ratio:.0%}"
            words += [config.scorer, budget]
        text = f"{' '.join(words)}, page {config.page_size}"
        if self.policy != FULL_CACHE:
            for name in ("group_reduction", "num_sink_pages", "num_recent_pages", "dense_layers"):
                if getattr(config, name) != getattr(default, name):
                    text += f", {name} {getattr(config, name)}"
        if config.kv_dtype is not None:
            text += f", {config.kv_dtype}"
        return text + (", staged" if self.staged else "")


def full_cache(config: SparseConfig) -> Method:
    """The method that reads every page, in the page format of `config`."""
    return Method(policy=FULL_CACHE, config=config.replace(keep_ratio=1.0))


def grid(policies: Sequence[str], configs: Iterable[SparseConfig]) -> list[Method]:
    """Every policy with every config, each method once; `full_cache` once, with the first config."""
    methods: dict[str, Method] = {}
    for method in _every(policies, list(configs)):
        methods.setdefault(repr(sorted(method.facts.items())), method)
    return list(methods.values())


def _every(policies: Sequence[str], configs: list[SparseConfig]) -> Iterator[Method]:
    for policy in policies:
        if policy == FULL_CACHE:
            yield full_cache(configs[0])
            continue
        for config in configs:
            yield Method(policy=policy, config=config)
