"""Layers of random keys and values in shuffled pages: enough of them that none is still in the L2 cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyserve_ops import ops
from tinyserve_ops.scorers import resolve, summary_bytes


@dataclass(frozen=True)
class Setup:
    """`batch` sequences that have `length` tokens each, the newest included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    page_size: int = 16

    @property
    def kv_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.length // self.page_size)

    def kv_bytes(self, pages: int) -> int:
        """Of K and V (and scales) in so many pages of every sequence and kv head."""
        row = self.head_dim * self.kv_dtype.itemsize + (4 if self.kv_dtype == torch.int8 else 0)
        return 2 * self.batch * self.num_kv_heads * pages * self.page_size * row

    def summary_bytes(self, scorer: str) -> int:
        """Of all summaries."""
        name = resolve(scorer, self.page_size, self.kv_dtype)
        row = summary_bytes(name, self.head_dim, self.page_size)
        return self.batch * self.num_kv_heads * self.pages_per_sequence * row


class Layer:
    """Pools, summaries by scorer, and the query, key and value of the newest token."""

    def __init__(self, setup: Setup, scorers: tuple[str, ...], page_ids: Tensor) -> None:
        device = page_ids.device
        compute = torch.float32 if setup.dtype == "float32" else torch.bfloat16
        if setup.dtype == "float16":
            compute = torch.float16
        num_pages = page_ids.numel()
        shape = (num_pages, setup.num_kv_heads, setup.page_size, setup.head_dim)
        self.k_scales: Tensor | None = None
        self.v_scales: Tensor | None = None
        if setup.kv_dtype == torch.int8:
            self.k_pages, self.v_pages = (
                torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for _ in range(2)
            )
            self.k_scales, self.v_scales = (torch.rand(shape[:3], device=device) / 64 for _ in range(2))
        else:
            self.k_pages, self.v_pages = (
                torch.randn(shape, dtype=setup.kv_dtype, device=device) for _ in range(2)
            )
        self.summaries: dict[str, Tensor] = {}
        for scorer in scorers:
            name = resolve(scorer, setup.page_size, setup.kv_dtype)
            num_bytes = summary_bytes(name, setup.head_dim, setup.page_size)
            rows = torch.empty(*shape[:2], num_bytes, dtype=torch.uint8, device=device)
            ops.seal_pages(page_ids.flatten(), self.k_pages, self.k_scales, rows, name)
            self.summaries[scorer] = rows
        heads = (setup.num_heads, setup.num_kv_heads, setup.num_kv_heads)
        self.q, self.k, self.v = (
            torch.randn(setup.batch, count, setup.head_dim, dtype=compute, device=device) for count in heads
        )


class Layers:
    """`num_layers` layers of a setup that share one page table, as the layers of a model do."""

    def __init__(
        self, setup: Setup, num_layers: int, scorers: tuple[str, ...], device: str, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.setup = setup
        shape = (setup.batch, setup.pages_per_sequence)
        self.page_table = torch.randperm(shape[0] * shape[1]).to(torch.int32).view(shape).to(device)
        self.cu_query_lens = torch.arange(setup.batch + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.full((setup.batch,), setup.length - 1, dtype=torch.int32, device=device)
        self.layers = [Layer(setup, scorers, self.page_table) for _ in range(num_layers)]
        self.sm_scale = setup.head_dim**-0.5

    def batch(self) -> dict[str, Any]:
        """The arguments that say which rows there are."""
        return {
            "cu_query_lens": self.cu_query_lens,
            "seq_lens": self.seq_lens,
            "page_table": self.page_table,
        }

    def contiguous(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """K and V as other libraries take them: [batch, num_kv_heads, length, head_dim] of q's dtype."""
        ids = self.page_table.long()

        def dense(pages: Tensor, scales: Tensor | None) -> Tensor:
            rows = pages[ids].to(layer.q.dtype)  # [batch, pages, heads, page_size, head_dim]
            if scales is not None:
                rows = rows * scales[ids][..., None].to(layer.q.dtype)
            return rows.transpose(1, 2).flatten(2, 3)[:, :, : self.setup.length].contiguous()

        return dense(layer.k_pages, layer.k_scales), dense(layer.v_pages, layer.v_scales)
