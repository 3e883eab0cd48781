"""A model with an int8 cache says what the unpatched model says over keys and values rounded the same way,
and stays close to its float cache.

The reference is transformers' own cache, which rounds what it is given: one new token is read back from int8,
several are attended to as they came. Codes of keys that lie next to a tie may differ by one between the two,
as the keys themselves differ by fp32 rounding.
"""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import NO_EOS, cache_argument, greedy, left_padded, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops.testing import as_stored  # noqa: E402

COVERS_ALL = {"token_budget": 1024, "dense_layers": 1, "kv_dtype": "int8"}
PROMPT, NEW = 70, 12


class RoundingCache(DynamicCache):
    """Full attention over keys and values as int8 pages store them."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        new = (key_states, value_states)
        stored = tuple(as_stored(part).to(part.dtype) for part in new)
        seen = super().update(*stored, layer_idx, *args, **kwargs)
        num_new = key_states.shape[2]
        if num_new == 1:
            return seen
        return tuple(
            torch.cat([all_tokens[:, :, :-num_new], given], dim=2)
            for all_tokens, given in zip(seen, new, strict=True)
        )


def decode_logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Prompt in two chunks, then one token at a time."""
    argument = {cache_argument(model): cache}
    with torch.no_grad():
        parts = [model(ids[:, :40], **argument).logits, model(ids[:, 40:PROMPT], **argument).logits]
        parts += [model(ids[:, i : i + 1], **argument).logits for i in range(PROMPT, ids.size(1))]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2", "qwen3"])
def test_logits_equal_full_attention_over_the_rounded_keys_and_values(family: str) -> None:
    ids = tokens(2, PROMPT + NEW, seed=6)
    reference, model = tiny_model(family), tiny_model(family)
    expected = decode_logits(reference, ids, RoundingCache(config=reference.config))
    exact = decode_logits(reference, ids, DynamicCache(config=reference.config))
    with tinyserve_ops.enable(model, **COVERS_ALL) as handle:
        got = decode_logits(model, ids, handle.new_cache())
        assert handle.stats().sparse_steps == 2 * NEW
    scale = exact.std()
    error = (got - expected).abs().max() / scale
    rounding = (got - exact).abs().max() / scale
    assert error < 1e-3, f"{error:.2e} of a logit's deviation from the rounded reference"
    assert rounding < 0.05, f"{rounding:.2e} of a logit's deviation from the float cache"
    assert (got - exact).square().mean().sqrt() < 0.01 * scale
    assert error < rounding


def test_greedy_decoding_of_a_padded_batch_equals_the_reference() -> None:
    ids, mask = left_padded(tokens(3, PROMPT), [37, 5, 0])
    reference, model = tiny_model("llama"), tiny_model("llama")
    argument = cache_argument(reference)
    expected = greedy(reference, ids, mask, NEW, **{argument: RoundingCache(config=reference.config)})
    with tinyserve_ops.enable(model, **COVERS_ALL) as handle:
        got = greedy(model, ids, mask, NEW)
        stats = handle.stats()
    assert torch.equal(got, expected)
    assert stats.kv_bytes_read == stats.tokens_attended * 2 * (16 + 4)


@pytest.mark.parametrize("num_beams", [2, 4])
def test_beam_search_equals_the_reference(num_beams: int) -> None:
    ids = tokens(2, PROMPT)
    reference, model = tiny_model("llama"), tiny_model("llama")
    options = {"num_beams": num_beams, "do_sample": False, "max_new_tokens": NEW, "eos_token_id": NO_EOS}
    options["attention_mask"] = torch.ones_like(ids)
    rounding = {cache_argument(reference): RoundingCache(config=reference.config)}
    expected = reference.generate(ids, **options, **rounding)
    with tinyserve_ops.enable(model, **COVERS_ALL):
        assert torch.equal(model.generate(ids, **options), expected)


def test_a_cropped_cache_goes_on_like_one_that_never_saw_the_rest() -> None:
    ids = tokens(1, PROMPT + NEW, seed=9)
    model = tiny_model("llama")
    with tinyserve_ops.enable(model, **COVERS_ALL) as handle, torch.no_grad():
        name, cache, fresh = cache_argument(model), handle.new_cache(), handle.new_cache()
        model(ids, **{name: cache})
        cache.crop(PROMPT)
        model(ids[:, :PROMPT], **{name: fresh})
        for i in range(PROMPT, PROMPT + NEW):
            got, expected = (model(ids[:, i : i + 1], **{name: c}).logits for c in (cache, fresh))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_another_attention_reads_the_int8_cache_in_the_type_of_the_model() -> None:
    ids = tokens(1, 30)
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("llama", dtype=dtype)
        with tinyserve_ops.enable(model, **COVERS_ALL) as handle, torch.no_grad():
            cache = handle.new_cache()
            model(ids, **{cache_argument(model): cache})
            keys, _ = cache.dense(0)
            assert keys.dtype == torch.float32
            expected = model(tokens(1, 1, seed=4), **{cache_argument(model): cache}).logits
            cache.crop(30)
            model.set_attn_implementation("sdpa")
            got = model(tokens(1, 1, seed=4), **{cache_argument(model): cache}).logits
        assert got.dtype == expected.dtype == dtype
        assert (got - expected).float().abs().max() < 0.1 * expected.float().std()
