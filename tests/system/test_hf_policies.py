"""Policies through the drop-in: positions, padding, beams, copies, packed batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from hf_families import forward, greedy, left_padded, tiny_model, tokens

import tinyserve_ops
from tinyserve_ops import SparseConfig, policies
from tinyserve_ops.hf import PackedBatch, TinyServeCache, new_paged_cache
from tinyserve_ops.policies import StreamingLLM

CONFIG = SparseConfig(page_size=4, token_budget=32, dense_layers=1)
# Their rule holds token by token, so it does not matter how tokens are cut into forwards.
PER_TOKEN = sorted(set(policies.names()) - {"query_aware"})


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return tiny_model("gpt2")


def logits_in_pieces(model: Any, name: str, prompt: int, pieces: list[int]) -> torch.Tensor:
    """Logits of the tokens after the prompt."""
    ids = tokens(1, prompt + sum(pieces))
    with tinyserve_ops.enable(model, CONFIG, policy=name) as handle:
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


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_forty_tokens_give_the_same_logits_however_they_are_cut(name, family, request):
    model = request.getfixturevalue(family)
    single = logits_in_pieces(model, name, 90, [1] * 40)
    for pieces in ([13, 27], [16, 16, 8]):
        got = logits_in_pieces(model, name, 90, pieces)
        torch.testing.assert_close(got, single, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", policies.names())
def test_padded_rows_generate_what_they_generate_alone(llama, name):
    ids, mask = left_padded(tokens(3, 70), [0, 25, 61])
    with tinyserve_ops.enable(llama, CONFIG, policy=name) as handle:
        together = greedy(llama, ids, mask, new=12)
        for row, pads in enumerate((0, 25, 61)):
            alone = greedy(llama, ids[row : row + 1, pads:], new=12)
            assert torch.equal(together[row, pads:], alone[0])
        assert handle.policy == policies.get(name)


@pytest.mark.parametrize("name", policies.names())
def test_a_budget_above_the_length_generates_what_the_unpatched_model_generates(llama, name):
    ids, mask = left_padded(tokens(2, 40), [0, 25])
    expected = greedy(llama, ids, mask, new=12)
    with tinyserve_ops.enable(llama, token_budget=1024, dense_layers=0, policy=name):
        assert torch.equal(greedy(llama, ids, mask, new=12), expected)


def test_policies_differ_where_the_budget_is_small(llama):
    ids = tokens(1, 200)
    found = set()
    for name in policies.names():
        with tinyserve_ops.enable(llama, CONFIG, policy=name):
            found.add(tuple(greedy(llama, ids, new=24)[0].tolist()))
    assert len(found) > 2


@pytest.mark.parametrize("name", policies.names())
def test_beam_search_and_chunked_prompts_work(llama, name):
    ids = tokens(2, 50)
    with tinyserve_ops.enable(llama, CONFIG, policy=name):
        beams = greedy(llama, ids, new=10, num_beams=3)
        for row in range(2):
            assert torch.equal(beams[row], greedy(llama, ids[row : row + 1], new=10, num_beams=3)[0])


@pytest.mark.parametrize("name", policies.names())
def test_a_packed_batch_decodes_like_a_padded_one(llama, name):
    ids = tokens(2, 60)
    prompts = [ids[0].tolist(), ids[1, :33].tolist()]
    with tinyserve_ops.enable(llama, CONFIG, policy=name) as handle, torch.no_grad():
        kv = new_paged_cache(llama, handle.config, max_tokens=512, policy=handle.policy)
        batch, seqs, new = PackedBatch(llama, kv), [kv.new_sequence() for _ in prompts], prompts
        got: list[list[int]] = [[], []]
        for _ in range(8):
            logits = batch.last_logits(llama(**batch.inputs(zip(seqs, new, strict=True))))
            new = [[token] for token in logits.argmax(-1).tolist()]
            got = [row + token for row, token in zip(got, new, strict=True)]
        for prompt, row in zip(prompts, got, strict=True):
            assert greedy(llama, torch.tensor([prompt]), new=8)[0, len(prompt) :].tolist() == row


@pytest.mark.parametrize("name", policies.names())
def test_copies_of_a_cache_keep_the_policy_or_take_another(llama, name):
    ids = tokens(1, 64)
    with tinyserve_ops.enable(llama, CONFIG, policy=name) as handle:
        cache = handle.new_cache()
        forward(llama, ids[:, :60], cache)
        same, full = copy.deepcopy(cache), cache.copy(policy="full_cache")
        assert (same.policy, full.policy) == (handle.policy, policies.get("full_cache"))
        got = [forward(llama, ids[:, 60:61], c) for c in (cache, same, full)]
        assert torch.equal(got[0], got[1])
        if name not in ("full_cache",):
            assert not torch.equal(got[0], got[2])


def test_a_policy_that_does_not_fit_is_refused_before_anything_is_switched(llama):
    with pytest.raises(ValueError, match="window: expected at least 8 tokens"):
        tinyserve_ops.enable(llama, CONFIG, policy=StreamingLLM(window=4))
    with pytest.raises(ValueError, match="policy: expected one of"):
        tinyserve_ops.enable(llama, policy="nothing")
    with pytest.raises(TypeError, match="policy: expected a Policy, a name or None"):
        TinyServeCache(llama.config, policy=llama)
    assert llama.config._attn_implementation == "sdpa"
