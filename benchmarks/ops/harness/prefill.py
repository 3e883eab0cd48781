"""`prefill_attention` as a variant: a chunk of new tokens over the stored ones and over themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import WrongPath
from benchmarks.ops.harness.layers import Layers
from benchmarks.ops.harness.ours import token_bytes
from benchmarks.ops.harness.run import Run, name_of, setup_facts
from benchmarks.ops.harness.timing import Variant
from tinyserve_ops import ops

_TOLERANCE = 3e-2
_LAYERS = 2  # bound by arithmetic: caches do not decide


def add_prefill(run: Run, layers: Layers, num_new: int) -> Variant:
    """The last `num_new` tokens of each sequence, over everything before them."""
    setup = layers.setup
    q, k, v = _new_tokens(layers, num_new)
    cu_query_lens = layers.cu_query_lens * num_new
    seq_lens = torch.full_like(layers.seq_lens, setup.length - num_new)
    name = name_of(run, layers, f"prefill {num_new}", run.settings.threads)

    def call(layer: int) -> tuple[Tensor, Tensor]:
        pool = layers.pools[layer]
        return ops.prefill_attention(
            q, k, v, cu_query_lens, seq_lens, layers.page_table, pool.k_pages, pool.v_pages, pool.k_scales,
            pool.v_scales, setup.sm_scale,
        )  # fmt: skip

    out, _ = call(0)
    _check(name, out, _torch_inputs(layers, 0, torch.float32, q, k, v), setup.sm_scale)
    facts = {"op": "prefill_attention", "variant": "prefill", **_facts(layers, num_new)}
    num_bytes = setup.batch * setup.num_kv_heads * setup.length * token_bytes(layers.pools[0])
    return run.add(Variant(name, call, range(_layers(layers)), num_bytes, run.settings.threads, facts))


def add_torch_prefill(
    run: Run, layers: Layers, num_new: int, dtype: torch.dtype, compared_with: Variant
) -> None:
    """SDPA over contiguous K and V; a boolean mask where tokens are stored, as transformers gives it one."""
    setup = layers.setup
    own_dtype = str(dtype).removeprefix("torch.")
    inputs = [_torch_inputs(layers, i, dtype, *_new_tokens(layers, num_new)) for i in range(_layers(layers))]

    def call(layer: int) -> Tensor:
        return _sdpa(*inputs[layer], setup.sm_scale)

    facts = {"op": "torch_sdpa", "variant": f"torch sdpa, {own_dtype}", **_facts(layers, num_new)}
    facts["baseline_dtype"] = own_dtype
    name = name_of(run, layers, f"torch sdpa {own_dtype}", run.settings.threads)
    num_bytes = 2 * setup.batch * setup.num_kv_heads * setup.length * setup.head_dim * dtype.itemsize
    passes, threads = range(_layers(layers)), run.settings.threads
    run.add(Variant(name, call, passes, num_bytes, threads, facts, compared_with=compared_with.name))


def _layers(layers: Layers) -> int:
    return min(_LAYERS, layers.num_layers)


def _facts(layers: Layers, num_new: int) -> dict[str, Any]:
    setup = layers.setup
    pairs = num_new * (setup.length - num_new) + num_new * (num_new + 1) // 2  # query, key
    flops = 4 * setup.batch * setup.num_heads * setup.head_dim * pairs
    return {**setup_facts(setup), "new_tokens": setup.batch * num_new, "flops": flops}


def _new_tokens(layers: Layers, num_new: int) -> tuple[Tensor, Tensor, Tensor]:
    setup = layers.setup
    generator = torch.Generator().manual_seed(num_new)
    heads = (setup.num_heads, setup.num_kv_heads, setup.num_kv_heads)
    q, k, v = (torch.randn(setup.batch * num_new, n, setup.head_dim, generator=generator) for n in heads)
    return q.to(setup.compute_dtype), k.to(setup.compute_dtype), v.to(setup.compute_dtype)


def _torch_inputs(
    layers: Layers, layer: int, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, K, V [batch, heads, tokens, head_dim] with the new tokens at the end, and the mask [new, length]."""
    batch, num_new = layers.setup.batch, q.size(0) // layers.setup.batch
    query, *rows = (
        x.view(batch, num_new, *x.shape[1:]).transpose(1, 2).to(dtype).contiguous() for x in (q, k, v)
    )
    keys, values = layers.contiguous(layer, dtype)
    keys[:, :, -num_new:], values[:, :, -num_new:] = rows
    mask = torch.ones(num_new, keys.size(2), dtype=torch.bool).tril(keys.size(2) - num_new)
    return query, keys, values, mask


def _sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sm_scale: float) -> Tensor:
    if mask.size(0) == mask.size(1):
        return scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=sm_scale, enable_gqa=True
        )
    return scaled_dot_product_attention(query, keys, values, mask, scale=sm_scale, enable_gqa=True)


def _check(what: str, out: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor], sm_scale: float) -> None:
    expected = _sdpa(*inputs, sm_scale).transpose(1, 2).flatten(0, 1)
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise WrongPath(
            f"{what}: expected causal attention within {_TOLERANCE}, got a relative error of {error:.2g}"
        )
