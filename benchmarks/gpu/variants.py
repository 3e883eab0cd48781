"""What is timed on one setup: our ops and, where they are installed, other libraries; checked before."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import WrongPath, expect
from benchmarks.gpu.layers import Layer, Layers
from tinyserve_ops import ops
from tinyserve_ops.scorers import default_group_reduction, resolve

SINK_PAGES, RECENT_PAGES = 1, 2
PEERS = ("sdpa", "flex_attention", "flashinfer")
_TOLERANCE = 3e-2  # of the largest output; 16-bit results in another order


@dataclass(frozen=True)
class Variant:
    """`call(layer index)` reads `num_bytes`."""

    name: str
    call: Callable[[int], Any]
    num_bytes: int
    facts: dict[str, Any]


def dense(layers: Layers) -> Variant:
    """`attend_pages` over everything."""
    setup = layers.setup

    def call(index: int) -> tuple[Tensor, ...]:
        layer = layers.layers[index]
        return ops.attend_pages(
            layer.q, **layers.batch(), **_pools(layer), selected_pages=None, num_selected=None,
            sm_scale=layers.sm_scale,
        )  # fmt: skip

    check_output("dense", layers, call(0)[0])
    num_bytes = setup.kv_bytes(setup.pages_per_sequence)
    return Variant("dense", call, num_bytes, {"op": "attend_pages"})


def sparse(layers: Layers, scorer: str, budget_tokens: int, *, append: bool = False) -> Variant:
    """`sparse_decode`, bit for bit its three parts; with `append`, after `append_kv` as in a model's step."""
    setup = layers.setup
    name = resolve(scorer, setup.page_size, setup.kv_dtype)
    budget = budget_tokens // setup.page_size
    page_budget = torch.full_like(layers.seq_lens, budget)
    selection: dict[str, Any] = {
        "page_budget": page_budget,
        "max_page_budget": budget,
        "num_sink_pages": SINK_PAGES,
        "num_recent_pages": RECENT_PAGES,
    }
    scoring: dict[str, Any] = {
        "scorer": name,
        "group_reduction": default_group_reduction(name),
        "sm_scale": layers.sm_scale,
    }

    def call(index: int) -> tuple[Tensor, ...]:
        layer = layers.layers[index]
        summary = layer.summaries[scorer]
        if append:
            ops.append_kv(
                layer.k, layer.v, **layers.batch(), **_pools(layer), page_summary=summary, scorer=name
            )
        return ops.sparse_decode(
            layer.q, **layers.batch(), **_pools(layer), page_summary=summary, **selection, **scoring
        )

    layer = layers.layers[0]
    out, lse, selected_pages, num_selected = call(0)
    page_scores = ops.score_pages(
        layer.q, **layers.batch(), page_summary=layer.summaries[scorer], page_size=setup.page_size, **scoring
    )
    batch = {key: value for key, value in layers.batch().items() if key != "page_table"}
    lists = ops.select_pages(page_scores, **batch, page_size=setup.page_size, **selection)
    parts = ops.attend_pages(
        layer.q, **layers.batch(), **_pools(layer), selected_pages=lists[0], num_selected=lists[1],
        sm_scale=layers.sm_scale,
    )  # fmt: skip
    for got, want in zip((selected_pages, num_selected, out, lse), (*lists, *parts[:2]), strict=True):
        expect(f"sparse {scorer}: equals score, select and attend", True, torch.equal(got, want))
    expect(f"sparse {scorer}: pages per head", [budget], num_selected.unique().tolist())
    if budget >= setup.pages_per_sequence:
        raise WrongPath(f"sparse {scorer}: expected a budget that leaves pages out, got {budget} pages")
    num_bytes = setup.kv_bytes(budget) + setup.summary_bytes(scorer)
    title = f"sparse {budget_tokens} {scorer}{' after append' if append else ''}"
    facts = {"op": "sparse_decode", "scorer": name, "budget": budget_tokens, "append": append}
    return Variant(title, call, num_bytes, facts)


def peers(layers: Layers, names: tuple[str, ...]) -> Iterator[Variant]:
    """torch's SDPA and flex_attention, and FlashInfer's paged decode where it can be imported.

    Each reads a copy of its own of the same keys and values. One that fails here is left out, by name.
    """
    if layers.setup.dtype == "int8":
        return
    makers = {"sdpa": _sdpa, "flex_attention": _flex_attention, "flashinfer": _flashinfer}
    for name in names:
        try:
            yield makers[name](layers)
        except Exception as error:  # another library on a machine nobody knows: its failure is a result
            print(f"left out: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def check_output(name: str, layers: Layers, out: Tensor) -> None:
    """Raises WrongPath unless `out` is attention over everything, for the first layer."""
    layer = layers.layers[0]
    keys, values = (x[:1].float() for x in layers.contiguous(layer))
    group = layers.setup.num_heads // layers.setup.num_kv_heads
    q = layer.q[:1].float().unflatten(1, (-1, group))
    weights = torch.einsum("bhgd,bhtd->bhgt", q * layers.sm_scale, keys).softmax(-1)
    expected = torch.einsum("bhgt,bhtd->bhgd", weights, values).flatten(1, 2)
    error = float((out[:1].float() - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise WrongPath(
            f"{name}: expected attention within {_TOLERANCE}, got a relative error of {error:.2g}"
        )


def _pools(layer: Layer) -> dict[str, Any]:
    return {
        "k_pages": layer.k_pages,
        "v_pages": layer.v_pages,
        "k_scales": layer.k_scales,
        "v_scales": layer.v_scales,
    }


def _peer(name: str, layers: Layers, call: Callable[[int], Tensor]) -> Variant:
    check_output(name, layers, call(0))
    num_bytes = layers.setup.kv_bytes(layers.setup.pages_per_sequence)
    return Variant(name, call, num_bytes, {"op": name})


def _sdpa(layers: Layers) -> Variant:
    copies = [layers.contiguous(layer) for layer in layers.layers]

    def call(index: int) -> Tensor:
        q = layers.layers[index].q[:, :, None]
        out = scaled_dot_product_attention(q, *copies[index], scale=layers.sm_scale, enable_gqa=True)
        return out[:, :, 0]

    return _peer("torch sdpa", layers, call)


def _flex_attention(layers: Layers) -> Variant:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    copies = [layers.contiguous(layer) for layer in layers.layers]

    def call(index: int) -> Tensor:
        q = layers.layers[index].q[:, :, None]
        out = compiled(q, *copies[index], scale=layers.sm_scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[:, :, 0]

    return _peer("torch flex_attention", layers, call)


def _flashinfer(layers: Layers) -> Variant:
    if importlib.util.find_spec("flashinfer") is None:
        raise ImportError("not installed")
    flashinfer = importlib.import_module("flashinfer")
    setup = layers.setup
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=layers.page_table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    steps = torch.arange(setup.batch + 1, dtype=torch.int32, device=layers.page_table.device)
    last = torch.full_like(layers.seq_lens, (setup.length - 1) % setup.page_size + 1)
    wrapper.plan(
        steps * setup.pages_per_sequence, layers.page_table.flatten(), last, setup.num_heads,
        setup.num_kv_heads, setup.head_dim, setup.page_size, q_data_type=layers.layers[0].q.dtype,
        kv_data_type=setup.kv_dtype,
    )  # fmt: skip

    def call(index: int) -> Tensor:
        layer = layers.layers[index]
        out: Tensor = wrapper.run(layer.q, (layer.k_pages, layer.v_pages))
        return out

    return _peer("flashinfer paged decode", layers, call)
