"""What torch offers without us: SDPA, a grouped matrix product, and page selection in eight lines.

All read contiguous K and V [batch, num_kv_heads, length, head_dim] in the memory pages that torch's allocator
gives. Each runs in the dtype that is fastest on this machine, and in the dtype of the pages where that is of
interest: 16-bit matrix products without instructions for them can be ten times slower than fp32, and prove
nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ops.harness import checks
from benchmarks.ops.harness.layers import Layers, Setup
from benchmarks.ops.harness.run import Run, name_of, setup_facts
from benchmarks.ops.harness.scoring import Budget
from benchmarks.ops.harness.timing import Variant

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRIAL_LENGTH = 4096
_HOPELESS = 2.0
_TOLERANCE = 5e-2  # torch rounds the weights to 16 bits before it multiplies

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def sdpa(q: Tensor, keys: Tensor, values: Tensor, sm_scale: float) -> Tensor:
    """q [batch, num_heads, head_dim] -> the same shape."""
    out = scaled_dot_product_attention(q[:, :, None], keys, values, scale=sm_scale, enable_gqa=True)
    return out[:, :, 0]


def grouped_bmm(q: Tensor, keys: Tensor, values: Tensor, sm_scale: float) -> Tensor:
    """All query heads of a kv head in one matrix product: K and V are read once."""
    query = q.view(keys.size(0) * keys.size(1), -1, keys.size(3))
    weights = torch.bmm(query * sm_scale, keys.flatten(0, 1).transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, values.flatten(0, 1)).view(q.shape)


def page_selection(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    num_pages: int,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Quest's box with the group's mean feature, top-K, `index_select`, grouped product. page_max, page_min
    [batch * num_kv_heads, pages, head_dim]. Returns out and the pages it read [batch * num_kv_heads,
    num_pages].
    """
    heads, pages, head_dim = page_max.shape
    query = q.view(heads, -1, head_dim)
    upper, lower = query.clamp(min=0).mean(1, keepdim=True), query.clamp(max=0).mean(1, keepdim=True)
    scores = torch.bmm(upper, page_max.transpose(1, 2)) + torch.bmm(lower, page_min.transpose(1, 2))
    chosen = scores[:, 0].topk(num_pages, sorted=False).indices.sort().values
    rows = (chosen + torch.arange(heads)[:, None] * pages).flatten()
    near_k, near_v = (
        x.view(heads * pages, -1).index_select(0, rows).view(heads, -1, head_dim) for x in (keys, values)
    )
    weights = torch.bmm(query * sm_scale, near_k.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, near_v).view(q.shape), chosen


@functools.cache
def worthwhile_dtypes(
    attention: Attention, num_heads: int, num_kv_heads: int, head_dim: int, own: torch.dtype, threads: int
) -> tuple[torch.dtype, ...]:
    """The fastest dtype of a baseline here, and `own` unless a short trial shows it to be hopeless."""
    seconds = {}
    for dtype in dict.fromkeys((own, *_DTYPES)):
        q = torch.randn(1, num_heads, head_dim).to(dtype)
        keys, values = (torch.randn(1, num_kv_heads, _TRIAL_LENGTH, head_dim).to(dtype) for _ in range(2))
        trials = []
        for _ in range(5):
            start = time.perf_counter()
            attention(q, keys, values, head_dim**-0.5)
            trials.append(time.perf_counter() - start)
        seconds[dtype] = min(trials)
    fastest = min(seconds, key=lambda dtype: seconds[dtype])
    chosen = [fastest] if seconds[own] > _HOPELESS * seconds[fastest] else [own, fastest]
    return tuple(dict.fromkeys(chosen))


def add_torch_dense(run: Run, layers: Layers, *, compared_with: Variant) -> None:
    """SDPA and the grouped product over everything."""
    setup = layers.setup
    copies = _Copies(layers)
    for name, attention in (("sdpa", sdpa), ("bmm", grouped_bmm)):
        for dtype in _dtypes(run, setup, attention):
            num_bytes = copies.kv_bytes(dtype)
            passes = _passes(run, copies, num_bytes, dtype)
            copies.make(dtype, len(set(passes)))

            def call(layer: int, attention: Attention = attention, dtype: torch.dtype = dtype) -> Tensor:
                return attention(copies.query(layer, dtype), *copies.kv(layer, dtype), setup.sm_scale)

            variant = _new_variant(run, layers, name, dtype, call, passes, num_bytes, compared_with)
            checks.check_output(variant.name, layers, 0, call(0), tolerance=_TOLERANCE)


