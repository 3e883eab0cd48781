"""Sliding windows that a model tells only its mask, or its attention call as well: what comes out is what
transformers' sdpa makes of them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import cache_argument, forward, greedy, left_padded, tiny_model, tokens  # noqa: E402
from transformers import AutoModelForCausalLM, PhimoeConfig, Qwen2MoeConfig  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops.hf import PackedBatch, new_paged_cache  # noqa: E402

ALL = {"token_budget": 1024, "dense_layers": 1}
WINDOW = 8
SHAPE = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


def windowed_model(family: str) -> Any:
    """A tiny model with a window of 8; the two mixtures of experts tell it only to their mask."""
    if family not in ("phimoe", "qwen2_moe"):
        layers = {"max_window_layers": 1, "use_sliding_window": True} if family == "qwen2" else {}
        return tiny_model(family, sliding_window=WINDOW, **layers)
    if family == "phimoe":
        config = PhimoeConfig(**SHAPE, sliding_window=WINDOW, num_local_experts=2)
    else:
        own = {"use_sliding_window": True, "max_window_layers": 1, "shared_expert_intermediate_size": 32}
        config = Qwen2MoeConfig(**SHAPE, sliding_window=WINDOW, **EXPERTS, **own)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 218, 0
    return model


def enabled(model: Any) -> Any:
    """The handle, or None where this transformers gives the model attention code of its own, and `enable`
    says so.
    """
    if transformers.__version__.startswith("4.") and model.config.model_type.endswith("moe"):
        with pytest.raises(ValueError, match="its own attention code"):
            tinyserve_ops.enable(model, **ALL)
        return None
    return tinyserve_ops.enable(model, **ALL)


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe", "mistral", "gemma3", "qwen2"])
def test_a_window_is_honoured_also_when_only_the_mask_was_told(family: str) -> None:
    reference = windowed_model(family)
    model = copy.deepcopy(reference)
    ids, mask = left_padded(tokens(2, 30), [6, 0])
    more = tokens(2, 3, seed=5)
    whole = torch.cat([mask, torch.ones_like(more)], dim=1)
    expected = forward(reference, torch.cat([ids, more], dim=1), None, whole)
    handle = enabled(model)
    if handle is None:
        return
    with handle:
        cache = handle.new_cache()
        got = [forward(model, ids, cache, mask)]
        got += [forward(model, more[:, i : i + 1], cache, whole[:, : 31 + i]) for i in range(3)]
        real = whole.bool()
        torch.testing.assert_close(torch.cat(got, dim=1)[real], expected[real], atol=1e-4, rtol=1e-3)
        assert torch.equal(greedy(model, tokens(1, 30), new=12), greedy(reference, tokens(1, 30), new=12))


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe", "gemma3"])
def test_packed_and_compiled_steps_know_the_window_of_the_mask(family: str) -> None:
    reference = windowed_model(family)
    model = copy.deepcopy(reference)
    ids = tokens(2, 24)
    expected = forward(reference, ids)
    handle = enabled(model)
    if handle is None:
        return
    with handle, torch.no_grad():
        kv = new_paged_cache(model, handle.config, max_tokens=128)
        batch, sequences = PackedBatch(model, kv), [kv.new_sequence(), kv.new_sequence()]
        for start, stop in ((0, 22), (22, 23), (23, 24)):
            rows = [(seq, ids[row, start:stop].tolist()) for row, seq in enumerate(sequences)]
            logits = batch.last_logits(model(**batch.inputs(rows)))
        torch.testing.assert_close(logits, expected[:, -1], atol=1e-4, rtol=1e-3)
        if family != "gemma3":  # routing of tokens to experts is no single graph
            step: Any = model
        else:
            torch._dynamo.reset()
            step = torch.compile(model, fullgraph=True, backend="aot_eager")
        cache = handle.new_cache(max_tokens=128)
        cache.reserve(32)
        model(ids[:, :22], **{cache_argument(model): cache})
        for i in (22, 23):
            logits = step(**cache.step_inputs(model, ids[:, i : i + 1])).logits[:, -1]
            torch.testing.assert_close(logits, expected[:, i], atol=1e-4, rtol=1e-3)


def test_a_4d_mask_that_leaves_the_window_open_is_refused_by_name() -> None:
    model = windowed_model("mistral")
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    with tinyserve_ops.enable(model, **ALL) as handle:
        with pytest.raises(ValueError, match=r"attention_mask.*sliding window of 8"):
            forward(model, tokens(1, 12), handle.new_cache(), causal, position_ids=torch.arange(12)[None])
        got = forward(
            model,
            tokens(1, 8),
            handle.new_cache(),
            causal[..., :8, :8],
            position_ids=torch.arange(8)[None],
        )
    torch.testing.assert_close(got, forward(model, tokens(1, 8)), atol=1e-4, rtol=1e-3)


def test_a_mask_that_depends_on_the_values_is_refused_before_anything_is_switched() -> None:
    config = transformers.DogeConfig(**SHAPE)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="keep_window_size"):
        tinyserve_ops.enable(model)
    assert model.config._attn_implementation == "sdpa"
