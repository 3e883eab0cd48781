"""The read-bandwidth probe: reads the very segments that a kernel reads, and only adds them up.

Of the orders that a kernel may walk its pages in, and of prefetching or not, it takes what is fastest in a
short trial: the highest rate is the honest limit. A small C reader, compiled when first needed, runs on as
many threads as the kernel has, each with one contiguous part of the list; without a compiler torch's sum
reads whole pools in place of it. `read_stream` reads the same pools from end to end with whichever of the two
is faster: the upper limit of the machine, whatever the order of a kernel.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ops.harness.layers import Layers, parts_of
from tinyserve_ops.layer_pool import LayerPool

_SOURCE = Path(__file__).with_name("read_segments.c")
_AHEAD = (0, 1, 2, 4)  # segments
_TRIAL_LAYERS = 4
_TRIALS = 3


@dataclass(frozen=True)
class Segments:
    """Memory that one call reads: int64 addresses and sizes, in the order of reading."""

    addresses: np.ndarray
    sizes: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())


def page_segments(layers: Layers, pool: LayerPool, pages: Tensor, order: str) -> Segments:
    """K and V (and scales) of logical pages, in one of `ORDERS`.

    Args:
        pages: int [batch, num_kv_heads, pages per head], no padding.
    """
    sequences = torch.arange(pages.size(0))[:, None, None]
    page_ids = layers.page_table[sequences, pages.long()].long().numpy()
    heads = np.arange(pages.size(1))[None, :, None]
    addresses, sizes = [], []
    for part in (pool.k_pages, pool.k_scales, pool.v_pages, pool.v_scales):
        if part is not None:
            element = part.element_size()
            addresses.append(part.data_ptr() + element * (page_ids * part.stride(0) + heads * part.stride(1)))
            sizes.append(part[0, 0].numel() * element)
    stacked = np.stack(addresses, axis=-1)
    places = _places(stacked.shape, order)
    all_sizes = np.broadcast_to(np.array(sizes, np.int64), stacked.shape)
    return Segments(stacked.reshape(-1)[places], all_sizes.reshape(-1)[places])


# Orders in which a kernel may walk the pages of a sequence's heads.
#   by chunk: 16 pages of a head, first their keys, then their values; then the next head's
#   by page: all heads of a page, then the next page
#   by head: all pages of a head, then the next head
ORDERS = ("by chunk", "by page", "by head")
_CHUNK_PAGES = 16


@functools.lru_cache(maxsize=4)
def _places(shape: tuple[int, ...], order: str) -> np.ndarray:
    """Flat indices of [batch, heads, pages, parts] in that order."""
    sequence, head, page, part = np.indices(shape).reshape(4, -1)
    keys = {
        "by chunk": (sequence, page // _CHUNK_PAGES, head, 2 * part // shape[3], page, part),
        "by page": (sequence, page, head, part),
        "by head": (sequence, head, page, part),
    }[order]
    return np.lexsort(keys[::-1])


def summary_segments(pool: LayerPool) -> Segments:
    """All summaries of a pool, one after the other."""
    return whole_segments([pool.page_summary])


def pool_segments(pool: LayerPool) -> Segments:
    """K and V (and scales) of a pool from end to end."""
    return whole_segments(parts_of(pool)[:-1])


def whole_segments(tensors: list[Tensor]) -> Segments:
    """Dense tensors cut into pieces of up to 1 MiB."""
    addresses, sizes = [], []
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        starts = np.arange(0, num_bytes, 1 << 20, dtype=np.int64)
        addresses.append(tensor.data_ptr() + starts)
        sizes.append(np.minimum(1 << 20, num_bytes - starts))
    return Segments(np.concatenate(addresses), np.concatenate(sizes))


def joined(*parts: Segments) -> Segments:
    """One list after the other."""
    return Segments(
        np.concatenate([part.addresses for part in parts]), np.concatenate([part.sizes for part in parts])
    )


class Reader:
    """Reads segments on `num_threads` threads, prefetching `ahead` segments on; times only the reading."""

    def __init__(self, num_threads: int, ahead: int = 0) -> None:
        self._ahead = ahead
        self._num_threads = num_threads
        self._read = _compiled_reader()
        # Woken for less than a millisecond, two threads may otherwise share one core while another idles.
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(
            num_threads, initializer=lambda: os.sched_setaffinity(0, {next(cores)})
        )
        self.sums: list[int] = []  # of the last call, one per thread: proof that every byte was read
        self._arrived = np.zeros(1, np.int32)
        self._times = np.zeros((num_threads, 2), np.int64)

    def split(self, segments: Segments) -> list[Segments]:
        """One part per thread, of about equal bytes."""
        ends = np.cumsum(segments.sizes)
        shares = ends[-1] * np.arange(1, self._num_threads) / self._num_threads
        cuts = np.searchsorted(ends, shares)
        pieces = zip(np.split(segments.addresses, cuts), np.split(segments.sizes, cuts), strict=True)
        return [Segments(np.ascontiguousarray(a), np.ascontiguousarray(s)) for a, s in pieces]

    def __call__(self, parts: list[Segments]) -> float:
        """Seconds from the first thread's first load to the last one's last."""
        self._arrived[0] = 0
        running = [
            self._threads.submit(
                self._read,
                part.addresses.ctypes.data,
                part.sizes.ctypes.data,
                len(part.sizes),
                self._ahead,
                self._arrived.ctypes.data,
                self._num_threads,
                self._times[thread].ctypes.data,
            )
            for thread, part in enumerate(parts)
        ]
        self.sums = [thread.result() for thread in running]
        return float(self._times[:, 1].max() - self._times[:, 0].min()) * 1e-9


def fastest_reader(num_threads: int, candidates: dict[str, list[Segments]]) -> tuple[str, Reader, str]:
    """Which order of the same segments (lists by layer), and which prefetch, a short trial finds fastest."""
    readers = {f"c, prefetch {ahead}" if ahead else "c": Reader(num_threads, ahead) for ahead in _AHEAD}
    best: dict[tuple[str, str], float] = {}
    for order, segments in candidates.items():
        parts = [Reader(num_threads).split(each) for each in segments[:_TRIAL_LAYERS]]
        for name, reader in readers.items():
            best[order, name] = min(sum(reader(part) for part in parts) for _ in range(_TRIALS))
    order, name = min(best, key=lambda pair: best[pair])
    return order, readers[name], name


def has_reader() -> bool:
    """Whether the C reader can be used here."""
    return _compiled_reader() is not None


def torch_read(tensors: list[Tensor]) -> float:
    """Seconds of torch's sum over whole tensors; reads as int64 where it can."""
    views = [_dense(tensor).view(torch.int64) for tensor in tensors]
    start = time.perf_counter()
    for view in views:
        view.sum()
    return time.perf_counter() - start


def _dense(tensor: Tensor) -> Tensor:
    """The same memory as one flat tensor; channel-major pages are contiguous the other way round."""
    return (tensor if tensor.is_contiguous() else tensor.transpose(2, 3)).view(-1)


@functools.cache
def _compiled_reader() -> Any:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "reader.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(_SOURCE), "-o", str(built)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        read = ctypes.CDLL(str(built)).read_segments
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    read.argtypes = [pointer, pointer, number, number, pointer, ctypes.c_int, pointer]
    read.restype = ctypes.c_uint64
    return read
