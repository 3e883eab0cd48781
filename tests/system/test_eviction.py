"""Taking tokens out of stored sequences, and the policies that decide which: against plain torch."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from dense_mirror import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    SM_SCALE,
    DenseMirror,
    new_cache,
    oracle,
)
from policy_cases import EVICTING, Inputs, feed, make_inputs, over

from tinyserve_ops import OutOfPagesError, PagedKVCache, SparseConfig
from tinyserve_ops.policies import H2O, PyramidKV, SnapKV, SoftPrune, TokenRows

PAGES_OF_4 = SparseConfig(page_size=4, token_budget=24, dense_layers=0, scorer="low_rank")
GROUP = NUM_HEADS // NUM_KV_HEADS


def random_kept(length: int, num_kept: int, seed: int = 0) -> dict[int, torch.Tensor]:
    """Another choice for every layer and kv head."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: torch.stack(
            [
                torch.randperm(length, generator=generator)[:num_kept].sort().values
                for _ in range(NUM_KV_HEADS)
            ]
        )
        for layer in range(NUM_LAYERS)
    }


# keep_tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("length", "num_kept"), [(30, 30), (30, 17), (30, 16), (30, 1), (30, 0), (32, 8)])
def test_each_head_keeps_its_tokens_bit_for_bit(dtype, length, num_kept):
    mirror = DenseMirror(new_cache(config=PAGES_OF_4.replace(kv_dtype=dtype)))
    cache, seq = mirror.cache, mirror.new(length)
    before = [cache.dense(layer, seq) for layer in range(NUM_LAYERS)]
    kept = random_kept(length, num_kept)
    cache.keep_tokens(seq, kept)
    cache.check()
    assert (cache.length(seq), cache.num_tokens(seq), cache.next_position(seq)) == (num_kept, length, length)
    for layer in range(NUM_LAYERS):
        assert torch.equal(cache.kept_tokens(layer, seq), kept[layer])
        for got, old in zip(cache.dense(layer, seq), before[layer], strict=True):
            index = kept[layer][:, :, None].expand(-1, -1, HEAD_DIM)
            assert torch.equal(got, old.gather(1, index))
    assert cache.pool.groups[0].allocator.num_used == -(-num_kept // 4)
    assert cache.stats().tokens_evicted == (length - num_kept) * NUM_LAYERS * NUM_KV_HEADS


def test_what_is_kept_is_attended_and_what_comes_later_follows_it():
    mirror = DenseMirror(new_cache(config=PAGES_OF_4.replace(token_budget=4096)))
    cache, seq = mirror.cache, mirror.new(30)
    first, second = random_kept(30, 13), random_kept(22, 9, seed=1)
    cache.keep_tokens(seq, first)
    gone = copy.deepcopy(mirror.tokens)

    def expected(rows: slice, chosen: list[torch.Tensor], q: torch.Tensor, k, v) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.float64)
        for head in range(NUM_KV_HEADS):
            heads = slice(head * GROUP, (head + 1) * GROUP)
            keys, values = (x[:, head : head + 1] for x in (k[chosen[head]], v[chosen[head]]))
            out[:, heads] = oracle(q[:, heads], keys, values)
        return out[rows]

    for count, num_tokens in ((1, 31), (6, 37), (1, 38), (1, 39)):
        forward = cache.begin([(seq, count)])
        assert forward.positions().tolist() == list(range(num_tokens - count, num_tokens))
        for layer in range(NUM_LAYERS):
            q, k, v = (mirror.random(count, n) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
            out = forward.attend(layer, q, k, v, SM_SCALE)
            old_k, old_v = gone[seq][layer]
            gone[seq][layer] = (torch.cat([old_k, k]), torch.cat([old_v, v]))
            later = torch.arange(30, num_tokens)
            chosen = [torch.cat([first[layer][head], later]) for head in range(NUM_KV_HEADS)]
            want = expected(slice(None), chosen, q, *gone[seq][layer])
            torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        forward.commit()
    # Once more, over what was kept before and what came since.
    cache.keep_tokens(seq, second)
    for layer in range(NUM_LAYERS):
        text = torch.cat([first[layer], torch.arange(30, 39).expand(NUM_KV_HEADS, -1)], dim=1)
        assert torch.equal(cache.kept_tokens(layer, seq), text.gather(1, second[layer]))
    assert (cache.length(seq), cache.num_tokens(seq)) == (9, 39)
    cache.check()


def test_pages_of_kept_tokens_are_sealed_like_fresh_ones():
    mirror = DenseMirror(new_cache(config=PAGES_OF_4))
    cache, seq = mirror.cache, mirror.new(30)
    kept = random_kept(30, 18)
    cache.keep_tokens(seq, kept)
    fresh = new_cache(config=PAGES_OF_4)
    other = fresh.new_sequence()
    forward = fresh.begin([(other, 18)])
    for layer in range(NUM_LAYERS):
        k, v = (
            torch.stack([x[kept[layer][head], head] for head in range(NUM_KV_HEADS)], dim=1)
            for x in mirror.tokens[seq][layer]
        )
        forward.attend(layer, torch.zeros(18, NUM_HEADS, HEAD_DIM), k, v, SM_SCALE)
    forward.commit()
    for layer in range(NUM_LAYERS):
        summaries = [
            c.pool.layers[layer].page_summary[c.page_ids(s).long()[:4]]
            for c, s in ((cache, seq), (fresh, other))
        ]
        assert torch.equal(*summaries)


def test_forks_and_pins_keep_what_an_eviction_takes_away():
    mirror = DenseMirror(new_cache(config=PAGES_OF_4))
    cache, seq = mirror.cache, mirror.new(30)
    forked = mirror.fork(seq)
    other = cache.copy()
    cache.pin(seq)
    cache.keep_tokens(seq, random_kept(30, 10))
    mirror.assert_contents(forked)
    assert other.num_tokens(seq) == other.length(seq) == 30
    cache.free(forked)
    other.free(seq)
    other.free(forked)
    assert cache.pool.groups[0].allocator.num_used == 8 + 3  # the pinned ones and the new ones
    cache.unpin(seq)
    assert cache.pool.groups[0].allocator.num_used == 3
    cache.check()
    again = cache.fork(seq)
    assert torch.equal(cache.kept_tokens(1, again), cache.kept_tokens(1, seq))
    cache.reset(seq)
    assert (cache.length(seq), cache.num_tokens(seq), cache.next_position(seq)) == (0, 0, 0)
    assert cache.kept_tokens(0, seq).shape == (NUM_KV_HEADS, 0)
    assert (cache.length(again), cache.num_tokens(again)) == (10, 30)
    cache.check()


def test_without_pages_for_what_stays_nothing_happens():
    config = PAGES_OF_4.replace(max_kv_bytes=None)
    probe = new_cache(config=config)
    page_bytes = probe.pool.groups[0].bytes_per_page
    mirror = DenseMirror(new_cache(config=config.replace(max_kv_bytes=10 * page_bytes)))
    cache, seq = mirror.cache, mirror.new(30)  # 8 of 10 pages
    with pytest.raises(OutOfPagesError):
        cache.keep_tokens(seq, random_kept(30, 9))
    cache.check()
    mirror.assert_contents(seq)
    cache.keep_tokens(seq, random_kept(30, 8))
    assert cache.pool.groups[0].allocator.num_used == 2


def test_lengths_may_differ_between_layer_groups():
    mirror = DenseMirror(new_cache(config=PAGES_OF_4, layer_groups=[[0], [1, 2]]))
    cache, seq = mirror.cache, mirror.new(30)
    kept = random_kept(30, 11)
    cache.keep_tokens(seq, {0: kept[0]})
    cache.keep_tokens(seq, {layer: random_kept(30, 7)[layer] for layer in (1, 2)})
    assert [cache.length(seq, group) for group in range(2)] == [11, 7]
    assert cache.num_tokens(seq) == 30
    mirror.step([(seq, 3)], check=False)
    assert [cache.length(seq, group) for group in range(2)] == [14, 10]
    cache.crop(seq, 31)
    assert [cache.length(seq, group) for group in range(2)] == [12, 8]
    assert [cache.dense(layer, seq)[0].size(1) for layer in range(NUM_LAYERS)] == [12, 8, 8]
    assert (cache.num_tokens(seq), cache.next_position(seq)) == (31, 31)
    cache.check()


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({3: torch.zeros(2, 1, dtype=torch.int64)}, "kept: expected layers 0 to 2, got 3"),
        (
            {0: torch.zeros(2, 1, dtype=torch.int64)},
            r"kept: expected all layers of a layer group .* \[1, 2\]",
        ),
        (
            dict.fromkeys(range(3), torch.zeros(1, 1, dtype=torch.int64)),
            r"kept\[0\]: expected shape \[2, 1\]",
        ),
        (dict.fromkeys(range(3), torch.tensor([[1, 0], [0, 1]])), r"kept\[0\]: expected ascending .* 0 to 9"),
        (dict.fromkeys(range(3), torch.tensor([[0, 0], [0, 1]])), "expected ascending"),
        (dict.fromkeys(range(3), torch.tensor([[0, 10], [0, 1]])), "expected ascending"),
        (dict.fromkeys(range(3), torch.tensor([[-1, 1], [0, 1]])), "expected ascending"),
    ],
)
def test_tokens_that_can_not_be_kept_are_refused_by_layer(kept, message):
    mirror = DenseMirror(new_cache(config=PAGES_OF_4))
    seq = mirror.new(10)
    with pytest.raises(ValueError, match=message):
        mirror.cache.keep_tokens(seq, kept)
    with pytest.raises(TypeError, match=r"kept\[0\]: expected an int64 tensor, got torch.int32"):
        mirror.cache.keep_tokens(seq, {0: torch.zeros(2, 1, dtype=torch.int32)})
    mirror.assert_contents(seq)


