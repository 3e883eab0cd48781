"""`Method`: a policy with its settings and plugins, one line of a comparison.

Two methods are the same when `facts` is; results name the method by it, so that a run can be taken up again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tinyserve.errors import UsageError
from tinyserve.eval.staged import StagedQueryAware
from tinyserve_ops import SparseConfig, plugins, policies
from tinyserve_ops.plugins import Plugin, PluginStack
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

__all__ = ["Method", "PageFormat", "full_cache", "grid", "named_plugin", "named_policy", "with_options"]

_Named = TypeVar("_Named", Policy, Plugin)


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
        plugins: on top of the policy, in their order.
        staged: the ablation of the fused op: scoring, selection and attention as three calls (the same
            numbers); only with the query-aware policy, which alone has a fused op.

    Raises:
        UsageError: policy, plugins and config don't go together.
    """

    policy: Policy = dataclasses.field(default_factory=QueryAware)
    config: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    plugins: tuple[Plugin, ...] = ()
    staged: bool = False

    def __post_init__(self) -> None:
        try:
            self._resolved(self.config.dense_layers + 1)
        except (ValueError, TypeError) as error:
            raise UsageError(f"policy {self.policy.name}: {error}") from error
        if self.staged and (self.plugins or not isinstance(self.policy, QueryAware)):
            raise UsageError(f"staged: expected policy {QueryAware.name} without plugins, got {self.label}")

    def _resolved(self, num_layers: int) -> tuple[PluginStack | None, PolicyPlan]:
        plan = PolicyPlan.make(self.policy, self.config, num_layers)
        return PluginStack.make(self.plugins, plan, self.config, num_layers)

    @property
    def executed_policy(self) -> Policy:
        """The policy that a cache is given."""
        return StagedQueryAware() if self.staged else self.policy

    @property
    def eviction(self) -> EvictionPolicy | None:
        """The rule by which tokens are taken out of the cache: the policy's, or a plugin's."""
        plan = self._resolved(self.config.dense_layers + 1)[1]
        return plan.eviction

    def reads_logits(self, num_layers: int) -> bool:
        """Whether tokens may leave a model of so many layers early."""
        stack = self._resolved(num_layers)[0]
        return stack is not None and bool(stack.logit_layers)

    def page_format(self, num_layers: int) -> PageFormat:
        """The format of the pages it reads in a model of so many layers."""
        config = self.config
        # The dtype matters to the name of a full-precision scorer only, and is compared beside it.
        scorer = resolve(config.scorer, config.page_size, config.kv_dtype or "float32")
        groups = self._resolved(num_layers)[1].layer_groups
        return PageFormat(config.page_size, scorer, config.kv_dtype, groups)

    def covers(self, num_tokens: int) -> bool:
        """Whether it must read every one of `num_tokens` tokens, as the full cache does."""
        if self.plugins:
            return False
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
        if self.policy.reads_all and not isinstance(self.policy, EvictionPolicy):
            return num_tokens
        if isinstance(self.policy, EvictionPolicy):
            own = self.policy.token_budget
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
        stacked = {"plugins": [plugin.to_dict() for plugin in self.plugins]} if self.plugins else {}
        return {
            "policy": self.policy.name,
            "policy_options": dataclasses.asdict(self.policy),
            **stacked,
            **config,
            "staged": self.staged,
        }

    @property
    def _unused(self) -> tuple[str, ...]:
        """Fields of the config that change nothing under this policy."""
        scoring = ("scorer", "group_reduction")
        forced = ("num_sink_pages", "num_recent_pages")
        if isinstance(self.policy, EvictionPolicy):
            return (*scoring, *forced)
        if self.policy.reads_all:
            return (*scoring, *forced, "token_budget", "keep_ratio", "dense_layers")
        if isinstance(self.policy, SelectionPolicy) and not self.policy.scans_summaries:
            return scoring
        return ()

    @property
    def label(self) -> str:
        """A name for tables and bars: the policy, its budget, and every setting that is not the default."""
        config, default, unused = self.config, SparseConfig(), self._unused
        words = [self.policy.name]
        if "scorer" not in unused:
            words.append(config.scorer)
        if "token_budget" not in unused:
            ratio = config.keep_ratio
            words.append(str(config.token_budget) if ratio is None else f"{ratio:.0%}")
        parts = [" ".join(words), f"page {config.page_size}"]
        parts += _changed(self.policy)
        for name in ("group_reduction", "num_sink_pages", "num_recent_pages", "dense_layers"):
            if name not in unused and getattr(config, name) != getattr(default, name):
                parts.append(f"{name} {getattr(config, name)}")
        parts += [config.kv_dtype] if config.kv_dtype is not None else []
        parts += [" ".join([f"+{plugin.name}", *_changed(plugin)]) for plugin in self.plugins]
        return ", ".join([*parts, "staged"] if self.staged else parts)


def _changed(settings: Policy | Plugin) -> list[str]:
    """The fields that are not the default, with their values."""
    return [
        f"{field.name} {getattr(settings, field.name)}"
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    ]


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


def _get(option: str, get: Callable[..., _Named], text: str) -> _Named:
    name, options = with_options(text)
    try:
        return get(name, **options)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{option}: {error}") from error


def named_policy(text: str) -> Policy:
    """The policy of `NAME` or `NAME:OPTION=VALUE,...`.

    Raises:
        UsageError: no such policy or option, or a value that it cannot have.
    """
    return _get("--policy", policies.get, text)


def named_plugin(text: str) -> Plugin:
    """The plugin of `NAME` or `NAME:OPTION=VALUE,...`.

    Raises:
        UsageError: no such plugin or option, or a value that it cannot have.
    """
    return _get("--plugin", plugins.get, text)


Pipeline = tuple[Policy, tuple[Plugin, ...]]


def grid(pipelines: Sequence[Pipeline], configs: Iterable[SparseConfig]) -> list[Method]:
    """Every policy (with its plugins) with every config that it goes with; what makes no difference to a
    policy gives no second method.

    Raises:
        UsageError: a policy goes with none of them.
    """
    methods: dict[str, Method] = {}
    for method in _every(pipelines, list(configs)):
        methods.setdefault(json.dumps(method.facts, sort_keys=True), method)
    return list(methods.values())


def _every(pipelines: Sequence[Pipeline], configs: list[SparseConfig]) -> Iterator[Method]:
    for policy, stacked in pipelines:
        refused: UsageError | None = None
        num_made = 0
        for config in configs:
            try:
                method = Method(policy=policy, config=config, plugins=stacked)
            except UsageError as error:  # of several scorers, a policy may take one
                refused = error
                continue
            num_made += 1
            yield method
        if refused is not None and not num_made:
            raise refused
