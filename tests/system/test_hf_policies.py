"""Policies through the drop-in: positions, padding, beams, copies, packed batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import cache_argument, forward, greedy, left_padded, tiny_model, tokens  # noqa: E402
from policy_cases import EVICTING, PER_TOKEN, POLICIES, over  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops import SparseConfig, policies  # noqa: E402
from tinyserve_ops.hf import PackedBatch, TinyServeCache, new_paged_cache  # noqa: E402
from tinyserve_ops.policies import Policy, StreamingLLM  # noqa: E402

CONFIG = SparseConfig(page_size=4, token_budget=32, dense_layers=1, scorer="low_rank")
every_policy = over(POLICIES)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return tiny_model("gpt2")


def logits_in_pieces(model: Any, policy: Policy, prompt: int, pieces: list[int]) -> torch.Tensor:
    """Logits of the tokens after the prompt."""
    ids = tokens(1, prompt + sum(pieces))
    with tinyserve_ops.enable(model, CONFIG, policy=policy) as handle:
        cache = handle.new_cache()
        outs = [
            forward(model, piece, cache, position_ids=torch.arange(at, at + piece.size(1))[None])
            for piece, at in zip(
                ids.split([prompt, *pieces], dim=1),
                [0, *torch.tensor([prompt, *pieces]).cumsum(0)[:-1].tolist()],
                strict=True,
            )
        ]
        assert cache.get_seq_length() == prompt + sum(pieces)
    return torch.cat(outs[1:], dim=1)


@over(PER_TOKEN)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_forty_tokens_give_the_same_logits_however_they_are_cut(policy, family, request):
    model = request.getfixturevalue(family)
    single = logits_in_pieces(model, policy, 90, [1] * 40)
    for pieces in ([13, 27], [16, 16, 8]):
        got = logits_in_pieces(model, policy, 90, pieces)
        torch.testing.assert_close(got, single, atol=2e-4, rtol=1e-4)


@every_policy
def test_padded_rows_generate_what_they_generate_alone(llama, policy):
    ids, mask = left_padded(tokens(3, 70), [0, 25, 61])
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle:
        together = greedy(llama, ids, mask, new=12)
        for row, pads in enumerate((0, 25, 61)):
            alone = greedy(llama, ids[row : row + 1, pads:], new=12)
            assert torch.equal(together[row, pads:], alone[0])
        assert handle.policy == policy


@every_policy
def test_a_budget_above_the_length_generates_what_the_unpatched_model_generates(llama, policy):
    ids, mask = left_padded(tokens(2, 40), [0, 25])
    expected = greedy(llama, ids, mask, new=12)
    if policy.name == "soft_prune":
        policy = policies.get("soft_prune", threshold=0)
    big = SparseConfig(token_budget=1024, dense_layers=0, scorer="low_rank")
    with tinyserve_ops.enable(llama, big, policy=policy):
        assert torch.equal(greedy(llama, ids, mask, new=12), expected)


def test_policies_differ_where_the_budget_is_small(llama):
    ids = tokens(1, 200)
    found = set()
    for policy in POLICIES:
        with tinyserve_ops.enable(llama, CONFIG, policy=policy):
            found.add(tuple(greedy(llama, ids, new=24)[0].tolist()))
    assert len(found) > 2


@every_policy
def test_beams_are_those_of_a_row_alone(llama, policy):
    ids = tokens(2, 50)
    with tinyserve_ops.enable(llama, CONFIG, policy=policy):
        beams = greedy(llama, ids, new=10, num_beams=3)
        for row in range(2):
            assert torch.equal(beams[row], greedy(llama, ids[row : row + 1], new=10, num_beams=3)[0])


@every_policy
def test_a_packed_batch_decodes_like_a_padded_one(llama, policy):
    ids = tokens(2, 60)
    prompts = [ids[0].tolist(), ids[1, :33].tolist()]
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle, torch.no_grad():
        kv = new_paged_cache(llama, handle.config, max_tokens=512, policy=handle.policy)
        batch, seqs, new = PackedBatch(llama, kv), [kv.new_sequence() for _ in prompts], prompts
        got: list[list[int]] = [[], []]
        for _ in range(8):
            logits = batch.last_logits(llama(**batch.inputs(zip(seqs, new, strict=True))))
            new = [[token] for token in logits.argmax(-1).tolist()]
            got = [row + token for row, token in zip(got, new, strict=True)]
        for prompt, row in zip(prompts, got, strict=True):
            assert greedy(llama, torch.tensor([prompt]), new=8)[0, len(prompt) :].tolist() == row


@every_policy
def test_copies_of_a_cache_keep_the_policy_or_take_another(llama, policy):
    ids = tokens(1, 64)
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle:
        cache = handle.new_cache()
        forward(llama, ids[:, :60], cache)
        same, full = copy.deepcopy(cache), cache.copy(policy="full_cache")
        assert (same.policy, full.policy) == (handle.policy, policies.get("full_cache"))
        got = [forward(llama, ids[:, 60:61], c) for c in (cache, same, full)]
        assert torch.equal(got[0], got[1])
        # What was evicted is gone, whoever reads on.
        same_result = policy.reads_all
        assert torch.equal(got[0], got[2]) == same_result


@pytest.mark.parametrize("pads", [[0, 0], [0, 31]], ids=str)
@every_policy
def test_a_prompt_that_generate_cuts_into_chunks_is_one_prompt(llama, policy, pads):
    if transformers.__version__.startswith("4."):
        if any(pads):
            pytest.skip("4.57 cuts padded prompts wrongly, whatever the cache")
        if policy.name == "query_aware":
            pytest.skip("4.57 makes the last token a step of its own, which is sparse under query_aware")
    ids, mask = left_padded(tokens(2, 75), pads)
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle:
        expected = greedy(llama, ids, mask, new=10)
        assert torch.equal(greedy(llama, ids, mask, new=10, prefill_chunk_size=20), expected)
        cache = handle.new_cache()
        own = {cache_argument(llama): cache}
        assert torch.equal(greedy(llama, ids, mask, new=10, prefill_chunk_size=20, **own), expected)
        assert cache.prompt_length == 75
        cache.reset()
        assert cache.prompt_length is None


@over([policy for policy in EVICTING if not policy.per_step])
def test_a_prompt_begun_in_a_cache_without_policy_is_finished_under_one(llama, policy):
    ids = tokens(1, 80)
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle:
        alone = handle.new_cache()
        expected = [forward(llama, piece, alone)[:, -1] for piece in (ids[:, :75], ids[:, 75:76])]
        groups = [[layer] for layer in range(3)]
        shared = TinyServeCache(llama.config, CONFIG, policy="full_cache", layer_groups=groups)
        shared.prompt_length = 75
        forward(llama, ids[:, :65], shared)
        cache = shared.copy(policy=policy)
        got = [forward(llama, piece, cache)[:, -1] for piece in (ids[:, 65:75], ids[:, 75:76])]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        for layer in range(3):
            kept = [c.kv.kept_tokens(layer, c.sequences[0]) for c in (cache, alone)]
            assert torch.equal(*kept)
        assert shared.stored_lengths() == [65]


@over(EVICTING)
def test_evicted_tokens_are_gone_and_positions_go_on(llama, policy):
    ids, mask = left_padded(tokens(2, 80), [0, 30])
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle:
        cache = handle.new_cache()
        forward(llama, ids, cache, mask)
        assert cache.get_seq_length() == 80
        assert [cache.kv.num_tokens(seq) for seq in cache.sequences] == [80, 50]
        assert [cache.kv.next_position(seq) for seq in cache.sequences] == [80, 50]
        groups = range(len(cache.kv.layer_groups))
        stored = [[cache.kv.length(seq, group) for group in groups] for seq in cache.sequences]
        assert stored[0][0] == 80  # a dense layer keeps all
        assert sum(stored[0][1:]) == sum(stored[1][1:]) == 32 * (len(groups) - 1)
        stats = cache.stats()
        assert stats.tokens_evicted == 2 * sum(80 - 32 + 50 - 32 for _ in range(2))
        cache.dense(0)
        with pytest.raises(RuntimeError, match="expected all tokens to be stored, got evicted ones"):
            cache.dense(2)
        with pytest.raises(ValueError, match="length: expected 0, or at least"):
            cache.crop_to(70)
        cache.crop_to(0)
        again = forward(llama, ids, cache, mask)
        assert torch.equal(again, forward(llama, ids, handle.new_cache(), mask))


@over(EVICTING)
def test_an_evicting_policy_refuses_what_it_can_not_honour(llama, policy):
    with tinyserve_ops.enable(llama, CONFIG, policy=policy) as handle:
        with pytest.raises(ValueError, match="policy: expected None, full_cache or query_aware"):
            handle.new_cache().reserve(200)
        other = handle.new_cache()
        llama.set_attn_implementation("sdpa")
        try:
            with pytest.raises(ValueError, match="attn_implementation: expected 'tinyserve' with policy"):
                forward(llama, tokens(1, 40), other)
        finally:
            llama.set_attn_implementation("tinyserve")
    mistral = tiny_model("mistral")
    with tinyserve_ops.enable(mistral, CONFIG, policy=policy) as handle:
        cache = handle.new_cache()
        with pytest.raises(
            ValueError, match="window: expected -1 where tokens are evicted, got a sliding window"
        ):
            forward(mistral, tokens(1, 30), cache)


def test_a_policy_that_does_not_fit_is_refused_before_anything_is_switched(llama):
    with pytest.raises(ValueError, match="window: expected at least 8 tokens"):
        tinyserve_ops.enable(llama, CONFIG, policy=StreamingLLM(window=4))
    with pytest.raises(ValueError, match="policy: expected one of"):
        tinyserve_ops.enable(llama, policy="nothing")
    with pytest.raises(TypeError, match="policy: expected a Policy, a name or None"):
        TinyServeCache(llama.config, policy=llama)
    assert llama.config._attn_implementation == "sdpa"
