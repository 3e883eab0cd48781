"""The policies that tests run over, with parameters that fit small prompts, and how tests feed tokens."""

from __future__ import annotations

import pytest
import torch
from dense_mirror import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, SM_SCALE

from tinyserve_ops import PagedKVCache, policies
from tinyserve_ops.policies import EvictionPolicy

_PARAMETERS: dict[str, dict[str, float]] = {
    "entropy_stop": {"threshold": 0.0},  # what leaves, and when, is for test_early_exit.py
    "pyramidkv": {"window": 4, "beta": 2},
    "snapkv": {"window": 8},
    "soft_prune": {"threshold": 0.9},
}
POLICIES = [policies.get(name, **_PARAMETERS.get(name, {})) for name in policies.names()]
# Their rule holds token by token, so it does not matter how tokens are cut into forwards.
PER_TOKEN = [policy for policy in POLICIES if policy.name != "query_aware"]
EVICTING = [policy for policy in POLICIES if isinstance(policy, EvictionPolicy)]
WINDOWED = [policy for policy in POLICIES if policy not in EVICTING]


def over(chosen: list[policies.Policy]) -> pytest.MarkDecorator:
    """Parametrises a test over policies."""
    return pytest.mark.parametrize("policy", chosen, ids=lambda policy: policy.name)


# q, k, v of each layer, [tokens, heads, head_dim].
Inputs = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def make_inputs(num_tokens: int, seed: int) -> Inputs:
    """Random tokens of the shape of `dense_mirror`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(
            torch.randn(num_tokens, n, HEAD_DIM, generator=generator)
            for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        for _ in range(NUM_LAYERS)
    ]


def feed(
    cache: PagedKVCache, rows: list[tuple[int, Inputs, slice]], window: int = -1, **options: object
) -> list[torch.Tensor]:
    """One committed forward of (sequence, its inputs, which of them); the outputs of each layer."""
    forward = cache.begin([(seq, len(inputs[0][0][part])) for seq, inputs, part in rows], **options)
    outs = []
    for layer in range(NUM_LAYERS):
        q, k, v = (torch.cat([inputs[layer][i][part] for _, inputs, part in rows]) for i in range(3))
        outs.append(forward.attend(layer, q, k, v, SM_SCALE, window))
    forward.commit()
    return outs
