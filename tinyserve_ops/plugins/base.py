"""What a plugin is, and the stages of the pipeline at which the executor asks it.

A policy settles which keys and values a method reads or keeps; a plugin changes what happens at one or more
stages of whatever policy there is, and plugins stack. A plugin is a frozen value without state; what it does
in one cache (counters, hooks) is a `PluginRun`, and what it remembers of one sequence lies in the sequence's
record, is replaced and never changed in place, so that forks carry it along.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.base import Policy, TokenRows
from tinyserve_ops.policies.eviction import EvictionPolicy

__all__ = [
    "STAGES",
    "LayerLogits",
    "PageEvicted",
    "Plugin",
    "PluginRun",
    "PrefillDone",
    "Selection",
    "StepRows",
]

# In the order of a step; a `PluginRun` takes part in the stages whose methods it overrides.
STAGES = ("prefill_done", "pages_scored", "pages_selected", "logits_ready", "page_evicted")


@dataclass(frozen=True)
class PrefillDone:
    """The prompt of a sequence was committed.

    Attributes:
        sequence: its handle.
        num_tokens: tokens of the prompt.
    """

    sequence: int
    num_tokens: int


@dataclass(frozen=True)
class StepRows:
    """New tokens of one layer for which pages are selected, a row for each.

    Attributes:
        rows: queries, tables and pools, as a selection policy sees them.
        lengths: stored tokens before each row's own, on the host.
        memories: of each row, what this plugin remembers of its sequence, by layer; rows of one sequence
            share one mapping. Values are replaced and never changed in place.
    """

    rows: TokenRows
    lengths: tuple[int, ...]
    memories: tuple[MutableMapping[int, Any], ...]


@dataclass(frozen=True)
class Selection:
    """The pages that rows will attend to, and what stands for those that they won't.

    Attributes:
        selected_pages: int32 [rows, num_kv_heads, width], logical pages ascending, -1 padded.
        num_selected: int32 [rows, num_kv_heads].
        estimates: attention over keys that no selected page holds, as pairs of out [rows, num_heads,
            head_dim] and lse fp32 [rows, num_heads]; merged with the attention by their log-sum-exp.
    """

    selected_pages: Tensor
    num_selected: Tensor
    estimates: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True)
class LayerLogits:
    """What the model would answer if it ended after a layer: its final norm and head over the hidden state
    (the "logit lens").

    Attributes:
        layer_idx, num_layers: the layer, of how many.
        logits: [n, vocabulary], of tokens after the prompt that have not left the model yet.
    """

    layer_idx: int
    num_layers: int
    logits: Tensor


@dataclass(frozen=True)
class PageEvicted:
    """Tokens of a sequence were taken out of the layers of a layer group, and pages given back.

    Attributes:
        sequence: its handle.
        layer_idx: the layers of the group.
        num_tokens: tokens that each kv head of each of these layers lost.
        num_pages: pages of the group that the sequence has less than before.
    """

    sequence: int
    layer_idx: tuple[int, ...]
    num_tokens: int
    num_pages: int


class PluginRun:
    """A plugin at work in one cache: override the methods of its stages, and `report`.

    Tensors that are handed in are not changed; a stage answers with new ones or with what it got.
    """

    def prefill_done(self, event: PrefillDone) -> None:
        """Stage 1: a prompt is complete."""

    def pages_scored(self, step: StepRows, page_scores: Tensor) -> Tensor:
        """Stage 2: scores of all pages, fp32 [rows, num_kv_heads, max_pages], before pages are selected."""
        return page_scores

    def pages_selected(self, step: StepRows, page_scores: Tensor, selection: Selection) -> Selection:
        """Stage 3: the pages are chosen and not read yet. At least one page of each row must stay."""
        return selection

    def logits_ready(self, event: LayerLogits) -> Tensor | None:
        """Stage 4, after the layers of `logit_layers`: which tokens leave the model here, bool [n]; None for
        none.
        """
        return None

    def page_evicted(self, event: PageEvicted) -> None:
        """Stage 5: tokens were evicted, by a policy, a plugin or `keep_tokens`."""

    def logit_layers(self, num_layers: int) -> frozenset[int]:
        """Layers after which `logits_ready` is asked, the last one never among them."""
        return frozenset()

    def tokens_left(self, num_frozen: int, num_skipped: int) -> None:
        """Counts one layer of a forward: tokens that had left and were computed and dropped because others
        went on, and tokens for which the layer was not computed.
        """

    def resume(self, memory: Any, num_pages: int) -> Any:
        """What remains of a layer's memory when only the first `num_pages` full pages are certain to be the
        same; asked before each forward.
        """
        return memory

    def report(self) -> dict[str, Any]:
        """What it did in this cache: JSON values."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method report, got none")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Base of all plugins: a frozen dataclass of JSON values with a name.

    Args:
        enabled: False is the same as leaving the plugin out, bit for bit and in time.

    Attributes:
        name: key in the registry.
    """

    name: ClassVar[str] = ""
    enabled: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled: expected a bool, got {self.enabled!r}")

    def check(self, config: SparseConfig, policy: Policy | None) -> None:
        """Raises ValueError, by name, where config or policy of a cache don't go with this plugin."""

    def start(self) -> PluginRun:
        """Its work in one cache."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method start, got none")

    def eviction(self) -> EvictionPolicy | None:
        """The rule by which tokens are evicted, where the plugin evicts any."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """`name` and the fields; accepted by `plugins.from_dict`."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict())
