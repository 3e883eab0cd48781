"""`Method`: a policy with its settings, one line of a comparison.

Two methods are the same when `facts` is; results name the method by it, so that a run can be taken up again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinyserve.errors import UsageError
from tinyserve_ops import SparseConfig, policies
from tinyserve_ops.policies import (
    EvictionPolicy,
    FullCache,
    Oracle,
    Policy,
    PolicyPlan,
    QueryAware,
    SelectionPolicy,
    StreamingLLM,
)
from tinyserve_ops.scorers import resolve

__all__ = ["Method", "PageFormat", "full_cache", "grid", "named_policy", "with_options"]


@dataclass(frozen=True)
class PageFormat:
    """What two methods must have in common to share pages."""

    page_size: int
    scorer: str
    kv_dtype: str | None
    layer_groups: tuple[tuple[int, ...], ...] | None

    @property
    def is_exact(self) -> bool:
        """Whether pages hold keys and values in the model's own type."""
        return self.kv_dtype is None


@dataclass(frozen=True, kw_only=True)
class Method:
    """How decode steps attend.

    Attributes:
        policy: what is left out. The full cache does not look at the config's budget.
        config: page size, budget, scorer and the rest.
        staged: the ablation of the fused op: scoring, selection and attention as three calls (the same
            numbers); only with the query-aware policy, which alone has a fused op.

    Raises:
        UsageError: policy and config don't go together.
    """

    policy: Policy = dataclasses.field(default_factory=QueryAware)
    config: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    staged: bool = False

    def __post_init__(self) -> None:
        try:
            self.policy.check(self.config)
        except ValueError as error:
            raise UsageError(f"policy {self.policy.name}: {error}") from error
        if self.staged and not isinstance(self.policy, QueryAware):
            raise UsageError(f"staged: expected policy {QueryAware.name}, got {self.policy.name}")

    @property
    def eviction(self) -> EvictionPolicy | None:
        """The policy, where it takes tokens out of the cache."""
        return self.policy if isinstance(self.policy, EvictionPolicy) else None

    @property
    def selects(self) -> bool:
        """Whether steps choose pages."""
        return isinstance(self.policy, SelectionPolicy)

    def page_format(self, num_layers: int) -> PageFormat:
        """The format of the pages it reads in a model of so many layers."""
        config = self.config
        # The dtype matters to the name of a full-precision scorer only, and is compared beside it.
        scorer = resolve(config.scorer, config.kv_dtype or "float32")
        groups = PolicyPlan.make(self.policy, config, num_layers).layer_groups
        return PageFormat(config.page_size, scorer, config.kv_dtype, groups)

    def covers(self, num_tokens: int) -> bool:
        """Whether it must read every one of `num_tokens` tokens, as the full cache does."""
        if isinstance(self.policy, FullCache):
            return True
        by_budget = isinstance(self.policy, (QueryAware, Oracle)) or self.policy == StreamingLLM()
        return by_budget and self.config.covers(num_tokens)

    def budget_tokens(self, num_tokens: int) -> int:
        """Tokens that a step may read per layer and kv head with `num_tokens` given: in whole pages where
        pages are selected, the mean over the layers where their budgets differ.
        """
        page_size = self.config.page_size
        num_pages = -(-num_tokens // page_size)
        if isinstance(self.policy, FullCache):
            return num_tokens
        if self.eviction is not None:
            own = self.eviction.token_budget
            ratio = self.config.keep_ratio
            budget = own or self.config.token_budget or round((ratio or 1.0) * num_tokens)
            return min(budget, num_tokens)
        if isinstance(self.policy, StreamingLLM) and self.policy.window is not None:
            return min(self.config.num_sink_pages + self.policy.window // page_size, num_pages) * page_size
        return min(self.config.page_budget(num_pages), num_pages) * page_size

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that distinguishes this method from others, as JSON values; None for what it does not
        look at.
        """
        config = self.config.to_dict()
        for name in ("max_kv_bytes", "record_selection"):  # change nothing of what is computed
            del config[name]
        config["token_budget"] = self.config.token_budget
        config["group_reduction"] = self.config.op_group_reduction
        for name in self._unused:
            config[name] = None
        return {
            "policy": self.policy.name,
            "policy_options": dataclasses.asdict(self.policy),
            **config,
            "staged": self.staged,
        }

    @property
    def _unused(self) -> tuple[str, ...]:
        """Fields of the config that change nothing under this policy."""
        scoring = ("scorer", "group_reduction")
        forced = ("num_sink_pages", "num_recent_pages")
        if isinstance(self.policy, FullCache):
            return (*scoring, *forced, "token_budget", "keep_ratio", "dense_layers")
        if isinstance(self.policy, EvictionPolicy):
            return (*scoring, *forced)
        if isinstance(self.policy, SelectionPolicy) and not self.policy.scans_summaries:
            return scoring
        return ()

    @property
    def label(self) -> str:
        """A name for tables and bars: the policy, its budget, and every setting that is not the default."""
        config, default, unused = self.config, SparseConfig(), self._unused
        changed = {
            field.name: getattr(self.policy, field.name)
            for field in dataclasses.fields(self.policy)
            if getattr(self.policy, field.name) != field.default
        }
        words = [self.policy.name]
        if "scorer" not in unused:
            words.append(config.scorer)
        if "token_budget" not in unused:
            ratio = config.keep_ratio
            words.append(str(config.token_budget) if ratio is None else f"{ratio:.0%}")
        parts = [" ".join(words), f"page {config.page_size}"]
        parts += [f"{name} {value}" for name, value in changed.items()]
        for name in ("group_reduction", "num_sink_pages", "num_recent_pages", "dense_layers"):
            if name not in unused and getattr(config, name) != getattr(default, name):
                parts.append(f"{name} {getattr(config, name)}")
        parts += [config.kv_dtype] if config.kv_dtype is not None else []
        return ", ".join([*parts, "staged"] if self.staged else parts)


def full_cache(config: SparseConfig) -> Method:
    """The method that reads every page, in the page format of `config`."""
    return Method(policy=FullCache(), config=config)


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `NAME` or `NAME:OPTION=VALUE,...`; a value that is JSON means what it says.

    Raises:
        UsageError: an option without a value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        option, is_there, value = pair.partition("=")
        if not is_there:
            raise UsageError(f"{name}: expected options as OPTION=VALUE, got {pair!r}")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return name, options


def named_policy(text: str) -> Policy:
    """The policy of `NAME` or `NAME:OPTION=VALUE,...`.

    Raises:
        UsageError: no such policy or option, or a value that it cannot have.
    """
    name, options = with_options(text)
    try:
        return policies.get(name, **options)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--policy: {error}") from error


def grid(chosen: Sequence[Policy], configs: Iterable[SparseConfig]) -> list[Method]:
    """Every policy with every config that it goes with; what makes no difference to a policy gives no second
    method.

    Raises:
        UsageError: a policy goes with none of them.
    """
    methods: dict[str, Method] = {}
    for method in _every(chosen, list(configs)):
        methods.setdefault(json.dumps(method.facts, sort_keys=True), method)
    return list(methods.values())


def _every(chosen: Sequence[Policy], configs: list[SparseConfig]) -> Iterator[Method]:
    for policy in chosen:
        refused: UsageError | None = None
        num_made = 0
        for config in configs:
            try:
                method = Method(policy=policy, config=config)
            except UsageError as error:  # of several scorers, a policy may take one
                refused = error
                continue
            num_made += 1
            yield method
        if refused is not None and not num_made:
            raise refused
