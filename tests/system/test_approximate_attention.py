"""Approximate attention against plain torch in float64 over the keys and values that were fed."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import pytest
import torch
from dense_mirror import NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, SM_SCALE, new_cache, oracle
from policy_cases import feed, make_inputs

from tinyserve_ops import SparseConfig
from tinyserve_ops.plugins import ApproximateAttention, Plugin, PluginRun

PAGE = 4
SMALL = SparseConfig(
    page_size=PAGE, token_budget=24, dense_layers=1, scorer="low_rank", record_selection=True
)
GROUP = NUM_HEADS // NUM_KV_HEADS
POLICIES = [None, "query_aware", "streaming_llm", "oracle", "soft_prune"]


@dataclass(frozen=True, kw_only=True)
class WatchScores(Plugin):
    """Keeps the last scores of each layer."""

    name = "watch_scores"
    scores: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    def start(self) -> PluginRun:
        return WatchScoresRun(self.scores)


class WatchScoresRun(PluginRun):
    def __init__(self, scores: dict[int, torch.Tensor]) -> None:
        self.scores = scores

    def pages_scored(self, step, page_scores):
        self.scores[step.rows.layer_idx] = page_scores
        return page_scores

    def report(self):
        return {}


def estimate(inputs, layer, token, pages, window=-1):
    """Attention of a token over selected pages [Hkv, width] and the means of the other full ones."""
    q, k, v = (x.double() for x in inputs[layer])
    out = torch.empty(NUM_HEADS, q.size(2), dtype=torch.float64)
    first = max(0, token - window + 1) if window > 0 else 0
    for head in range(NUM_HEADS):
        listed = set(pages[head // GROUP].tolist())
        keys, values, bias = [], [], []
        for page in range(token // PAGE + 1):
            part = slice(page * PAGE, min((page + 1) * PAGE, token + 1))
            if page in listed:
                part = slice(max(part.start, first), part.stop)
                keys += k[part, head // GROUP].unbind()
                values += v[part, head // GROUP].unbind()
                bias += [0.0] * (part.stop - part.start)
            elif part.start >= first:
                keys.append(k[part, head // GROUP].mean(0))
                values.append(v[part, head // GROUP].mean(0))
                bias.append(math.log(PAGE))
        logits = torch.stack(keys) @ q[token, head] * SM_SCALE + torch.tensor(bias, dtype=torch.float64)
        out[head] = logits.softmax(0) @ torch.stack(values)
    return out


def start(prompt, *, config=SMALL, policy=None, total=90, seed=5, window=-1, before=(), **parameters):
    inputs = make_inputs(total, seed=seed)
    cache = new_cache(config=config, policy=policy, plugins=[*before, ApproximateAttention(**parameters)])
    cache.new_sequence()
    feed(cache, [(0, inputs, slice(0, prompt))], window)
    return cache, inputs


def step(cache, inputs, token, seq=0, window=-1):
    return torch.stack(feed(cache, [(seq, inputs, slice(token, token + 1))], window))[:, 0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [-1, 30])
@pytest.mark.parametrize("prompt", [2, 50])
def test_pages_that_are_not_read_are_estimated_by_their_means(policy, prompt, window):
    cache, inputs = start(prompt, policy=policy, window=window)
    for token in range(prompt, prompt + 10):
        outs = step(cache, inputs, token, window=window)
        selected = cache.selection_history()[-1].selected_pages
        for layer in range(1, NUM_LAYERS):
            expected = estimate(inputs, layer, token, selected[layer][0], window)
            torch.testing.assert_close(outs[layer].double(), expected, atol=1e-5, rtol=1e-5)
    report = cache.plugin_reports()["approximate_attention"]
    assert report["rows"] == 10 * (NUM_LAYERS - 1)
    assert report["pages_left_out"] == 0
    assert (report["pages_estimated"] > 0) == (prompt == 50)


def test_the_estimate_is_exact_where_the_keys_of_a_page_are_equal():
    inputs = make_inputs(61, seed=3)
    for layer in range(NUM_LAYERS):
        q, k, v = inputs[layer]
        paged = k[: k.size(0) // PAGE * PAGE].unflatten(0, (-1, PAGE))
        paged[:] = paged[:, :1]
    with_means, without = (
        new_cache(config=SMALL, plugins=[ApproximateAttention(enabled=on)]) for on in (True, False)
    )
    for cache in (with_means, without):
        cache.new_sequence()
        feed(cache, [(0, inputs, slice(0, 60))])
    got, sparse = (step(cache, inputs, 60) for cache in (with_means, without))
    for layer in range(1, NUM_LAYERS):
        q, k, v = inputs[layer]
        expected = oracle(q[60:61], k, v)[0]
        torch.testing.assert_close(got[layer].double(), expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(sparse[layer].double(), expected, atol=1e-2)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.8, 0.97])
def test_the_best_pages_are_read_until_they_hold_top_p(top_p):
    config = SMALL.replace(token_budget=64)
    watch = WatchScores()
    cache, inputs = start(70, config=config, before=[watch], top_p=top_p, estimate=False)
    full, _ = start(70, config=config, top_p=1.0, estimate=False)
    counts = set()
    for token in range(70, 80):
        step(cache, inputs, token)
        step(full, inputs, token)
        kept, budget = (c.selection_history()[-1].selected_pages for c in (cache, full))
        last = token // PAGE
        for layer in range(1, NUM_LAYERS):
            for head in range(NUM_KV_HEADS):
                scores = watch.scores[layer][0, head, : last + 1].double()
                shares = scores.masked_fill(~scores.isfinite(), -torch.inf).softmax(0)
                listed = [page for page in budget[layer][0, head].tolist() if page >= 0]
                forced = [page for page in listed if page < 1 or page > last - 2]
                expected, held = list(forced), float(shares[forced].sum())
                for page in sorted(set(listed) - set(forced), key=lambda page: -float(shares[page])):
                    if held >= top_p:
                        break
                    expected.append(page)
                    held += float(shares[page])
                got = [page for page in kept[layer][0, head].tolist() if page >= 0]
                assert got == sorted(expected)
                counts.add(len(got))
    left_out = cache.plugin_reports()["approximate_attention"]["pages_left_out"]
    assert left_out == full.stats().pages_read - cache.stats().pages_read
    if top_p < 0.9:
        assert left_out > 0
    if top_p == 0:
        assert counts == {3}


@pytest.mark.parametrize("policy", ["streaming_llm", "oracle", "soft_prune"])
@pytest.mark.parametrize("window", [-1, 30])
def test_how_tokens_are_cut_into_forwards_changes_nothing(policy, window):
    found = []
    for pieces in ([1] * 40, [13, 27], [16, 16, 8]):
        cache, inputs = start(37, policy=policy, window=window)
        outs, at = [], 37
        for size in pieces:
            outs.append(torch.stack(feed(cache, [(0, inputs, slice(at, at + size))], window)))
            at += size
        found.append(torch.cat(outs, dim=1))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_means_follow_crops_forks_and_forwards_that_fail(kv_dtype):
    config = SMALL.replace(kv_dtype=kv_dtype)
    cache, inputs = start(61, config=config)
    other = make_inputs(90, seed=11)
    for token in range(61, 70):  # pages 15 and 16 fill
        step(cache, inputs, token)
    fork = cache.fork(0)
    forward = cache.begin([(0, 3)])  # page 17 fills, and the forward is given up
    for layer in range(NUM_LAYERS):
        forward.attend(layer, *(x[70:73] for x in other[layer]), SM_SCALE)
    forward.abandon()
    copied = copy.deepcopy(cache)
    cache.crop(0, 62)
    feed(cache, [(0, other, slice(62, 68))])  # pages 15 and 16 are written again, by a longer forward
    fresh, _ = start(62, config=config)
    feed(fresh, [(0, other, slice(62, 68))])
    for token in range(68, 74):
        assert torch.equal(step(cache, other, token), step(fresh, other, token))
    fresh, _ = start(70, config=config)
    for token in range(70, 76):
        expected = step(fresh, inputs, token)
        assert torch.equal(step(cache, inputs, token, seq=fork), expected)
        assert torch.equal(step(copied, inputs, token), expected)


def test_means_are_made_anew_after_tokens_were_taken_out():
    cache, inputs = start(60)
    step(cache, inputs, 60)
    kept = torch.arange(1, 61).expand(NUM_KV_HEADS, -1)
    cache.keep_tokens(0, dict.fromkeys(range(NUM_LAYERS), kept))
    outs = step(cache, inputs, 61)
    later = [tuple(x[1:] for x in layer) for layer in inputs]
    selected = cache.selection_history()[-1].selected_pages
    for layer in range(1, NUM_LAYERS):
        expected = estimate(later, layer, 60, selected[layer][0])
        torch.testing.assert_close(outs[layer].double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_a_batch_are_what_they_are_alone():
    cache, inputs = start(60)
    other = make_inputs(90, seed=8)
    seq = cache.new_sequence()
    feed(cache, [(seq, other, slice(0, 33))])
    together = torch.stack(feed(cache, [(0, inputs, slice(60, 61)), (seq, other, slice(33, 34))]))
    for row, (tokens, prompt) in enumerate(((inputs, 60), (other, 33))):
        alone, _ = start(1)
        single = alone.new_sequence()
        feed(alone, [(single, tokens, slice(0, prompt))])
        assert torch.equal(together[:, row], step(alone, tokens, prompt, seq=single))


def test_what_does_not_fit_is_refused_by_name():
    low = ApproximateAttention(top_p=0.9)
    with pytest.raises(ValueError, match="scorer: expected low_rank for plugin approximate_attention"):
        new_cache(config=SMALL.replace(scorer="bounds"), plugins=[low])
    with pytest.raises(ValueError, match="group_reduction: expected softmax for plugin"):
        new_cache(config=SMALL.replace(group_reduction="max"), plugins=[low])
    with pytest.raises(ValueError, match="policy: expected None or one of"):
        new_cache(config=SMALL, policy="streaming_llm", plugins=[low])
    with pytest.raises(ValueError, match="policy: expected one that selects pages"):
        new_cache(config=SMALL, policy="h2o", plugins=[ApproximateAttention()])
    with pytest.raises(ValueError, match="top_p: expected a number from"):
        ApproximateAttention(top_p=1.5)