def test_what_needs_all_tokens_is_refused_by_name_after_an_eviction():
    mirror = DenseMirror(new_cache(config=PAGES_OF_4))
    cache, seq = mirror.cache, mirror.new(32)
    cache.keep_tokens(seq, random_kept(32, 12))
    for call in (
        lambda: cache.register_page(seq, 0, b"key", [1, 2, 3, 4]),
        lambda: cache.attach_cached(seq, b"key", [1, 2, 3, 4]),
        lambda: cache.reserve([seq], 64),
        lambda: cache.export([seq]),
    ):
        with pytest.raises(ValueError, match=r"expected (a sequence|sequences) with all (its|their) tokens"):
            call()
    for length in (1, 31):
        with pytest.raises(ValueError, match=rf"length: expected 0, or at least 32 .*, got {length}"):
            cache.crop(seq, length)
    with pytest.raises(ValueError, match="window: expected -1 where tokens are evicted"):
        mirror.step([(seq, 1)], window=8)
    cache.check()
    cache.crop(seq, 32)
    mirror.step([(seq, 1)], check=False)
    cache.crop(seq, 0)
    mirror.tokens[seq] = [(k[:0], v[:0]) for k, v in mirror.tokens[seq]]
    mirror.step([(seq, 9)])
    mirror.step([(seq, 1)], window=8)
    mirror.assert_contents(seq)


