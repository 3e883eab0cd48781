"""Switching a model on and off, and everything that `enable` honours or refuses by name."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import cache_argument, forward, greedy, left_padded, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache, GenerationMixin, GPT2Config, LlamaConfig  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops.hf import PackedBatch, TinyServeCache, new_paged_cache  # noqa: E402

ALL = {"token_budget": 1024, "dense_layers": 0}


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def gpt2() -> Any:
    return tiny_model("gpt2")


# Switching on and off ---------------------------------------------------------------------------------------


def test_disabling_restores_the_model_and_transformers_also_when_the_body_raises(
    llama: Any, tmp_path: Path
) -> None:
    ids = tokens(1, 12)
    before, method = forward(llama, ids), GenerationMixin._prepare_cache_for_generation

    def body() -> None:
        with tinyserve_ops.enable(llama, **ALL):
            assert llama.config._attn_implementation == "tinyserve"
            assert GenerationMixin._prepare_cache_for_generation is not method
            llama.save_pretrained(tmp_path)
            raise RuntimeError("body")

    with pytest.raises(RuntimeError, match="body"):
        body()
    assert llama.config._attn_implementation == "sdpa"
    assert not llama._forward_pre_hooks
    assert GenerationMixin._prepare_cache_for_generation is method
    assert torch.equal(forward(llama, ids), before)
    assert "tinyserve" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(forward(reloaded, ids), before)


def test_the_previous_attention_comes_back_even_when_it_was_not_sdpa(llama: Any) -> None:
    llama.set_attn_implementation("eager")
    tinyserve_ops.enable(llama)
    tinyserve_ops.disable(llama)
    assert llama.config._attn_implementation == "eager"


def test_enabling_twice_is_an_error_that_names_the_first_and_disabling_twice_is_one_too(llama: Any) -> None:
    handle = tinyserve_ops.enable(llama, token_budget=512)
    with pytest.raises(
        ValueError, match=r"not enabled, got a LlamaForCausalLM enabled with SparseConfig\(.*token_budget=512"
    ):
        tinyserve_ops.enable(llama)
    assert handle.enabled
    assert llama.config._attn_implementation == "tinyserve"
    handle.disable()
    handle.disable()
    assert not handle.enabled
    with pytest.raises(ValueError, match="not enabled"):
        tinyserve_ops.disable(llama)


def test_the_hook_lives_as_long_as_the_last_enabled_model(llama: Any, gpt2: Any) -> None:
    method = GenerationMixin._prepare_cache_for_generation
    first, second = tinyserve_ops.enable(llama), tinyserve_ops.enable(gpt2)
    plain = tiny_model("qwen2")
    expected = greedy(plain, tokens(1, 9), new=4, return_dict_in_generate=True)
    assert isinstance(getattr(expected, cache_argument(plain)), DynamicCache)  # inert for other models
    first.disable()
    assert GenerationMixin._prepare_cache_for_generation is not method
    out = greedy(gpt2, tokens(1, 9), new=4, return_dict_in_generate=True)
    assert isinstance(getattr(out, cache_argument(gpt2)), TinyServeCache)
    second.disable()
    assert GenerationMixin._prepare_cache_for_generation is method
    model = tiny_model("llama")
    tinyserve_ops.enable(model)
    del model
    gc.collect()
    assert GenerationMixin._prepare_cache_for_generation is method


def test_without_a_handle_the_registered_name_means_sdpa(llama: Any) -> None:
    ids, mask = left_padded(tokens(2, 20), [6, 0])
    expected = greedy(llama, ids, mask)
    llama.set_attn_implementation("tinyserve")
    assert torch.equal(greedy(llama, ids, mask), expected)


def test_training_goes_through_sdpa_with_the_same_gradients(llama: Any) -> None:
    ids = tokens(2, 10)

    def gradient() -> torch.Tensor:
        llama.zero_grad()
        llama(ids, labels=ids, use_cache=False).loss.backward()
        return llama.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient()
    with tinyserve_ops.enable(llama, **ALL) as handle:
        assert torch.equal(gradient(), expected)
        with pytest.raises(ValueError, match="query: expected no gradient"):
            llama(ids, **{cache_argument(llama): handle.new_cache()})


def test_options_come_as_a_config_or_as_keywords_but_not_both(llama: Any) -> None:
    config = tinyserve_ops.SparseConfig(token_budget=256, scorer="mean")
    with tinyserve_ops.enable(llama, config) as handle:
        assert handle.config is config
    with pytest.raises(TypeError, match=r"config.*both"):
        tinyserve_ops.enable(llama, config, page_size=8)
    with pytest.raises(TypeError, match="config: expected a SparseConfig"):
        tinyserve_ops.enable(llama, {"page_size": 8})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: expected a transformers"):
        tinyserve_ops.enable(torch.nn.Linear(2, 2))
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("scorer", "kv_dtype"),
    [
        (scorer, kv_dtype)
        for scorer in ("bounds", "bounds_full", "mean", "mean_std", "bounds_mean")
        for kv_dtype in ("float16", "bfloat16", "int8")
        if (scorer, kv_dtype) != ("bounds_full", "int8")
    ],
)
def test_every_scorer_and_kv_dtype_runs_end_to_end(llama: Any, scorer: str, kv_dtype: str) -> None:
    with tinyserve_ops.enable(
        llama, token_budget=64, page_size=8, dense_layers=0, scorer=scorer, kv_dtype=kv_dtype
    ) as handle:
        cache = handle.new_cache()
        greedy(llama, tokens(2, 90), new=4, **{cache_argument(llama): cache})
        assert cache.kv.dtype == getattr(torch, kv_dtype)
        assert cache.stats().selection_engaged


# Refusals ---------------------------------------------------------------------------------------------------


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def test_logit_soft_capping_is_refused_by_name() -> None:
    kw = {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attn_logit_softcapping": 1.0,
        "sliding_window": 8,
    }
    with pytest.raises(ValueError, match=r"attn_logit_softcapping: .* got 1\.0"):
        tinyserve_ops.enable(from_config(transformers.Gemma2Config(**kw)))


def test_attention_sink_parameters_are_refused_by_name() -> None:
    kw = {
        **_SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    with pytest.raises(ValueError, match="sinks: "):
        tinyserve_ops.enable(from_config(transformers.GptOssConfig(**kw)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_logit_softcap", 30.0),
        ("kv_lora_rank", 8),
        ("num_kv_shared_layers", 1),
        ("use_bidirectional_attention", True),
        ("is_causal", False),
        ("alibi", True),
        ("layer_types", ["full_attention", "chunked_attention"]),
    ],
)
def test_options_of_a_config_that_change_attention_are_refused_by_name(
    llama: Any, name: str, value: Any
) -> None:
    setattr(llama.config, name, value)
    with pytest.raises(ValueError, match=f"{name}: expected .* got "):
        tinyserve_ops.enable(llama)
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["softcap", "s_aux", "head_mask", "position_bias"])
def test_options_that_only_a_forward_shows_are_refused_by_name(llama: Any, name: str) -> None:
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, tokens(1, 5), cache)
        with pytest.raises(ValueError, match=f"{name}: expected None"):
            forward(llama, tokens(1, 1), cache, **{name: 30.0 if name == "softcap" else torch.ones(4)})
        assert cache.stored_lengths() == [5]


@pytest.mark.parametrize(
    "flags", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}], ids=str
)
def test_scale_flags_of_gpt2_are_honoured(flags: dict[str, bool]) -> None:
    plain, model = tiny_model("gpt2"), tiny_model("gpt2", **flags)
    model.set_attn_implementation("eager")  # the definition of the flags
    ids = tokens(1, 20)
    expected = forward(model, ids)
    assert (expected - forward(plain, ids)).abs().max() > 1e-3
    with tinyserve_ops.enable(model, **ALL) as handle:
        cache = handle.new_cache()
        got = forward(model, ids[:, :19], cache)
        step = forward(model, ids[:, 19:], cache, position_ids=torch.tensor([[19]]))
        torch.testing.assert_close(torch.cat([got, step], dim=1), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            forward(model, ids), expected, atol=1e-4, rtol=1e-4
        )  # also without a cache


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_prompt_past_the_positions_is_refused_by_name(family: str) -> None:
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = tiny_model(family, **{name: 64})
    with tinyserve_ops.enable(model, **ALL) as handle:
        with pytest.raises(ValueError, match=r"max_position_embeddings: .* 64 tokens.* got 65"):
            greedy(model, tokens(1, 65), new=1)
        with pytest.raises(ValueError, match="max_position_embeddings"):
            forward(model, tokens(1, 65))
        cache = handle.new_cache()
        forward(model, tokens(1, 60), cache)
        with pytest.raises(ValueError, match=r"max_position_embeddings.* got 66"):
            forward(model, tokens(1, 6), cache, position_ids=torch.arange(60, 66)[None])
        assert cache.get_seq_length() == 60
        kv = new_paged_cache(model, handle.config)
        with pytest.raises(ValueError, match="max_position_embeddings"):
            PackedBatch(model, kv).inputs([(kv.new_sequence(), tokens(1, 65)[0].tolist())])
        ids, mask = left_padded(tokens(1, 70), [10])  # 60 real tokens fit
        assert greedy(model, ids, mask, new=4).shape == (1, 74)


def test_a_model_spread_over_devices_is_refused_by_name(llama: Any) -> None:
    llama.hf_device_map = {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1"}
    with pytest.raises(ValueError, match=r"hf_device_map: .*cuda:0.*cuda:1"):
        tinyserve_ops.enable(llama)
    llama.hf_device_map = {"": "cpu"}
    tinyserve_ops.enable(llama).disable()


def test_models_of_another_shape_are_refused_by_the_name_of_what_differs() -> None:
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    encoder_decoder = transformers.T5ForConditionalGeneration(t5)
    cross = from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, add_cross_attention=True))
    odd_head = from_config(LlamaConfig(**{**_SMALL, "head_dim": 12}))
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    sizes = {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    dense = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    latent_config = transformers.DeepseekV3Config(**_SMALL, **experts, **sizes, **dense, kv_lora_rank=16)
    latent = from_config(latent_config)
    own_attention = from_config(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    for model, name in (
        (encoder_decoder, "is_encoder_decoder"),
        (cross, "add_cross_attention"),
        (odd_head, "head_dim.*got 12"),
        (latent, "kv_lora_rank"),
        (own_attention, "BloomForCausalLM"),
    ):
        with pytest.raises(ValueError, match=name):
            tinyserve_ops.enable(model)
        assert model.config._attn_implementation != "tinyserve"


def test_dropout_in_training_mode_is_refused_over_our_cache(gpt2: Any) -> None:
    gpt2.train()
    with tinyserve_ops.enable(gpt2, **ALL) as handle, pytest.raises(ValueError, match=r"dropout.*eval"):
        forward(gpt2, tokens(1, 5), handle.new_cache())


def test_a_packed_batch_refuses_what_it_cannot_mean(llama: Any) -> None:
    with tinyserve_ops.enable(llama, **ALL) as handle:
        kv = new_paged_cache(llama, handle.config, max_tokens=64)
        batch, seq = PackedBatch(llama, kv), kv.new_sequence()
        for rows in ([], [(seq, [])]):
            with pytest.raises(ValueError, match="rows: "):
                batch.inputs(rows)
        with pytest.raises(RuntimeError, match="inputs"):
            forward(llama, tokens(1, 3), batch)
        inputs = batch.inputs([(seq, [3, 4, 5])])
        with torch.no_grad():
            llama(**inputs)
            with pytest.raises(RuntimeError, match="before every forward"):
                llama(**inputs)
        assert kv.length(seq) == 3
    with pytest.raises(ValueError, match="attn_implementation"):
        llama(**batch.inputs([(seq, [6])]))


def test_the_library_imports_without_transformers_and_says_what_enable_needs() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import tinyserve_ops; tinyserve_ops.PagedKVCache; tinyserve_ops.estimate_memory\n"
        "try: tinyserve_ops.enable\n"
        "except ImportError as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "expected transformers >= 4.57" in found.stdout
