"""`append_kv`: one token per sequence, and a chunk of a prompt; against the caches that torch users have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import expect
from benchmarks.ops.harness.layers import Layers, Setup
from benchmarks.ops.harness.ours import token_bytes
from benchmarks.ops.harness.points import LLAMA, SMALL, Point
from benchmarks.ops.harness.run import Run, make_layers, name_of, setup_facts
from benchmarks.ops.harness.scoring import SCORINGS
from benchmarks.ops.harness.timing import Variant
from tinyserve_ops import ops

_8K = 8192
_CHUNK = 512
_LAYERS = 4  # more bring nothing: what is written is small, and the caches of torch are not


def decode(run: Run, setups: tuple[Setup, ...]) -> None:
    """The newest token of each sequence."""
    _append(run, setups[0], 1)


def prompt(run: Run, setups: tuple[Setup, ...]) -> None:
    """The last chunk of each sequence."""
    _append(run, setups[0], _CHUNK)


def _append(run: Run, setup: Setup, num_new: int) -> None:
    layers = make_layers(run.settings, setup, SCORINGS[:1], max_layers=_LAYERS)
    new = (setup.batch * num_new, setup.num_kv_heads, setup.head_dim)
    k, v = (torch.randn(new).to(setup.compute_dtype) for _ in range(2))
    cu_query_lens = layers.cu_query_lens * num_new
    seq_lens = torch.full_like(layers.seq_lens, setup.length - num_new)

    def ours(layer: int) -> None:
        pool = layers.pools[layer]
        ops.append_kv(
            k, v, cu_query_lens, seq_lens, layers.page_table, pool.k_pages, pool.v_pages, pool.k_scales,
            pool.v_scales, pool.page_summary, pool.scorer,
        )  # fmt: skip

    variant = _add(run, layers, "append", ours, num_new)
    ours(0)
    if setup.kv_dtype == setup.compute_dtype:
        stored = layers.contiguous(0, setup.kv_dtype)[0][:, :, -num_new:]
        expected = k.view(setup.batch, num_new, *new[1:]).transpose(1, 2)
        expect(f"{variant.name}: the newest tokens are stored", True, torch.equal(stored, expected))

    rows = [x.view(setup.batch, num_new, *new[1:]).transpose(1, 2) for x in (k, v)]
    caches = [layers.contiguous(layer, setup.compute_dtype) for layer in range(layers.num_layers)]
    older = [tuple(part[:, :, :-num_new] for part in cache) for cache in caches]

    def write_in_place(layer: int) -> None:
        for cache, row in zip(caches[layer], rows, strict=True):
            cache[:, :, -num_new:].copy_(row)

    def concatenate(layer: int) -> list[Tensor]:
        return [torch.cat((cache, row), 2) for cache, row in zip(older[layer], rows, strict=True)]

    for name, call in (("torch copy into a static cache", write_in_place), ("torch cat", concatenate)):
        _add(run, layers, name, call, num_new).compared_with = variant.name


def _add(run: Run, layers: Layers, what: str, call: Callable[[int], Any], num_new: int) -> Variant:
    setup = layers.setup
    name = name_of(run, layers, f"{what} {num_new}", run.settings.threads)
    tokens = setup.batch * setup.num_kv_heads * num_new
    read = 2 * setup.head_dim * setup.compute_dtype.itemsize
    num_bytes = tokens * (read + token_bytes(layers.pools[0]))
    facts = {
        "op": "append_kv" if what == "append" else "torch_append",
        "variant": what,
        **setup_facts(setup),
        "new_tokens": num_new,
    }
    return run.add(Variant(name, call, range(layers.num_layers), num_bytes, run.settings.threads, facts))


def points() -> list[Point]:
    found = [Point("one token", (Setup(*SMALL, _8K),), decode, in_quick=True)]
    found += [Point("one token", (Setup(*LLAMA, _8K),), decode)]
    found += [Point("one token", (Setup(*SMALL, _8K // 2, batch=16),), decode)]
    found += [Point("chunk of 512", (Setup(*shape, _8K),), prompt) for shape in (LLAMA, SMALL)]
    return found
