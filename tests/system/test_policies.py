"""Policies on tensors: every policy over the same cache, and what each of them in particular reads."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from dense_mirror import NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, SM_SCALE, DenseMirror, new_cache, oracle
from op_calls import OpCalls
from policy_cases import PER_TOKEN, POLICIES, WINDOWED, feed, make_inputs, over

from tinyserve_ops import SparseConfig, policies
from tinyserve_ops.policies import Oracle, Policy, QueryAware, StreamingLLM

SMALL = SparseConfig(page_size=4, token_budget=24, dense_layers=1, scorer="low_rank")
every_policy = over(POLICIES)


class StagedQueryAware(QueryAware):
    """Query-aware selection that the executor may not fuse."""

    fused = False


def run(policy: Policy | str | None, prompt: int, pieces: list[int], *, config=SMALL, window=-1, **options):
    """Outputs after the prompt of one sequence that is fed in pieces, [layers, tokens, heads, D]; and the
    cache.
    """
    inputs = make_inputs(prompt + sum(pieces), seed=7)
    cache = new_cache(config=config, policy=policy, **options)
    seq = cache.new_sequence()
    outs, start = [], 0
    for size in [prompt, *pieces]:
        outs.append(torch.stack(feed(cache, [(seq, inputs, slice(start, start + size))], window)))
        start += size
    cache.check()
    return torch.cat(outs[1:], dim=1), cache


# Registry ---------------------------------------------------------------------------------------------------


def test_a_policy_survives_its_dict_and_json():
    for policy in (*map(policies.get, policies.names()), StreamingLLM(window=64)):
        assert policies.from_dict(json.loads(policy.to_json())) == policy
        assert policy.to_dict()["name"] == policy.name
        assert hash(policy) == hash(copy.deepcopy(policy))


def test_unknown_names_parameters_and_types_are_refused_by_name():
    with pytest.raises(ValueError, match=r"policy: expected one of .*'streaming_llm'.*, got 'streaming'"):
        policies.get("streaming")
    with pytest.raises(ValueError, match=r"policy 'streaming_llm': expected .*'window'.*, got \['windows'\]"):
        policies.get("streaming_llm", windows=3)
    with pytest.raises(TypeError, match="policy: expected a Policy, a name or None, got int"):
        new_cache(policy=3)
    with pytest.raises(ValueError, match="policy: expected a dict with a name"):
        policies.from_dict({"window": 3})
    with pytest.raises(ValueError, match="window: expected an integer >= 1, got 0"):
        StreamingLLM(window=0)
    with pytest.raises(ValueError, match=r"window: expected at least 32 tokens .*, got 31"):
        new_cache(policy=StreamingLLM(window=31))


def test_a_class_of_ones_own_is_registered_once():
    class Own(Oracle):
        name = "own"

    try:
        assert policies.register(Own) is Own
        assert policies.register(Own) is Own
        assert isinstance(new_cache(policy="own").policy, Own)

        class Other(Oracle):
            name = "own"

        with pytest.raises(ValueError, match="name: expected one that is not taken, got 'own'"):
            policies.register(Other)
    finally:
        policies.registry._registry._classes.pop("own", None)


# Every policy -----------------------------------------------------------------------------------------------


BIG = SMALL.replace(token_budget=4096, dense_layers=0)


@pytest.mark.parametrize(
    ("policy", "window"),
    [(policy, -1) for policy in POLICIES] + [(policy, 9) for policy in WINDOWED],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_budget_above_the_length_equals_full_attention(policy, window):
    if policy.name == "soft_prune":
        policy = policies.get("soft_prune", threshold=0)
    mirror = DenseMirror(new_cache(config=BIG, policy=policy))
    seqs = [mirror.new(30), mirror.new(3), mirror.new(1)]
    for counts in ((1, 1, 1), (1, 5, 2), (7, 1, 0), (1, 1, 1)):
        mirror.step(list(zip(seqs, counts, strict=True)), window=window)
    for seq in seqs:
        mirror.assert_contents(seq)


@every_policy
def test_a_budget_above_the_length_equals_full_attention_bit_for_bit_in_single_steps(policy):
    if policy.name == "soft_prune":
        policy = policies.get("soft_prune", threshold=0)
    expected, _ = run("full_cache", 30, [1] * 6, config=BIG)
    got, _ = run(policy, 30, [1] * 6, config=BIG)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("policy", "window"),
    [(policy, -1) for policy in PER_TOKEN] + [(policy, 13) for policy in PER_TOKEN if policy in WINDOWED],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("config", [SMALL, SMALL.replace(keep_ratio=0.3)], ids=["budget", "ratio"])
def test_how_tokens_are_cut_into_forwards_changes_nothing(policy, config, window):
    single, cache = run(policy, 37, [1] * 40, config=config, window=window)
    for pieces in ([13, 27], [16, 16, 8], [40], [1, 39]):
        got, other = run(policy, 37, pieces, config=config, window=window)
        torch.testing.assert_close(got, single, rtol=1e-5, atol=1e-5)
        assert other.next_position(0) == other.num_tokens(0) == 77
        for layer in range(NUM_LAYERS):
            assert torch.equal(other.kept_tokens(layer, 0), cache.kept_tokens(layer, 0))


@every_policy
def test_a_small_budget_leaves_something_out(policy):
    _, cache = run(policy, 90, [1] * 4)
    stats = cache.stats()
    left_out = stats.pages_read < stats.pages_visible or stats.tokens_evicted
    assert bool(left_out) == (policy.name not in ("full_cache", "entropy_stop"))


@every_policy
def test_a_prompt_in_pieces_is_the_same_prompt(policy):
    inputs = make_inputs(50, seed=3)
    whole, cut = (new_cache(config=SMALL, policy=policy) for _ in range(2))
    for cache in (whole, cut):
        cache.new_sequence()
    feed(whole, [(0, inputs, slice(0, 40))])
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        feed(cut, [(0, inputs, slice(start, stop))], prompt_goes_on=() if stop == 40 else (0,))
        assert cut.in_prompt(0) == (stop < 40)
    for token in range(40, 50):
        outs = [feed(cache, [(0, inputs, slice(token, token + 1))]) for cache in (whole, cut)]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)


@every_policy
def test_a_row_of_a_batch_equals_the_row_alone(policy):
    config = SMALL.replace(keep_ratio=0.4)
    lengths, pieces = (37, 6, 61), ((1, 1, 1), (3, 1, 0), (1, 6, 2), (1, 1, 1))
    inputs = [make_inputs(100, seed=row) for row in range(3)]
    together = new_cache(config=config, policy=policy)
    alone = [new_cache(config=config, policy=policy) for _ in range(3)]
    for cache in (*[together] * 3, *alone):
        cache.new_sequence()
    done = [0, 0, 0]
    for counts in (lengths, *pieces):
        parts = [slice(at, at + n) for at, n in zip(done, counts, strict=True)]
        outs = feed(together, [(row, inputs[row], parts[row]) for row in range(3)])
        first = 0
        for row, n in enumerate(counts):
            if n:
                expected = feed(alone[row], [(0, inputs[row], parts[row])])
                for out, other in zip(outs, expected, strict=True):
                    torch.testing.assert_close(out[first : first + n], other, rtol=1e-5, atol=1e-5)
            first += n
            done[row] += n
    together.check()


@every_policy
def test_a_fork_and_a_deepcopy_go_on_like_their_source(policy):
    inputs = make_inputs(60, seed=11)
    cache = new_cache(config=SMALL, policy=policy)
    seq = cache.new_sequence()
    feed(cache, [(seq, inputs, slice(0, 40))])
    feed(cache, [(seq, inputs, slice(40, 41))])
    forked, other = cache.fork(seq), copy.deepcopy(cache)
    assert other.policy == cache.policy
    for token in range(41, 50):
        one = slice(token, token + 1)
        outs = feed(cache, [(seq, inputs, one), (forked, inputs, one)])
        copied = feed(other, [(seq, inputs, one)])
        for out, same in zip(outs, copied, strict=True):
            assert torch.equal(out[0], out[1])
            assert torch.equal(out[0], same[0])
    cache.free(seq)
    feed(cache, [(forked, inputs, slice(50, 60))])
    cache.check()
    other.check()


def test_one_prefill_is_decoded_under_several_policies_by_copies():
    inputs = make_inputs(60, seed=5)
    shared = new_cache(config=SMALL, policy="full_cache")
    shared.new_sequence()
    feed(shared, [(0, inputs, slice(0, 50))])
    for policy in WINDOWED:
        own = new_cache(config=SMALL, policy=policy)
        own.new_sequence()
        feed(own, [(0, inputs, slice(0, 50))])
        copied = shared.copy(policy=policy)
        assert copied.pool is shared.pool
        for token in range(50, 60):
            outs = [feed(cache, [(0, inputs, slice(token, token + 1))]) for cache in (own, copied)]
            for out, expected in zip(*outs, strict=True):
                assert torch.equal(out, expected)
    smaller = shared.copy(config=SMALL.replace(token_budget=12), policy="query_aware")
    assert smaller.config.token_budget == 12
    with pytest.raises(ValueError, match=r"config\.page_size: expected 4"):
        shared.copy(config=SMALL.replace(page_size=8))


@over([policy for policy in POLICIES if not policy.reservable])
def test_reserved_decoding_refuses_what_a_compiled_step_can_not_honour(policy):
    cache = new_cache(config=SMALL, policy=policy)
    seq = cache.new_sequence()
    with pytest.raises(ValueError, match="policy: expected None, full_cache or query_aware with reserved"):
        cache.reserve([seq], 32)
    cache.check()


def test_a_reserved_full_cache_reads_everything():
    inputs = make_inputs(60, seed=5)
    cache = new_cache(config=SMALL, policy="full_cache")
    seq = cache.new_sequence()
    feed(cache, [(seq, inputs, slice(0, 50))])
    expected = feed(cache.copy(), [(seq, inputs, slice(50, 51))])
    with cache.reserve([seq], 60) as reserved:
        for layer in range(NUM_LAYERS):
            out = reserved.attend(layer, *(x[50:51] for x in inputs[layer]), SM_SCALE)
            assert torch.equal(out, expected[layer])
        reserved.advance()
    assert not cache.stats().selection_engaged
    assert cache.stats().dense_steps == NUM_LAYERS


def test_a_prompt_that_has_ended_or_is_not_in_the_batch_can_not_go_on():
    cache = new_cache(config=SMALL)
    a, b = cache.new_sequence(), cache.new_sequence()
    for batch, named in (([(a, 3)], b), ([(a, 3)], 77)):
        with pytest.raises(
            ValueError, match=f"prompt_goes_on: expected sequences of the batch .*, got {named}"
        ):
            cache.begin(batch, prompt_goes_on=(named,))
    feed(cache, [(a, make_inputs(3, 1), slice(0, 3))])
    with pytest.raises(ValueError, match="prompt_goes_on"):
        cache.begin([(a, 3)], prompt_goes_on=(a,))
    cache.crop(a, 2)
    assert not cache.in_prompt(a)
    cache.crop(a, 0)
    assert cache.in_prompt(a)


# Query-aware ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", ["bounds", "mean_std", "low_rank"])
@pytest.mark.parametrize("policy", [QueryAware(), StagedQueryAware()], ids=["fused", "staged"])
def test_query_aware_equals_no_policy_bit_for_bit(policy, scorer):
    config = SMALL.replace(scorer=scorer, page_size=8, record_selection=True)
    expected, plain = run(None, 61, [1, 1, 5, 1], config=config)
    got, cache = run(policy, 61, [1, 1, 5, 1], config=config)
    assert torch.equal(got, expected)
    assert cache.stats() == plain.stats()
    assert cache.stats().selection_engaged
    for step, other in zip(cache.selection_history(), plain.selection_history(), strict=True):
        assert all(torch.equal(step.selected_pages[n], other.selected_pages[n]) for n in other.selected_pages)


# Streaming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5]])
@pytest.mark.parametrize("window", [None, 16])
def test_streaming_llm_attends_to_the_sinks_and_the_last_pages_before_each_token(pieces, window):
    config = SMALL.replace(dense_layers=0, num_sink_pages=2)
    prompt, num_recent = 45, 4  # of 6 pages, 2 are sinks; a window of 16 tokens is 4 pages as well
    got, cache = run(StreamingLLM(window=window), prompt, pieces, config=config)
    inputs = make_inputs(prompt + 9, seed=7)
    for token in range(9):
        position = prompt + token
        last = position // 4
        pages = torch.tensor([[0, 1, *range(last - num_recent + 1, last + 1)]] * NUM_KV_HEADS)
        for layer, (q, k, v) in enumerate(inputs):
            rows = slice(0, position + 1)
            expected = oracle(q[position : position + 1], k[rows], v[rows], pages=pages, page_size=4)
            torch.testing.assert_close(got[layer, token].double(), expected[0], rtol=1e-5, atol=1e-5)
    stats = cache.stats()
    assert stats.sparse_steps == 9 * NUM_LAYERS
    assert stats.summary_bytes_read == 0
    assert stats.pages_read == 9 * NUM_LAYERS * NUM_KV_HEADS * 6


# Oracle -----------------------------------------------------------------------------------------------------


def kept_mass(q, k, selected, window) -> torch.Tensor:
    """True softmax mass of one row inside a page list, summed over the group: [num_kv_heads]."""
    group = NUM_HEADS // NUM_KV_HEADS
    positions = torch.arange(k.size(0))
    hidden = positions <= k.size(0) - 1 - window if window > 0 else torch.zeros_like(positions).bool()
    mass = []
    for head in range(NUM_KV_HEADS):
        logits = q[head * group : (head + 1) * group].double() @ k[:, head].double().T * SM_SCALE
        share = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1).sum(0)
        mass.append(share[torch.isin(positions // 4, selected[head])].sum())
    return torch.stack(mass)


@pytest.mark.parametrize("window", [-1, 37])
def test_the_oracle_keeps_the_most_mass_that_a_budget_can(window):
    config = SMALL.replace(dense_layers=0, record_selection=True)
    steps, prompt = 6, 90
    inputs = make_inputs(prompt + steps, seed=7)
    found = {}
    for name in ("oracle", "query_aware", "streaming_llm"):
        _, cache = run(name, prompt, [1] * steps, config=config, window=window, max_tokens=512)
        found[name] = [
            torch.stack(
                [
                    kept_mass(q[prompt + i], k[: prompt + i + 1], step.selected_pages[layer][0], window)
                    for layer, (q, k, _) in enumerate(inputs)
                ]
            )
            for i, step in enumerate(cache.selection_history())
        ]
    # The best of all choices, by hand: forced pages, then the pages of most mass.
    for i in range(steps):
        position = prompt + i
        first, last = max(0, position - window + 1) // 4 if window > 0 else 0, position // 4
        for layer, (q, k, _) in enumerate(inputs):
            for head in range(NUM_KV_HEADS):
                mass = {
                    page: float(
                        kept_mass(q[position], k[: position + 1], torch.tensor([[page]] * 2), window)[head]
                    )
                    for page in range(first, last + 1)
                }
                forced = {page for page in (0, last - 1, last) if page >= first}
                others = sorted((value for page, value in mass.items() if page not in forced), reverse=True)
                best = sum(mass[page] for page in forced) + sum(others[: 6 - len(forced)])
                assert float(found["oracle"][i][layer, head]) == pytest.approx(best, rel=1e-5)
    for name in ("query_aware", "streaming_llm"):
        for mine, ceiling in zip(found[name], found["oracle"], strict=True):
            assert (mine <= ceiling + 1e-6).all()
        assert sum(x.sum() for x in found[name]) < sum(x.sum() for x in found["oracle"])


def test_a_dense_forward_asks_no_policy():
    cache = new_cache(config=SMALL, policy="streaming_llm")
    seq = cache.new_sequence()
    inputs = make_inputs(60, seed=5)
    feed(cache, [(seq, inputs, slice(0, 50))])
    with OpCalls() as ops_called:
        feed(cache, [(seq, inputs, slice(50, 51))], dense=True)
        lists = [given["selected_pages"] for _, given in ops_called.of("attend_pages")]
        assert [pages is None for pages in lists] == [True] * NUM_LAYERS
        feed(cache, [(seq, inputs, slice(51, 52))])
        lists = [given["selected_pages"] for _, given in ops_called.of("attend_pages")]
        assert [pages is None for pages in lists] == [True, False, False]
