"""estimate_memory against the bytes that a cache really holds, and `python -m tinyserve_ops`."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tinyserve_ops import PagedKVCache, SparseConfig, estimate_memory

LLAMA = SimpleNamespace(
    num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, dtype=torch.float32
)
GPT2 = SimpleNamespace(n_layer=12, n_embd=768, n_head=12)


@pytest.mark.parametrize(
    ("scorer", "kv_dtype"), [("bounds", None), ("bounds_full", None), ("mean", None), ("bounds", "int8")]
)
def test_the_estimate_is_what_a_cache_holds(scorer, kv_dtype):
    config = SparseConfig(page_size=16, scorer=scorer, kv_dtype=kv_dtype)
    shape = SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24, hidden_size=64
    )
    cache = PagedKVCache(2, 2, 24, config=config, max_tokens=200)
    for _ in range(3):
        cache.begin([(cache.new_sequence(), 50)]).commit(allow_missing_layers=True)
    estimate = estimate_memory(shape, 50, 3, config=config)
    assert estimate.kv_bytes + estimate.summary_bytes == cache.stats().kv_bytes_held
    assert estimate.page_table_bytes == 3 * 4 * 4


def test_full_attention_and_the_budget_are_compared():
    estimate = estimate_memory(LLAMA, 8000, config=SparseConfig(token_budget=1024))
    assert estimate.full_attention_bytes == 8000 * 46_080
    assert estimate.kv_bytes == 8000 * 46_080
    assert estimate.full_read_bytes_per_step == estimate.full_attention_bytes
    dense, sparse = 2 * 8000 * 1536, 28 * (1024 * 1536 + 500 * 3 * 240)
    assert estimate.read_bytes_per_step == dense + sparse
    assert "8000 tokens" in str(estimate)


def test_a_narrower_kv_dtype_halves_the_pages_but_not_full_attention():
    wide = estimate_memory(GPT2, 1024)
    narrow = estimate_memory(GPT2, 1024, config=SparseConfig(kv_dtype="bfloat16"))
    assert narrow.kv_bytes * 2 == wide.kv_bytes
    assert narrow.full_attention_bytes == wide.full_attention_bytes
    assert (narrow.kv_dtype, narrow.num_kv_heads, narrow.head_dim) == ("bfloat16", 12, 64)


def test_int8_pages_cost_a_byte_per_number_and_four_per_row():
    narrow = estimate_memory(GPT2, 1024, config=SparseConfig(kv_dtype="int8"))
    assert narrow.kv_bytes == 1024 * 12 * 12 * 2 * (64 + 4)
    half = estimate_memory(GPT2, 1024, config=SparseConfig(kv_dtype="bfloat16"))
    assert round(half.kv_bytes / narrow.kv_bytes, 2) == 1.88
    assert (narrow.kv_dtype, narrow.full_attention_bytes) == ("int8", half.full_attention_bytes)


def test_the_text_part_of_a_multimodal_config_is_read():
    outer = SimpleNamespace(get_text_config=lambda decoder: LLAMA if decoder else None)
    model = SimpleNamespace(config=outer, dtype=torch.bfloat16)
    estimate = estimate_memory(model, 100)
    assert (estimate.num_layers, estimate.kv_dtype) == (30, "bfloat16")


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="length"):
        estimate_memory(LLAMA, -1)
    with pytest.raises(TypeError, match="batch"):
        estimate_memory(LLAMA, 1, 1.5)
    with pytest.raises(ValueError, match=r"model_or_config.*num_hidden_layers"):
        estimate_memory(SimpleNamespace(), 1)
    with pytest.raises(ValueError, match="dtype"):
        estimate_memory(LLAMA, 1, dtype="int8")
    with pytest.raises(TypeError, match="config: expected a SparseConfig, got dict"):
        estimate_memory(LLAMA, 1, config={"page_size": 8})


def test_the_module_prints_what_it_runs_on():
    run = subprocess.run([sys.executable, "-m", "tinyserve_ops"], capture_output=True, text=True, check=True)
    for word in ("tinyserve_ops", torch.__version__, "CPU target", "CUDA", "_ops.so", "libtinyserve_core.so"):
        assert word in run.stdout