def add_torch_selection(run: Run, layers: Layers, budget: Budget, *, compared_with: Variant) -> None:
    """The eight lines. Stored tokens must fill their pages, which the view of a cache as pages needs."""
    setup = layers.setup
    copies = _Copies(layers)
    num_pages, heads = setup.page_budget(budget), setup.batch * setup.num_kv_heads
    for dtype in _dtypes(run, setup, grouped_bmm):
        page_bytes = setup.page_size * setup.head_dim * dtype.itemsize
        summary_bytes = heads * setup.num_pages * 2 * setup.head_dim * dtype.itemsize
        num_bytes = heads * num_pages * 2 * page_bytes + summary_bytes
        passes = _passes(run, copies, num_bytes, dtype)
        copies.make(dtype, len(set(passes)))
        boxes = []
        for layer in sorted(set(passes)):
            keys = copies.kv(layer, dtype)[0].view(heads, setup.num_pages, setup.page_size, setup.head_dim)
            boxes.append((keys.amax(2), keys.amin(2)))

        def call(layer: int, dtype: torch.dtype = dtype, boxes: Any = boxes) -> tuple[Tensor, Tensor]:
            q = copies.query(layer, dtype)
            (keys, values), (page_max, page_min) = copies.kv(layer, dtype), boxes[layer]
            return page_selection(q, keys, values, page_max, page_min, num_pages, setup.sm_scale)

        variant = _new_variant(run, layers, "selection", dtype, call, passes, num_bytes, compared_with)
        variant.facts |= {
            "scorer": "bounds_full",
            "group_reduction": "mean",
            "budget": budget,
            "budget_pages": num_pages,
            "pages_read": heads * num_pages,
            "summaries_read": heads * setup.num_pages,
            "summary_bytes": summary_bytes,
        }
        out, chosen = call(0)
        chosen = chosen.view(setup.batch, setup.num_kv_heads, num_pages)
        checks.check_output(variant.name, layers, 0, out, chosen, tolerance=_TOLERANCE)


def _dtypes(run: Run, setup: Setup, attention: Attention) -> tuple[torch.dtype, ...]:
    shape = (setup.num_heads, setup.num_kv_heads, setup.head_dim)
    return worthwhile_dtypes(attention, *shape, setup.compute_dtype, run.settings.threads)


def _new_variant(
    run: Run,
    layers: Layers,
    name: str,
    dtype: torch.dtype,
    call: Callable[[int], Any],
    passes: Sequence[int],
    num_bytes: int,
    compared_with: Variant,
) -> Variant:
    own_dtype, threads = str(dtype).removeprefix("torch."), run.settings.threads
    facts = {"op": f"torch_{name}", "variant": f"torch {name}, {own_dtype}", **setup_facts(layers.setup)}
    facts["baseline_dtype"] = own_dtype
    unique = name_of(run, layers, f"torch {name} {own_dtype}", threads)
    return run.add(Variant(unique, call, passes, num_bytes, threads, facts, compared_with=compared_with.name))


def _passes(run: Run, copies: _Copies, num_bytes: int, dtype: torch.dtype) -> Sequence[int]:
    if run.hot:
        return [0] * run.calls_hot
    wanted = run.settings.layers_for(num_bytes, copies.kv_bytes(dtype))
    return range(min(wanted, copies.layers.num_layers))


class _Copies:
    """Contiguous K and V of the first layers, per dtype."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self._kv: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        self._queries: dict[torch.dtype, list[Tensor]] = {}

    def make(self, dtype: torch.dtype, num_layers: int) -> None:
        kv = self._kv.setdefault(dtype, [])
        kv += [self.layers.contiguous(layer, dtype) for layer in range(len(kv), num_layers)]
        self._queries[dtype] = [q.to(dtype) for q in self.layers.queries]

    def kv(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._kv[dtype][layer]

    def query(self, layer: int, dtype: torch.dtype) -> Tensor:
        return self._queries[dtype][layer]

    def kv_bytes(self, dtype: torch.dtype) -> int:
        setup = self.layers.setup
        return 2 * setup.batch * setup.num_kv_heads * setup.length * setup.head_dim * dtype.itemsize
