"""SnapKV and PyramidKV keep the tokens that kvpress keeps for the same model and prompt.

kvpress (0.5.5) wants an older transformers than the rest of the tests, so this runs in an environment of its
own (`requirements/kvpress.txt`); `test_eviction.py` holds the same policies to plain torch everywhere.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed (requirements/kvpress.txt)")

import torch  # noqa: E402
from hf_families import forward, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops import SparseConfig  # noqa: E402
from tinyserve_ops.policies import PyramidKV, SnapKV  # noqa: E402

LENGTH = 240
PLAIN = SparseConfig(page_size=8, dense_layers=0)


def kept_by_kvpress(model: Any, ids: torch.Tensor, press: Any) -> list[torch.Tensor]:
    """By layer, which tokens are left: int64 [num_kv_heads, n], found by their keys."""
    whole, pressed = DynamicCache(config=model.config), DynamicCache(config=model.config)
    forward(model, ids, whole)
    with press(model):
        forward(model, ids, pressed)
    kept = []
    for full, left in zip(whole.layers, pressed.layers, strict=True):
        same = (left.keys[0][:, :, None] == full.keys[0][:, None]).all(-1)  # [kv heads, left, all]
        assert bool((same.sum(-1) == 1).all())
        kept.append(same.int().argmax(-1).sort(dim=1).values)
    return kept


def kept_by_us(model: Any, ids: torch.Tensor, policy: Any) -> list[torch.Tensor]:
    with tinyserve_ops.enable(model, PLAIN, policy=policy) as handle:
        cache = handle.new_cache()
        forward(model, ids, cache)
        return [cache.kv.kept_tokens(layer, cache.sequences[0]) for layer in range(cache.num_layers)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("window", "kernel", "budget"), [(32, 5, 60), (16, 7, 120), (8, 1, 24)])
def test_snapkv_agrees(family, window, kernel, budget, seed):
    model = tiny_model(family, seed=seed, num_hidden_layers=4)
    ids = tokens(1, LENGTH, seed=seed)
    # kvpress rounds the number of kept tokens down, after a subtraction in floating point.
    press = kvpress.SnapKVPress(
        compression_ratio=1 - (budget + 0.5) / LENGTH, window_size=window, kernel_size=kernel
    )
    policy = SnapKV(window=window, kernel_size=kernel, token_budget=budget)
    for expected, got in zip(kept_by_kvpress(model, ids, press), kept_by_us(model, ids, policy), strict=True):
        assert got.size(1) == budget
        assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("window", "beta", "budget"),
    [(4, 3, 60), (8, 20, 180), (8, 1, 60), (32, 20, 60)],  # plain, cut at the top, flat, too steep
)
def test_pyramidkv_agrees(family, window, beta, budget, seed):
    model = tiny_model(family, seed=seed, num_hidden_layers=6)
    ids = tokens(1, LENGTH, seed=seed)
    press = kvpress.PyramidKVPress(
        compression_ratio=1 - budget / LENGTH, window_size=window, kernel_size=5, beta=beta
    )
    policy = PyramidKV(window=window, kernel_size=5, beta=beta, token_budget=budget)
    expected = kept_by_kvpress(model, ids, press)
    got = kept_by_us(model, ids, policy)
    assert [x.size(1) for x in got] == [x.size(1) for x in expected]
    assert all(map(torch.equal, got, expected))