# What the policies keep -------------------------------------------------------------------------------------


def shares(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Softmax probabilities in float64, [heads, queries, keys], of q [n, heads, D] at `positions`."""
    keys = k.repeat_interleave(GROUP, dim=1).double()
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * SM_SCALE
    return logits.masked_fill(torch.arange(k.size(0)) > positions[:, None], -torch.inf).softmax(-1)


def snapkv_kept(q, k, window: int, kernel: int, pooling: str, budget: int) -> torch.Tensor:
    """SnapKV's choice, element by element."""
    length = k.size(0)
    positions = torch.arange(length - window, length)
    mean = shares(q[-window:], k, positions)[..., : length - window].mean(1)  # [heads, earlier tokens]
    pooled = torch.zeros_like(mean)
    for i in range(mean.size(1)):
        neighbours = range(i - kernel // 2, i - kernel // 2 + kernel)
        values = torch.stack(
            [mean[:, j] if 0 <= j < mean.size(1) else torch.zeros(NUM_HEADS) for j in neighbours]
        )
        pooled[:, i] = values.mean(0) if pooling == "avg" else values.max(0).values
    scores = pooled.unflatten(0, (NUM_KV_HEADS, GROUP)).mean(1)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : budget - window]
    return torch.cat([best, positions.expand(NUM_KV_HEADS, -1)], dim=1).sort(dim=1).values


def prefill(policy, inputs: Inputs, *, config=PAGES_OF_4, cuts=(), **options) -> PagedKVCache:
    """A cache with one prompt, in one forward or cut."""
    cache = new_cache(config=config, policy=policy, **options)
    seq = cache.new_sequence()
    length = len(inputs[0][0])
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        feed(cache, [(seq, inputs, slice(start, stop))], prompt_goes_on=() if stop == length else (seq,))
    cache.check()
    return cache


@pytest.mark.parametrize("cuts", [(), (20, 61), (66, 69)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "pooling"), [(1, "avg"), (5, "avg"), (5, "max"), (4, "avg"), (16, "max")], ids=str
)
def test_snapkv_keeps_what_the_last_queries_look_at(kernel, pooling, cuts):
    inputs = make_inputs(70, seed=4)
    policy = SnapKV(window=7, kernel_size=kernel, pooling=pooling)
    cache = prefill(policy, inputs, cuts=cuts)
    assert cache.length(0) == 24
    assert (cache.num_tokens(0), cache.next_position(0)) == (70, 70)
    for layer, (q, k, _) in enumerate(inputs):
        expected = snapkv_kept(q, k, 7, kernel, pooling, 24)
        assert torch.equal(cache.kept_tokens(layer, 0), expected)


@pytest.mark.parametrize("length", [1, 6, 7, 23, 24, 25])
def test_short_prompts_are_kept_whole(length):
    for policy in (SnapKV(window=7), PyramidKV(window=7, token_budget=24), H2O()):
        cache = prefill(policy, make_inputs(length, seed=4))
        assert cache.length(0) == min(length, 24)
        for token in range(3):
            feed(cache, [(0, make_inputs(3, seed=5), slice(token, token + 1))])
        assert cache.num_tokens(0) == length + 3


def test_the_observation_window_is_kept_where_a_ratio_is_less():
    cache = prefill(SnapKV(window=16), make_inputs(40, seed=4), config=PAGES_OF_4.replace(keep_ratio=0.2))
    assert cache.kept_tokens(0, 0).tolist() == [list(range(24, 40))] * NUM_KV_HEADS
    for config, policy, name in (
        (PAGES_OF_4, {}, "token_budget of the config"),
        (PAGES_OF_4.replace(keep_ratio=0.2), {"token_budget": 24}, "token_budget"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected at least the window of 32 tokens, got 24"):
            new_cache(config=config, policy=SnapKV(**policy))


@pytest.mark.parametrize(
    ("length", "budget", "beta", "expected"),
    [
        # 12 layers; from 2b - b/beta down to b/beta.
        (4000, 512, 20, [998, 910, 822, 733, 645, 556, 468, 379, 291, 202, 114, 26]),
        # The first layer can't keep more than lies before the window.
        (1000, 600, 20, [992, 921, 849, 778, 707, 636, 564, 493, 422, 351, 279, 208]),
        (1000, 600, 1, [600] * 12),
        (4000, 100, 20, [100] * 12),  # the last layer would keep less than the window
        (90, 100, 20, [100] * 12),
    ],
)
def test_pyramidkv_budgets_fall_linearly_and_add_up_to_snapkvs(length, budget, beta, expected):
    policy = PyramidKV(window=8, beta=beta, token_budget=budget)
    config = SparseConfig(dense_layers=2)
    got = [policy.budget(config, layer, 14, length) for layer in range(2, 14)]
    assert got == expected
    assert abs(sum(got) - 12 * budget) <= 6  # rounding
    assert policy.layer_groups(14, config) == [[0, 1], *([layer] for layer in range(2, 14))]
    assert policy.layer_groups(2, SparseConfig(dense_layers=0)) == [[0], [1]]
    assert policy.layer_groups(2, config) == [[0, 1]]


def test_pyramidkv_keeps_snapkvs_best_in_every_layer():
    inputs = make_inputs(120, seed=4)
    cache = prefill(PyramidKV(window=4, beta=3, kernel_size=3), inputs)
    assert [cache.length(0, group) for group in range(3)] == [40, 24, 8]
    for layer, (q, k, _) in enumerate(inputs):
        expected = snapkv_kept(q, k, 4, 3, "avg", (40, 24, 8)[layer])
        assert torch.equal(cache.kept_tokens(layer, 0), expected)


def h2o_run(inputs: Inputs, layer: int, prompt: int, budget: int):
    """H2O one query at a time, by positions in the text: tokens alive after each step, and its outputs."""
    q, k, v = inputs[layer]
    alive = [list(range(prompt)) for _ in range(NUM_KV_HEADS)]
    scores = shares(q[:prompt], k[:prompt], torch.arange(prompt)).sum(1)
    scores = scores.unflatten(0, (NUM_KV_HEADS, GROUP)).sum(1)
    scores = torch.cat([scores, torch.zeros(NUM_KV_HEADS, q.size(0) - prompt)], dim=1)

    def cut(head: int) -> None:
        while len(alive[head]) > budget:
            old = alive[head][: len(alive[head]) - (budget - budget // 2)]
            alive[head].remove(min(old, key=lambda token: (float(scores[head, token]), -token)))

    for head in range(NUM_KV_HEADS):
        cut(head)
    history, outs = [[list(row) for row in alive]], []
    for token in range(prompt, q.size(0)):
        out = torch.empty(NUM_HEADS, HEAD_DIM, dtype=torch.float64)
        for head in range(NUM_KV_HEADS):
            alive[head].append(token)
            heads = slice(head * GROUP, (head + 1) * GROUP)
            probabilities = (q[token, heads].double() @ k[alive[head], head].double().T * SM_SCALE).softmax(
                -1
            )
            out[heads] = probabilities @ v[alive[head], head].double()
            scores[head, alive[head]] += probabilities.sum(0)
            cut(head)
        outs.append(out)
        history.append([list(row) for row in alive])
    return history, torch.stack(outs)


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 7], [1, 10, 1]], ids=str)
@pytest.mark.parametrize(("prompt", "budget"), [(60, 24), (20, 24), (30, 7), (30, 1)])
def test_h2o_keeps_heavy_hitters_and_the_latest_tokens_after_every_token(prompt, budget, pieces):
    inputs = make_inputs(prompt + 12, seed=6)
    cache = prefill(H2O(token_budget=budget), tuple_slice(inputs, prompt), cuts=(prompt // 2,))
    expected = [h2o_run(inputs, layer, prompt, budget) for layer in range(NUM_LAYERS)]
    done = 0
    for size in pieces:
        outs = feed(cache, [(0, inputs, slice(prompt + done, prompt + done + size))])
        done += size
        for layer, (history, wanted) in enumerate(expected):
            assert cache.kept_tokens(layer, 0).tolist() == history[done]
            torch.testing.assert_close(outs[layer].double(), wanted[done - size : done], rtol=1e-4, atol=1e-5)
    cache.check()
    assert cache.length(0) == min(budget, prompt + 12)


def tuple_slice(inputs: Inputs, stop: int) -> Inputs:
    """The first tokens."""
    return [tuple(x[:stop] for x in layer) for layer in inputs]


def test_h2o_scores_of_long_prompts_do_not_depend_on_blocks():
    inputs = make_inputs(700, seed=8)  # more than two blocks of queries
    cache = prefill(H2O(token_budget=100), inputs, cuts=(123,), max_tokens=1024)
    for layer, (q, k, _) in enumerate(inputs):
        scores = shares(q, k, torch.arange(700)).sum(1).unflatten(0, (NUM_KV_HEADS, GROUP)).sum(1)
        heavy = scores[:, :650].topk(50, dim=1).indices.sort(dim=1).values
        expected = torch.cat([heavy, torch.arange(650, 700).expand(NUM_KV_HEADS, -1)], dim=1)
        assert torch.equal(cache.kept_tokens(layer, 0), expected)


# Around the policies ----------------------------------------------------------------------------------------


@over(EVICTING)
def test_a_forward_that_is_dropped_leaves_no_trace_in_what_a_policy_remembers(policy):
    inputs = make_inputs(80, seed=9)
    plain, other = (new_cache(config=PAGES_OF_4, policy=policy) for _ in range(2))
    for cache in (plain, other):
        cache.new_sequence()
    spoilt = make_inputs(80, seed=1)
    for start, stop, goes_on in ((0, 30, (0,)), (30, 60, ()), (60, 61, ()), (61, 80, ())):
        forward = other.begin([(0, stop - start)], prompt_goes_on=goes_on)
        for layer in range(NUM_LAYERS if start != 30 else 1):
            forward.attend(layer, *(x[start:stop] for x in spoilt[layer]), SM_SCALE)
        forward.abandon()
        part = (0, inputs, slice(start, stop))
        outs = [feed(cache, [part], prompt_goes_on=goes_on) for cache in (plain, other)]
        assert all(map(torch.equal, *outs))
        for layer in range(NUM_LAYERS):
            assert torch.equal(plain.kept_tokens(layer, 0), other.kept_tokens(layer, 0))
    other.check()


@over(EVICTING)
def test_without_pages_for_what_a_policy_keeps_the_forward_has_not_happened(policy):
    groups = len(new_cache(config=PAGES_OF_4, policy=policy).layer_groups)
    page_bytes = new_cache(config=PAGES_OF_4).pool.groups[0].bytes_per_page
    config = PAGES_OF_4.replace(max_kv_bytes=20 * page_bytes)
    cache = new_cache(config=config, policy=policy)
    inputs = make_inputs(70, seed=9)
    cache.new_sequence()
    other = cache.new_sequence()
    feed(cache, [(other, inputs, slice(0, 8))])
    with pytest.raises(OutOfPagesError):  # 18 pages of 20, and 6 more on average
        feed(cache, [(0, inputs, slice(0, 70))])
    cache.check()
    assert (cache.length(0), cache.num_tokens(0), cache.next_position(0)) == (0, 0, 0)
    assert cache.in_prompt(0)
    assert all(group.allocator.num_used == 2 for group in cache.pool.groups)
    assert cache.stats().tokens_evicted == 0
    cache.free(other)
    feed(cache, [(0, inputs, slice(0, 40))])
    stored = [cache.length(0, group) for group in range(groups)]
    assert sum(stored) == 24 * groups
    cache.check()


@over(EVICTING)
def test_a_prompt_begun_elsewhere_is_finished_under_a_policy_that_can(policy):
    inputs = make_inputs(90, seed=2)
    expected = prefill(policy, inputs, config=PAGES_OF_4)
    layers = [[layer] for layer in range(NUM_LAYERS)]
    shared = new_cache(config=PAGES_OF_4, policy="full_cache", layer_groups=layers)
    shared.new_sequence()
    feed(shared, [(0, inputs, slice(0, 80))], prompt_goes_on=(0,))
    if policy.per_step:
        with pytest.raises(ValueError, match=r"policy: expected FullCache.*, or sequences whose beginning"):
            shared.copy(policy=policy)
        return
    copied = shared.copy(policy=policy)
    feed(copied, [(0, inputs, slice(80, 90))])
    for layer in range(NUM_LAYERS):
        assert torch.equal(copied.kept_tokens(layer, 0), expected.kept_tokens(layer, 0))
    assert shared.length(0) == 80
    late = shared.copy(policy=policy)
    feed(late, [(0, inputs, slice(80, 81))], prompt_goes_on=(0,))
    feed(shared, [(0, inputs, slice(80, 81))])
    with pytest.raises(ValueError, match="policy: expected FullCache"):
        shared.copy(policy=policy)
    few = new_cache(config=PAGES_OF_4, policy="full_cache", layer_groups=layers)
    few.new_sequence()
    feed(few, [(0, inputs, slice(0, 88))], prompt_goes_on=(0,))
    with pytest.raises(ValueError, match=r"window: expected the last . tokens of the prompt .*, got 2"):
        feed(few.copy(policy=policy), [(0, inputs, slice(88, 90))])


def test_layers_that_keep_different_numbers_can_not_share_a_page_table():
    groups = [[0, 1], [2]]
    with pytest.raises(ValueError, match=r"layer_groups: expected each within one of .*, got \(0, 1\)"):
        new_cache(config=PAGES_OF_4, policy=PyramidKV(window=4), layer_groups=groups)
    with pytest.raises(ValueError, match=r"layer_groups: expected each within one of"):
        new_cache(config=PAGES_OF_4.replace(dense_layers=1), policy=SnapKV(window=4), layer_groups=groups)
    cache = new_cache(config=PAGES_OF_4.replace(dense_layers=1), policy=SnapKV(window=4))
    assert cache.layer_groups == ((0,), (1, 2))
    with pytest.raises(ValueError, match="layer_groups: expected each within one of"):
        new_cache(config=PAGES_OF_4).copy(policy=PyramidKV(window=4))


def test_h2o_can_only_be_rolled_back_as_a_whole():
    cache = prefill(H2O(), make_inputs(20, seed=1))
    with pytest.raises(ValueError, match=r"length: expected 0, or at least 20 .*, got 19"):
        cache.crop(0, 19)
    with pytest.raises(ValueError, match="attach_cached: expected a policy that need not see every query"):
        cache.attach_cached(cache.new_sequence(), b"key", [1, 2, 3, 4])
    cache.crop(0, 0)
    assert cache.in_prompt(0)
    feed(cache, [(0, make_inputs(40, seed=1), slice(0, 40))])
    assert cache.length(0) == 24


def test_snapkv_rolls_back_what_came_after_the_prompt():
    inputs = make_inputs(80, seed=1)
    cache = prefill(SnapKV(window=8), tuple_slice(inputs, 60))
    first = feed(cache, [(0, inputs, slice(60, 61))])
    feed(cache, [(0, inputs, slice(61, 70))])
    cache.crop(0, 60)
    assert all(map(torch.equal, first, feed(cache, [(0, inputs, slice(60, 61))])))
    assert (cache.length(0), cache.num_tokens(0), cache.next_position(0)) == (25, 61, 61)
    with pytest.raises(ValueError, match="length: expected 0, or at least 60"):
        cache.crop(0, 59)


@over(EVICTING)
def test_a_policy_that_evicts_imports_nothing(policy):
    source = prefill(None, make_inputs(20, seed=1))
    with pytest.raises(ValueError, match="policy: expected one that evicts nothing"):
        new_cache(config=PAGES_OF_4, policy=policy).import_(source.export([0]))


# Soft pruning -----------------------------------------------------------------------------------------------


class Watched(SoftPrune):
    """Keeps the scores that its pages were chosen by."""

    seen: ClassVar[list[torch.Tensor]] = []

    def score(self, rows: TokenRows) -> torch.Tensor:
        self.seen.append(super().score(rows))
        return self.seen[-1]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9, 2.0])
@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_soft_prune_reads_the_forced_pages_and_those_above_the_threshold(threshold, ratio):
    config = PAGES_OF_4.replace(keep_ratio=ratio, record_selection=True)
    inputs = make_inputs(93, seed=3)
    cache = prefill(Watched(threshold=threshold), tuple_slice(inputs, 90), config=config)
    Watched.seen.clear()
    for token in range(90, 93):
        feed(cache, [(0, inputs, slice(token, token + 1))])
    scores, num_pruned = iter(Watched.seen), 0
    for step, position in zip(cache.selection_history(), range(90, 93), strict=True):
        sealed, last = range((position + 1) // 4), position // 4
        forced, budget = {0, last - 1, last}, config.page_budget(last + 1)
        for layer in range(NUM_LAYERS):
            by_head = next(scores)[0]
            for head in range(NUM_KV_HEADS):
                share = by_head[head, : len(sealed)].double().softmax(0).tolist()
                ranked = sorted(set(sealed) - forced, key=lambda page: -share[page])[: budget - 3]
                passing = {page for page in ranked if share[page] * len(sealed) >= threshold}
                selected = step.selected_pages[layer][0][head].tolist()
                got = [page for page in selected if page >= 0]
                assert got == sorted(forced | passing)
                assert selected == got + [-1] * (len(selected) - len(got))
                num_pruned += budget - len(got)
                if ratio == 1.0:
                    assert sum(share[page] for page in sealed if page not in got) <= threshold
    if ratio == 1.0:
        assert (num_pruned > 0) == (threshold > 0)


def test_soft_prune_wants_scores_that_are_logarithms_of_mass():
    for scorer in ("bounds", "mean", "low_rank_max"):
        with pytest.raises(ValueError, match="scorer: expected low_rank for policy soft_prune"):
            new_cache(config=SparseConfig(scorer=scorer), policy="soft_prune")
    with pytest.raises(ValueError, match="group_reduction: expected softmax for policy soft_prune"):
        new_cache(config=SparseConfig(scorer="low_rank", group_reduction="max"), policy="soft_prune")
