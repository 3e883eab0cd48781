"""`LayerPool`: the tensors that hold the KV pages, their scales and page summaries of one layer.

Allocated and never filled: a page costs physical memory once it is written. Growing replaces the tensors, so
nobody keeps them across forwards (a compiled step does, and the pool does not grow meanwhile).
"""

from __future__ import annotations

import ctypes
import math
import sys

import torch

from tinyserve_ops import scorers

__all__ = ["LayerPool", "kv_bytes_per_token"]

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]


def kv_bytes_per_token(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token and one kv head in pages of `dtype`: int8 rows have an fp32 scale."""
    scale_bytes = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * (head_dim * dtype.itemsize + scale_bytes)


class LayerPool:
    """K, V and summaries of one layer, by page id.

    Attributes:
        k_pages, v_pages: [num_pages, num_kv_heads, page_size, head_dim]. On the CPU K is stored channel-major
            (the token stride is 1), which turns q.K of a page into whole vectors of tokens; V and everything
            on CUDA is token-major.
        k_scales, v_scales: fp32 [num_pages, num_kv_heads, page_size] beside int8 pages, else None.
        page_summary: uint8 [num_pages, num_kv_heads, summary_bytes].
        scorer: the scorer under the name the ops know it by.
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scorer: str,
        channel_major: bool,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.channel_major = channel_major
        self.scorer = scorers.resolve(scorer, page_size, dtype)
        self.summary_bytes = scorers.summary_bytes(scorer, head_dim, page_size, dtype)
        self._take(self._allocate(num_pages))

    @property
    def num_pages(self) -> int:
        return self.v_pages.size(0)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token and one kv head."""
        return kv_bytes_per_token(self.head_dim, self.dtype)

    @property
    def parts(self) -> Parts:
        """k_pages, v_pages, k_scales, v_scales, page_summary: the order of the ops that move pages."""
        return self.k_pages, self.v_pages, self.k_scales, self.v_scales, self.page_summary

    @property
    def bytes_per_page(self) -> int:
        """K, V, scales and summary of one page, all heads."""
        return self.num_kv_heads * (self.page_size * self.kv_bytes_per_token + self.summary_bytes)

    def grow(self, num_pages: int, num_live: int) -> None:
        """Reallocates for `num_pages` pages and copies the first `num_live` ones."""
        new = self._allocate(num_pages)
        for source, target in zip(self.parts, new, strict=True):
            if source is not None and target is not None:
                target[:num_live].copy_(source[:num_live])
        self._take(new)

    def _take(self, parts: Parts) -> None:
        self.k_pages, self.v_pages, self.k_scales, self.v_scales, self.page_summary = parts

    def _allocate(self, num_pages: int) -> Parts:
        # Uninitialised on purpose: pages cost physical memory only once they are written. Outside inference
        # mode, or a cache made under it could never be written from normal mode.
        shape = (num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        with torch.inference_mode(False), torch.no_grad():
            k_storage_shape = (*shape[:2], shape[3], shape[2]) if self.channel_major else shape
            k_storage = _empty(k_storage_shape, self.dtype, self.device)
            k_pages = k_storage.transpose(2, 3) if self.channel_major else k_storage
            v_pages = _empty(shape, self.dtype, self.device)
            page_summary = _empty((*shape[:2], self.summary_bytes), torch.uint8, self.device)
            k_scales = v_scales = None
            if self.dtype == torch.int8:
                k_scales, v_scales = (_empty(shape[:3], torch.float32, self.device) for _ in range(2))
        return k_pages, v_pages, k_scales, v_scales, page_summary


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor. A large one on a CPU under Linux lies in 2 MiB memory pages from its first
    byte to its last, where the system grants them: TLB misses cost a scan of summaries more than the reading.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _HUGE_PAGE_BYTES or not sys.platform.startswith("linux"):
        return torch.empty(shape, dtype=dtype, device=device)
    rounded_bytes = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = torch.empty(rounded_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    offset = -memory.data_ptr() % _HUGE_PAGE_BYTES
    _ask_for_huge_pages(memory.data_ptr() + offset, rounded_bytes)
    # Not a view: compiled steps copy what is written through one.
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(
        memory.untyped_storage(), offset // dtype.itemsize, shape, strides
    )


def _ask_for_huge_pages(start: int, num_bytes: int) -> None:
    """Asks Linux for 2 MiB memory pages. Best effort."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), ctypes.c_int(_MADV_HUGEPAGE))
    except (OSError, AttributeError):
        return
