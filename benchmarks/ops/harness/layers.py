"""The KV of many layers, made as the library makes it: `LayerPool`, `append_kv`, `seal_pages`.

Layer 0 is written through `append_kv`. The others are copies with their pages rotated, so that every layer
holds other tokens at every position and none costs more than a copy. Scorers share K and V: each has its own
summaries. Where only summaries are read, all layers share the K and V of layer 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.common import expect
from tinyserve_ops import SparseConfig, ops, scorers
from tinyserve_ops.config import KV_DTYPES
from tinyserve_ops.layer_pool import LayerPool

_TOKENS_PER_APPEND = 8192
_NOISE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Setup:
    """What is cached, and for which query shape. `page_order` "random" scatters sequences over the pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    page_size: int = 16
    page_order: str = "ascending"

    @property
    def num_pages(self) -> int:
        """Of one sequence, the last one possibly open."""
        return -(-self.length // self.page_size)

    @property
    def kv_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of queries and new keys: the pages' own, or bf16 beside int8 pages."""
        return self.kv_dtype if self.kv_dtype.is_floating_point else torch.bfloat16

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def label(self) -> str:
        shape = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"
        order = "" if self.page_order == "ascending" else f" {self.page_order}"
        return f"{shape} {self.length} x{self.batch} {self.dtype}{order}"

    def page_budget(self, budget: int | float) -> int:
        """Pages of a token budget (int) or of a keep ratio (float), as the library counts them."""
        if isinstance(budget, float):
            config = SparseConfig(page_size=self.page_size, keep_ratio=budget)
        else:
            config = SparseConfig(page_size=self.page_size, token_budget=budget)
        return config.page_budget(self.num_pages)


def supported_dtypes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `names` that this build of the library stores pages in."""
    return tuple(name for name in names if name in KV_DTYPES)


class Layers:
    """`num_layers` layers of one setup.

    Attributes:
        pools: one `LayerPool` per layer; its own scorer is the first one asked for.
        queries: one q [batch, num_heads, head_dim] per layer.
        page_table, seq_lens, cu_query_lens: as for the ops; a query is the newest of `length` stored tokens.
    """

    def __init__(
        self,
        setup: Setup,
        num_layers: int,
        scorer_names: tuple[str, ...],
        seed: int,
        *,
        only_summaries: bool = False,
    ) -> None:
        self.setup = setup
        self._noise = _Noise(seed)
        self._scorer_names = scorer_names or ("bounds",)
        batch, pages = setup.batch, setup.num_pages
        self.num_pages = batch * pages
        page_ids = torch.arange(self.num_pages, dtype=torch.int32)
        if setup.page_order == "random":
            generator = torch.Generator().manual_seed(seed)
            page_ids = page_ids[torch.randperm(self.num_pages, generator=generator)]
        self.page_table = page_ids.view(batch, pages)
        self.seq_lens = torch.full((batch,), setup.length - 1, dtype=torch.int32)
        self.cu_query_lens = torch.arange(batch + 1, dtype=torch.int32)
        self.queries = [
            self._noise.take(batch, setup.num_heads, setup.head_dim).to(setup.compute_dtype)
            for _ in range(num_layers)
        ]
        self.pools = [self._new_pool(self._scorer_names[0]) for _ in range(num_layers)]
        self._append(self.pools[0])
        for layer in range(1, num_layers):
            if only_summaries:
                self.pools[layer] = self._sealed_anew(self.pools[0], self._scorer_names[0])
            else:
                _copy_rotated(self.pools[0], self.pools[layer], layer)
        self._scored = {self.pools[0].scorer: self.pools}
        expect(f"{setup.label}: K is channel-major", 1, self.pools[-1].k_pages.stride(2))
        expect(f"{setup.label}: V is token-major", 1, self.pools[-1].v_pages.stride(3))

    @property
    def num_layers(self) -> int:
        return len(self.pools)

    def scored(self, scorer: str) -> list[LayerPool]:
        """The pools with the summaries of `scorer`: the same K and V, sealed anew at the first call."""
        name = scorers.resolve(scorer, self.setup.page_size, self.setup.kv_dtype)
        if name not in self._scored:
            self._scored[name] = [self._sealed_anew(pool, scorer) for pool in self.pools]
        return self._scored[name]

    @cached_property
    def sealed_pages(self) -> int:
        """Full pages of one sequence and kv head."""
        return self.setup.length // self.setup.page_size

    def contiguous(
        self, layer: int, dtype: torch.dtype, sequences: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """K and V [batch, num_kv_heads, length, head_dim] as torch wants them, in the order of the tokens."""
        pool = self.pools[layer]
        ids = self.page_table[sequences].long()
        parts = []
        for pages, scales in ((pool.k_pages, pool.k_scales), (pool.v_pages, pool.v_scales)):
            dense = pages[ids]  # [batch, pages, num_kv_heads, page_size, head_dim]
            if scales is not None:
                dense = dense.float() * scales[ids][..., None]
            dense = dense.permute(0, 2, 1, 3, 4).to(dtype).flatten(2, 3)
            parts.append(dense[:, :, : self.setup.length].contiguous())
        return parts[0], parts[1]

    def _new_pool(self, scorer: str) -> LayerPool:
        setup = self.setup
        return LayerPool(
            self.num_pages,
            setup.num_kv_heads,
            setup.page_size,
            setup.head_dim,
            dtype=setup.kv_dtype,
            device=torch.device("cpu"),
            scorer=scorer,
            channel_major=True,
        )

    def _append(self, pool: LayerPool) -> None:
        setup = self.setup
        step = max(setup.page_size, _TOKENS_PER_APPEND // setup.batch)
        for start in range(0, setup.length, step):
            new = min(step, setup.length - start)
            k, v = (
                self._noise.take(setup.batch * new, setup.num_kv_heads, setup.head_dim).to(
                    setup.compute_dtype
                )
                for _ in range(2)
            )
            ops.append_kv(
                k, v, self.cu_query_lens * new, torch.full_like(self.seq_lens, start), self.page_table,
                pool.k_pages, pool.v_pages, pool.k_scales, pool.v_scales, pool.page_summary, pool.scorer,
            )  # fmt: skip

    def _sealed_anew(self, pool: LayerPool, scorer: str) -> LayerPool:
        other = self._new_pool(scorer)  # its K and V are never touched, so they cost nothing
        for part in ("k_pages", "v_pages", "k_scales", "v_scales"):
            setattr(other, part, getattr(pool, part))
        page_ids = torch.arange(self.num_pages, dtype=torch.int32)
        ops.seal_pages(page_ids, other.k_pages, other.k_scales, other.page_summary, other.scorer)
        return other


class _Noise:
    """Normal numbers from one fixed table, read from changing offsets: fresh ones cost seconds per layer."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(_NOISE_ELEMENTS, generator=generator)
        self._offset = 0

    def take(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        assert count <= _NOISE_ELEMENTS // 2
        self._offset = (self._offset + count + 7919) % (_NOISE_ELEMENTS - count)
        return self._table[self._offset : self._offset + count].view(shape)


def parts_of(pool: LayerPool) -> list[Tensor]:
    """Its tensors: K, V, scales where there are any, summaries."""
    parts = (pool.k_pages, pool.v_pages, pool.k_scales, pool.v_scales, pool.page_summary)
    return [part for part in parts if part is not None]


def _copy_rotated(source: LayerPool, target: LayerPool, shift: int) -> None:
    shift = shift * 97 % source.num_pages
    for old, new in zip(parts_of(source), parts_of(target), strict=True):
        new[shift:].copy_(old[: source.num_pages - shift])
        new[:shift].copy_(old[source.num_pages - shift :])
