"""Plugins on tensors: registry, stages in their order, stacking, and nothing at all without them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dense_mirror import NUM_KV_HEADS, NUM_LAYERS, new_cache
from policy_cases import POLICIES, feed, make_inputs, over

from tinyserve_ops import SparseConfig, plugins
from tinyserve_ops.plugins import Plugin, PluginRun, Selection

SMALL = SparseConfig(page_size=4, token_budget=24, dense_layers=1, scorer="low_rank")


@dataclass(frozen=True, kw_only=True)
class Watch(Plugin):
    """Writes down the stages it sees; changes nothing."""

    name = "watch"
    seen: list[Any] = field(default_factory=list, compare=False)

    def start(self) -> PluginRun:
        return WatchRun(self.seen)


class WatchRun(PluginRun):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def prefill_done(self, event):
        self.seen.append(("prefill_done", event))

    def pages_scored(self, step, page_scores):
        self.seen.append(("pages_scored", (step, page_scores)))
        return page_scores

    def pages_selected(self, step, page_scores, selection):
        self.seen.append(("pages_selected", (step, page_scores, selection)))
        return selection

    def page_evicted(self, event):
        self.seen.append(("page_evicted", event))

    def report(self):
        return {"seen": len(self.seen)}


@dataclass(frozen=True, kw_only=True)
class Shift(Plugin):
    """Adds to the scores, so that order shows; drops the page before the last from the lists."""

    name = "shift"
    by: float = 1.0

    def start(self) -> PluginRun:
        return ShiftRun(self.by)


class ShiftRun(PluginRun):
    def __init__(self, by: float) -> None:
        self.by = by

    def pages_scored(self, step, page_scores):
        return page_scores + self.by

    def pages_selected(self, step, page_scores, selection):
        pages, counts = selection.selected_pages.clone(), selection.num_selected - 1
        pages.scatter_(2, counts.long()[..., None], -1)
        return Selection(pages, counts)

    def report(self):
        return {}


def run(*, policy=None, chosen=None, config=SMALL, prompt=50, pieces=(1,) * 6):
    """Outputs after the prompt of one sequence, [layers, tokens, heads, D]; and the cache."""
    inputs = make_inputs(prompt + sum(pieces), seed=7)
    cache = new_cache(config=config, policy=policy, plugins=chosen)
    seq = cache.new_sequence()
    outs, start = [], 0
    for size in (prompt, *pieces):
        outs.append(torch.stack(feed(cache, [(seq, inputs, slice(start, start + size))])))
        start += size
    cache.check()
    return torch.cat(outs[1:], dim=1), cache


def test_a_plugin_survives_its_dict_and_json():
    for plugin in map(plugins.get, plugins.names()):
        assert plugins.from_dict(json.loads(plugin.to_json())) == plugin
        assert plugin.to_dict()["name"] == plugin.name
        assert hash(plugin) == hash(copy.deepcopy(plugin))
        assert plugins.resolve([plugin.name]) == plugins.resolve([plugin.to_dict()]) == (plugin,)


def test_unknown_names_parameters_and_types_are_refused_by_name():
    with pytest.raises(ValueError, match=r"plugin: expected one of .*'early_exit'.*, got 'early'"):
        plugins.get("early")
    with pytest.raises(ValueError, match=r"plugin 'early_exit': expected .*, got \['layer'\]"):
        plugins.get("early_exit", layer=3)
    with pytest.raises(ValueError, match="plugin: expected a dict with a name"):
        plugins.from_dict({"threshold": 3})
    with pytest.raises(TypeError, match="plugins: expected a list of plugins, got str"):
        new_cache(plugins="early_exit")
    with pytest.raises(TypeError, match=r"plugins\[1\]: expected a Plugin, a name or a dict, got int"):
        new_cache(plugins=["early_exit", 3])
    with pytest.raises(ValueError, match="plugins: expected each at most once, got 'early_exit'"):
        new_cache(plugins=["early_exit", plugins.EarlyExit(threshold=1.0)])
    with pytest.raises(TypeError, match="enabled: expected a bool, got 1"):
        plugins.EarlyExit(enabled=1)
    with pytest.raises(ValueError, match="name: expected one that is not taken, got 'early_exit'"):
        plugins.register(type("Other", (Plugin,), {"name": "early_exit"}))
    with pytest.raises(ValueError, match="policy: expected one that selects pages with plugins"):
        new_cache(config=SMALL, policy="full_cache", plugins=[Shift()])


@over(POLICIES)
def test_plugins_that_are_off_are_as_if_absent_bit_for_bit(policy):
    expected, absent = run(policy=policy)
    for chosen in ([], [Shift(enabled=False), Watch(enabled=False)]):
        got, cache = run(policy=policy, chosen=chosen)
        assert torch.equal(got, expected)
        assert cache.plugins == absent.plugins  # those of the policy
        assert cache.plugin_reports() == absent.plugin_reports()
        assert (cache.plugin_stack is None) == (policy.name != "entropy_stop")
        assert cache.plan == absent.plan  # the fused op stays the fused op
        assert cache.stats() == absent.stats()


def test_a_plugin_that_changes_nothing_changes_no_bit_though_selection_is_staged():
    expected, absent = run()
    got, cache = run(chosen=[Watch()])
    assert torch.equal(got, expected)
    assert cache.stats() == absent.stats()


def test_stages_come_in_their_order_and_show_the_step():
    watch = Watch()
    _, cache = run(chosen=[watch], pieces=(1, 1))
    stages = [stage for stage, _ in watch.seen]
    assert stages == ["prefill_done"] + ["pages_scored", "pages_selected"] * 2 * (NUM_LAYERS - 1)
    event = watch.seen[0][1]
    assert (event.sequence, event.num_tokens) == (0, 50)
    step, page_scores, selection = watch.seen[-1][1]
    assert step.lengths == (51,)
    assert step.rows.layer_idx == NUM_LAYERS - 1
    assert page_scores.shape[:2] == (1, NUM_KV_HEADS)
    assert selection.num_selected.tolist() == [[6] * NUM_KV_HEADS]
    assert cache.plugin_reports() == {"watch": {"seen": len(watch.seen)}}


@pytest.mark.parametrize("policy", [None, "streaming_llm", "oracle", "soft_prune", "query_aware"])
def test_plugins_stack_in_the_order_they_are_given(policy):
    before, after = Watch(), Watch()
    for chosen in ([before, Shift()], [Shift(), after]):
        run(policy=policy, chosen=chosen, pieces=(1,))
    seen = [dict(watch.seen) for watch in (before, after)]
    scores = [stages["pages_scored"][1] for stages in seen]
    finite = scores[0].isfinite()
    torch.testing.assert_close(scores[1][finite], scores[0][finite] + 1.0)
    counts = [stages["pages_selected"][2].num_selected for stages in seen]
    assert torch.equal(counts[1], counts[0] - 1)


def test_what_a_plugin_takes_from_the_lists_is_not_read():
    _, whole = run(pieces=(1,))
    _, less = run(chosen=[Shift()], pieces=(1,))
    layers = NUM_LAYERS - 1
    assert whole.stats().pages_read - less.stats().pages_read == layers * NUM_KV_HEADS


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_evicted_pages_are_told_with_their_numbers(policy):
    watch = EvictWatch()
    config = SparseConfig(page_size=4, token_budget=32, dense_layers=1)
    _, cache = run(policy=policy, chosen=[watch], config=config, pieces=(1, 1))
    lost = sum(event.num_tokens * len(event.layer_idx) * NUM_KV_HEADS for event in watch.seen)
    assert lost == cache.stats().tokens_evicted > 0
    first = watch.seen[0]
    assert (first.sequence, first.layer_idx, first.num_tokens) == (0, (1, 2), 50 - 32)
    assert first.num_pages == 13 - 8


@dataclass(frozen=True, kw_only=True)
class EvictWatch(Plugin):
    """Writes evictions down."""

    name = "evict_watch"
    seen: list[Any] = field(default_factory=list, compare=False)

    def start(self) -> PluginRun:
        return EvictWatchRun(self.seen)


class EvictWatchRun(PluginRun):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def page_evicted(self, event):
        self.seen.append(event)

    def report(self):
        return {"evictions": len(self.seen)}


def test_keep_tokens_tells_plugins_too():
    watch = EvictWatch()
    cache = new_cache(config=SMALL, plugins=[watch])
    seq = cache.new_sequence()
    feed(cache, [(seq, make_inputs(20, seed=1), slice(0, 20))])
    kept = torch.arange(0, 20, 2).expand(NUM_KV_HEADS, -1)
    cache.keep_tokens(seq, dict.fromkeys(range(NUM_LAYERS), kept))
    (event,) = watch.seen
    assert (event.layer_idx, event.num_tokens, event.num_pages) == ((0, 1, 2), 10, 2)


def test_copies_and_reservations():
    cache = new_cache(config=SMALL, plugins=[Watch()])
    seq = cache.new_sequence()
    feed(cache, [(seq, make_inputs(20, seed=1), slice(0, 20))])
    assert cache.copy().plugins == cache.plugins
    assert cache.copy(plugins=[]).plugins == ()
    with pytest.raises(ValueError, match="plugins: expected none with reserved decoding"):
        cache.reserve([seq], 40)
