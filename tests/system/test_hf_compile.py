"""A reserved decode step compiles into one graph and gives what the eager step gives.

The step is the whole model with its cache; only single-token forwards are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import cache_argument, left_padded, tiny_model, tokens  # noqa: E402

import tinyserve_ops  # noqa: E402

SPARSE = {"token_budget": 48, "dense_layers": 1, "num_sink_pages": 1, "num_recent_pages": 1}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def prefilled(
    model: Any, handle: Any, length: int, reserve: int | None, mask: torch.Tensor | None = None
) -> Any:
    """A cache with `length` tokens of two rows in it."""
    cache = handle.new_cache(max_tokens=512)
    ids = tokens(2, length)
    with torch.no_grad():
        model(ids, attention_mask=mask, **{cache_argument(model): cache})
    if reserve is not None:
        cache.reserve(reserve)
    return cache


def step_logits(call: Any, name: str, cache: Any, token: torch.Tensor, position: int) -> torch.Tensor:
    with torch.no_grad():
        return call(token, position_ids=torch.full((2, 1), position), **{name: cache}).logits.clone()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "opt"])
def test_a_decode_step_is_one_graph_at_every_length_and_equals_the_eager_step(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=2) if family != "gpt2" else tiny_model(family)
    name, token = cache_argument(model), tokens(2, 1, seed=9)
    with tinyserve_ops.enable(model, **SPARSE) as handle:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch._dynamo.utils.counters.clear()
        for length in (15, 16, 17, 33):
            eager = prefilled(model, handle, length, None)
            reserved = prefilled(model, handle, length, 64)
            for i in range(2):  # the second step starts from the lengths that the first one advanced
                expected = step_logits(model, name, eager, token, length + i)
                with torch.no_grad():
                    got = compiled(**reserved.step_inputs(model, token)).logits
                assert torch.equal(got, expected) or (got - expected).abs().max() < 1e-5
            assert int(reserved.get_seq_length()) == length + 2
            reserved.release()
            assert reserved.get_seq_length() == length + 2
            for layer in range(2):
                for a, b in zip(eager.dense(layer), reserved.dense(layer), strict=True):
                    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        counters = torch._dynamo.utils.counters
        assert sum(counters["graph_break"].values()) == 0
        assert counters["stats"]["unique_graphs"] <= 3  # the first and at most two recompilations


def test_padding_of_the_prefill_is_kept_by_reserved_steps() -> None:
    model = tiny_model("llama")
    name, token = cache_argument(model), tokens(2, 1, seed=9)
    _, mask = left_padded(tokens(2, 20), [7, 0])
    positions = torch.tensor([[13], [20]])
    with tinyserve_ops.enable(model, **SPARSE) as handle, torch.no_grad():
        eager, reserved = prefilled(model, handle, 20, None, mask), prefilled(model, handle, 20, 64, mask)
        longer = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        expected = model(token, attention_mask=longer, position_ids=positions, **{name: eager}).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = compiled(
            **reserved.step_inputs(model, token)
        ).logits  # positions follow the real tokens of each row
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        reserved.release()
        assert reserved.stored_lengths() == eager.stored_lengths() == [14, 21]


def test_generate_compiles_its_own_decode_steps_over_a_reserved_cache() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    ids = tokens(2, 20)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    compile_config = transformers.CompileConfig(
        fullgraph=True, dynamic=False, mode="default", backend="aot_eager"
    )
    compile_config._compile_all_devices = True
    with tinyserve_ops.enable(model, token_budget=512) as handle:
        cache = handle.new_cache()
        cache.reserve(64)
        got = model.generate(ids, compile_config=compile_config, **options, **{cache_argument(model): cache})
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        assert int(cache.get_seq_length()) == 27
    assert torch.equal(got, reference.generate(ids, **options))


def test_a_reserved_cache_says_when_it_is_full_and_can_be_cropped_and_prefilled_again() -> None:
    model = tiny_model("llama")
    name, token = cache_argument(model), tokens(2, 1, seed=9)
    with tinyserve_ops.enable(model, **SPARSE) as handle, torch.no_grad():
        cache = prefilled(model, handle, 30, 32)
        for i in range(2):
            step_logits(model, name, cache, token, 30 + i)
        with pytest.raises(tinyserve_ops.OutOfPagesError, match="max_tokens"):
            step_logits(model, name, cache, token, 32)
        assert int(cache.get_seq_length()) == 32
        cache.crop(-7)
        assert int(cache.get_seq_length()) == 25
        model(tokens(2, 4, seed=2), position_ids=torch.arange(25, 29)[None], **{name: cache})
        assert int(cache.get_seq_length()) == 29
        with pytest.raises(tinyserve_ops.OutOfPagesError, match="max_tokens"):
            model(tokens(2, 9), **{name: cache})
        cache.release()
        fresh = handle.new_cache()
        sequence = torch.cat([tokens(2, 30)[:, :25], tokens(2, 4, seed=2)], dim=1)
        model(sequence, **{name: fresh})
        for a, b in zip(cache.dense(1), fresh.dense(1), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_opt_compiles_with_the_inputs_that_the_cache_gives() -> None:
    model = tiny_model("opt")
    name, token = cache_argument(model), tokens(2, 1, seed=9)
    with tinyserve_ops.enable(model, **SPARSE) as handle, torch.no_grad():
        eager, reserved = prefilled(model, handle, 16, None), prefilled(model, handle, 16, 64)
        expected = step_logits(model, name, eager, token, 16)
        torch.testing.assert_close(
            step_logits(model, name, reserved, token, 16), expected, atol=1e-5, rtol=1e-5
        )
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        expected = step_logits(model, name, eager, token, 17)
        got = compiled(**reserved.step_inputs(model, token)).logits
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
