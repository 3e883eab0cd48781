"""Token pruning against a mirror in float64 that holds each kv head's tokens in plain lists."""

from __future__ import annotations

import copy

import pytest
import torch
from dense_mirror import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, SM_SCALE, new_cache
from policy_cases import feed
from policy_cases import make_inputs as flat_inputs

from tinyserve_ops import SparseConfig
from tinyserve_ops.plugins import ApproximateAttention, TokenPruning

PAGE = 4
CONFIG = SparseConfig(page_size=PAGE, token_budget=4096, dense_layers=1, scorer="low_rank")
GROUP = NUM_HEADS // NUM_KV_HEADS
PRUNING = TokenPruning(threshold=0.4, every=8, num_first=2, num_last=6)


def make_inputs(num_tokens, seed):
    """All queries look for the same channel of the keys, so that all of them pass some tokens over."""
    inputs = flat_inputs(num_tokens, seed)
    for q, _, _ in inputs:
        q[..., 0] += 4
    return inputs


class Mirror:
    """One sequence in one layer: tokens of each kv head, their sums, and attention over what is left."""

    def __init__(self, layer_inputs, plugin):
        self.q, self.k, self.v = (x.double() for x in layer_inputs)
        self.plugin = plugin
        self.tokens = [[] for _ in range(NUM_KV_HEADS)]
        self.got = [{} for _ in range(NUM_KV_HEADS)]
        self.uniform = [{} for _ in range(NUM_KV_HEADS)]
        self.last_round = self.num_tokens = 0

    def feed(self, num_new, *, prompt=False):
        outs = []
        for token in range(self.num_tokens, self.num_tokens + num_new):
            out = torch.empty(NUM_HEADS, HEAD_DIM, dtype=torch.float64)
            for head, held in enumerate(self.tokens):
                held.append(token)
                self.got[head][token] = self.uniform[head][token] = 0.0
                for query_head in range(head * GROUP, (head + 1) * GROUP):
                    shares = (self.k[held, head] @ self.q[token, query_head] * SM_SCALE).softmax(0)
                    out[query_head] = shares @ self.v[held, head]
                    for other, share in zip(held, shares.tolist(), strict=True):
                        self.got[head][other] += share
                        self.uniform[head][other] += 1 / len(held)
            outs.append(out)
        self.num_tokens += num_new
        if prompt or self.num_tokens - self.last_round >= self.plugin.every:
            self.last_round = self.num_tokens
            self.prune()
        return torch.stack(outs)

    def prune(self):
        length = len(self.tokens[0])
        stays = []
        for head, held in enumerate(self.tokens):
            protected = {*held[: self.plugin.num_first], *held[length - self.plugin.num_last :]}
            low = {t for t in held if self.got[head][t] < self.plugin.threshold * self.uniform[head][t]}
            stays.append([t for t in held if t in protected or t not in low])
        number = max(map(len, stays))
        if -(-number // PAGE) == -(-length // PAGE):
            return
        for head, held in enumerate(self.tokens):
            rest = sorted(
                set(held) - set(stays[head]), key=lambda t: -self.got[head][t] / self.uniform[head][t]
            )
            self.tokens[head] = sorted(stays[head] + rest[: number - len(stays[head])])


def check(cache, seq, mirrors):
    for layer in range(1, NUM_LAYERS):
        assert cache.kept_tokens(layer, seq).tolist() == mirrors[layer].tokens
    cache.check()


@pytest.mark.parametrize("policy", [None, "full_cache", "streaming_llm", "query_aware"])
def test_tokens_of_low_attention_are_dropped_and_their_pages_freed(policy):
    inputs = make_inputs(120, seed=6)
    cache = new_cache(config=CONFIG, policy=policy, plugins=[PRUNING])
    seq = cache.new_sequence()
    mirrors = [Mirror(layer, PRUNING) for layer in inputs]
    start = 0
    for size in (60, *[1] * 20, 7, 1, 12, *[1] * 9):
        outs = feed(cache, [(seq, inputs, slice(start, start + size))])
        for layer in range(1, NUM_LAYERS):
            expected = mirrors[layer].feed(size, prompt=start == 0)
            torch.testing.assert_close(outs[layer].double(), expected, atol=1e-5, rtol=1e-5)
        start += size
        check(cache, seq, mirrors)
    assert cache.kept_tokens(0, seq).size(1) == cache.next_position(seq) == start
    lost = [start - len(mirror.tokens[0]) for mirror in mirrors[1:]]
    assert min(lost) > 10
    report = cache.plugin_reports()["token_pruning"]
    assert report["tokens_dropped"] == sum(lost)
    assert report["rounds"] > 2 * (NUM_LAYERS - 1)
    assert cache.stats().tokens_evicted == sum(lost) * NUM_KV_HEADS
    used = sum(len(cache.page_ids(seq, group)) for group in range(1, len(cache.layer_groups)))
    assert used == sum(-(-len(mirror.tokens[0]) // PAGE) for mirror in mirrors[1:])
    assert report["pages_freed"] >= sum(lost) // PAGE - report["rounds"]


def test_a_prompt_in_pieces_is_pruned_when_it_is_complete():
    inputs = make_inputs(70, seed=6)
    whole, cut = (new_cache(config=CONFIG, plugins=[PRUNING]) for _ in range(2))
    for cache in (whole, cut):
        cache.new_sequence()
    feed(whole, [(0, inputs, slice(0, 60))])
    for start, stop in ((0, 30), (30, 31), (31, 60)):
        feed(cut, [(0, inputs, slice(start, stop))], prompt_goes_on=() if stop == 60 else (0,))
    for layer in range(NUM_LAYERS):
        assert torch.equal(whole.kept_tokens(layer, 0), cut.kept_tokens(layer, 0))
    assert whole.kept_tokens(1, 0).size(1) < 60


def test_a_threshold_of_zero_drops_nothing_and_changes_no_bit():
    inputs = make_inputs(80, seed=2)
    found = []
    for plugins in (None, [TokenPruning(threshold=0.0, every=1)], [TokenPruning(enabled=False)]):
        cache = new_cache(config=CONFIG.replace(token_budget=24), plugins=plugins)
        cache.new_sequence()
        feed(cache, [(0, inputs, slice(0, 60))])
        found.append([torch.stack(feed(cache, [(0, inputs, slice(i, i + 1))])) for i in range(60, 80)])
        assert cache.stats().tokens_evicted == 0
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_forks_and_copies_prune_on_their_own():
    inputs, other = make_inputs(90, seed=6), make_inputs(90, seed=9)
    cache = new_cache(config=CONFIG, plugins=[PRUNING], max_tokens=1024)
    seq = cache.new_sequence()
    mirrors = [Mirror(layer, PRUNING) for layer in inputs]
    feed(cache, [(seq, inputs, slice(0, 60))])
    for mirror in mirrors:
        mirror.feed(60, prompt=True)
    fork, copied = cache.fork(seq), copy.deepcopy(cache)
    for token in range(60, 90):
        feed(cache, [(seq, inputs, slice(token, token + 1)), (fork, other, slice(token, token + 1))])
        feed(copied, [(seq, inputs, slice(token, token + 1))])
        for mirror in mirrors:
            mirror.feed(1)
    check(cache, seq, mirrors)
    check(copied, seq, mirrors)
    assert not torch.equal(cache.kept_tokens(2, fork), cache.kept_tokens(2, seq))


def test_estimates_of_unread_pages_follow_the_pages_that_pruning_makes():
    config = CONFIG.replace(token_budget=16)
    inputs = make_inputs(100, seed=6)
    caches = [
        new_cache(config=config, plugins=plugins, max_tokens=1024)
        for plugins in ([PRUNING, ApproximateAttention()], [ApproximateAttention(), PRUNING])
    ]
    for cache in caches:
        cache.new_sequence()
        feed(cache, [(0, inputs, slice(0, 60))])
    for token in range(60, 100):
        first, second = (torch.stack(feed(c, [(0, inputs, slice(token, token + 1))])) for c in caches)
        assert torch.equal(first, second)
        # A cache that meets the same stored tokens for the first time makes its means from scratch.
        fresh = caches[0].copy(plugins=[ApproximateAttention()])
        probe = make_inputs(1, seed=token)
        got = feed(caches[0].copy(), [(0, probe, slice(0, 1))])
        expected = feed(fresh, [(0, probe, slice(0, 1))])
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    reports = caches[0].plugin_reports()
    assert reports["token_pruning"]["tokens_dropped"] > 0
    assert reports["approximate_attention"]["pages_estimated"] > 0


def test_what_can_not_be_honoured_is_refused_by_name():
    with pytest.raises(ValueError, match="plugins: expected at most one plugin or policy that evicts tokens"):
        new_cache(config=CONFIG, policy="h2o", plugins=[PRUNING])
    cache = new_cache(config=CONFIG, plugins=[PRUNING])
    cache.new_sequence()
    inputs = make_inputs(40, seed=6)
    with pytest.raises(ValueError, match="window: expected -1 where tokens are evicted"):
        feed(cache, [(0, inputs, slice(0, 40))], 16)
    feed(cache, [(0, inputs, slice(0, 40))])
    with pytest.raises(ValueError, match="length: expected 0, or at least 40"):
        cache.crop(0, 39)
    plain = new_cache(config=CONFIG, layer_groups=[[0], [1], [2]])
    plain.new_sequence()
    feed(plain, [(0, inputs, slice(0, 40))])
    with pytest.raises(ValueError, match="policy: expected None, or sequences whose beginning"):
        plain.copy(plugins=[PRUNING])
    with pytest.raises(ValueError, match="num_last: expected an integer >= 1, got 0"):
        TokenPruning(num_last=0)


def test_layers_whose_tokens_were_taken_out_at_different_times_know_what_they_have():
    cache = new_cache(config=CONFIG, layer_groups=[[0], [1], [2]])
    cache.new_sequence()
    inputs = make_inputs(30, seed=1)
    feed(cache, [(0, inputs, slice(0, 20))])
    cache.keep_tokens(0, {1: torch.arange(0, 20, 2).expand(NUM_KV_HEADS, -1)})
    feed(cache, [(0, inputs, slice(20, 30))])
    cache.keep_tokens(0, {2: torch.arange(5, 30).expand(NUM_KV_HEADS, -1)})
    assert cache.kept_tokens(1, 0)[0].tolist() == [*range(0, 20, 2), *range(20, 30)]
    cache.keep_tokens(0, {1: torch.arange(9, 12).expand(NUM_KV_HEADS, -1)})
    assert cache.kept_tokens(1, 0)[0].tolist() == [18, 20, 21]
    assert cache.kept_tokens(2, 0)[0].tolist() == [*range(5, 30)]
