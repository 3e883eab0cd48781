"""`PluginStack`: the plugins of one cache at work, in their order, stage by stage.

Made once per cache from the plugins that are enabled; a cache without any has no stack, and its executor
tests for that once per forward. Values pass through the plugins in the order they were given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tinyserve_ops.config import SparseConfig
from tinyserve_ops.plugins.base import (
    STAGES,
    LayerLogits,
    PageEvicted,
    Plugin,
    PluginRun,
    PrefillDone,
    Selection,
    StepRows,
)
from tinyserve_ops.plugins.registry import PluginLike, get, resolve
from tinyserve_ops.policies.base import TokenRows
from tinyserve_ops.policies.plan import PolicyPlan
from tinyserve_ops.policies.query_aware import QueryAware

if TYPE_CHECKING:
    from tinyserve_ops.sequences import SequenceRecord

__all__ = ["PluginStack"]


class PluginStack:
    """Plugins of a cache.

    Attributes:
        plugins: those that are enabled, those of the policy first.
        logit_layers: layers after which `logits_ready` has something to ask.
    """

    def __init__(self, plugins: Sequence[Plugin], num_layers: int) -> None:
        self.plugins = tuple(plugins)
        self.num_layers = num_layers
        self._runs = tuple((plugin.name, plugin.start()) for plugin in self.plugins)
        self._at = {
            stage: [(name, run) for name, run in self._runs if _takes_part(run, stage)] for stage in STAGES
        }
        self._layers_of = {
            name: run.logit_layers(num_layers) - {num_layers - 1} for name, run in self._at["logits_ready"]
        }
        self.logit_layers = frozenset().union(*self._layers_of.values())

    @classmethod
    def make(
        cls, plugins: Sequence[PluginLike] | None, plan: PolicyPlan, config: SparseConfig, num_layers: int
    ) -> tuple[PluginStack | None, PolicyPlan]:
        """The stack of a cache (None without plugins), and the plan with what they ask of the executor.

        Raises:
            ValueError, TypeError: they don't go with each other, the policy or the config, by name.
        """
        of_policy = () if plan.policy is None else plan.policy.plugins()
        given = resolve(plugins)
        found = resolve([*(get(**values) for values in of_policy), *given])
        enabled = [plugin for plugin in found if plugin.enabled]
        if not enabled:
            return None, plan
        for plugin in enabled:
            plugin.check(config, plan.policy)
        stack = cls(enabled, num_layers)
        if stack.selecting and plan.selection is None:
            if plan.policy is not None and plan.policy.reads_all:
                raise ValueError(
                    f"policy: expected one that selects pages with plugins {stack.selecting}, "
                    f"got {plan.policy}"
                )
            plan = dataclasses.replace(plan, selection=QueryAware())  # stage by stage, not the fused op
        rules = [(plugin.name, rule) for plugin in enabled if (rule := plugin.eviction()) is not None]
        if plan.eviction is not None:
            rules.append((str(plan.policy), plan.eviction))
        if len(rules) > 1:
            raise ValueError(
                "plugins: expected at most one plugin or policy that evicts tokens, "
                f"got {[name for name, _ in rules]}"
            )
        for _, rule in rules:
            groups = tuple(tuple(group) for group in rule.layer_groups(num_layers, config))
            plan = dataclasses.replace(plan, eviction=rule, layer_groups=groups)
        return stack, plan

    @property
    def selecting(self) -> tuple[str, ...]:
        """Names of those that want to see pages being selected, which the fused op does not show."""
        at = {name for stage in ("pages_scored", "pages_selected") for name, _ in self._at[stage]}
        return tuple(name for name, _ in self._runs if name in at)

    def reports(self) -> dict[str, dict[str, Any]]:
        """What each plugin did, by name."""
        return {name: run.report() for name, run in self._runs}

    def resume(self, record: SequenceRecord, num_pages: Sequence[int], group_of_layer: Sequence[int]) -> None:
        """Drops what is remembered of pages that may change.

        Args:
            num_pages: of each layer group, the first so many pages are full and stay as they are.
            group_of_layer: the layer group of each layer.
        """
        for name, run in self._runs:
            memory = record.plugin_memory.get(name, {})
            for layer_idx, value in memory.items():
                memory[layer_idx] = run.resume(value, num_pages[group_of_layer[layer_idx]])

    def prefill_done(self, event: PrefillDone) -> None:
        """Tells all."""
        for _, run in self._at["prefill_done"]:
            run.prefill_done(event)

    def pages_scored(
        self,
        rows: TokenRows,
        lengths: tuple[int, ...],
        records: Sequence[SequenceRecord],
        page_scores: Tensor,
    ) -> Tensor:
        """Scores after all of them."""
        for name, run in self._at["pages_scored"]:
            page_scores = run.pages_scored(_step(name, rows, lengths, records), page_scores)
        return page_scores

    def pages_selected(
        self,
        rows: TokenRows,
        lengths: tuple[int, ...],
        records: Sequence[SequenceRecord],
        page_scores: Tensor,
        selection: Selection,
    ) -> Selection:
        """The selection after all of them."""
        for name, run in self._at["pages_selected"]:
            selection = run.pages_selected(_step(name, rows, lengths, records), page_scores, selection)
        return selection

    def logits_ready(self, layer_idx: int, logits: Tensor) -> Tensor | None:
        """Tokens that one of them lets go, bool [n]; None for none."""
        event = LayerLogits(layer_idx, self.num_layers, logits)
        leaving: Tensor | None = None
        for name, run in self._at["logits_ready"]:
            if layer_idx in self._layers_of[name]:
                answer = run.logits_ready(event)
                if answer is not None:
                    leaving = answer if leaving is None else leaving | answer
        return leaving

    def tokens_left(self, num_frozen: int, num_skipped: int) -> None:
        """Counts for those who look at logits."""
        for _, run in self._at["logits_ready"]:
            run.tokens_left(num_frozen, num_skipped)

    def page_evicted(self, event: PageEvicted) -> None:
        """Tells all."""
        for _, run in self._at["page_evicted"]:
            run.page_evicted(event)


def _takes_part(run: PluginRun, stage: str) -> bool:
    return getattr(type(run), stage) is not getattr(PluginRun, stage)


def _step(
    name: str, rows: TokenRows, lengths: tuple[int, ...], records: Sequence[SequenceRecord]
) -> StepRows:
    return StepRows(rows, lengths, tuple(record.plugin_memory.setdefault(name, {}) for record in records))
