"""Storage of KV pages: one `LayerPool` of tensors per layer, and the `PagePool` that pairs them with page
allocators.

Invariant: every layer of a group has room for at least `allocator.num_pages` pages, and all pages ever handed
out lie below the group's high-water mark, so growing copies those and leaves untouched memory untouched. A
pool never shrinks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from tinyserve_ops import _library, ops
from tinyserve_ops._runtime import PageAllocator
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.errors import OutOfPagesError
from tinyserve_ops.layer_pool import LayerPool
from tinyserve_ops.scorers import resolve

__all__ = ["LayerPool", "PageGroup", "PagePool"]


class PageGroup:
    """The layers that share page tables: their allocator and their tensors, under the pool's lock."""

    def __init__(
        self, pool: PagePool, layer_ids: tuple[int, ...], layers: list[LayerPool], num_pages: int
    ) -> None:
        self._pool = weakref.ref(pool)  # a cycle would keep the tensors until the cycle collector runs
        self.layer_ids = layer_ids
        self.layers = layers
        self.allocator = PageAllocator(num_pages, layers[0].page_size)
        self.high_water = 0  # pages with an id below this may hold data

    @property
    def pool(self) -> PagePool:
        """The pool that the group is a part of."""
        pool = self._pool()
        assert pool is not None
        return pool

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers of the group."""
        return sum(layer.bytes_per_page for layer in self.layers)

    def reserve(self, sequence_ids: list[int], num_new: list[int]) -> list[tuple[int, int]]:
        """Makes room for `num_new` more tokens of each sequence; grows the pool where it may.

        Pages about to be written become exclusive: their copies are made here, in every layer, before anyone
            writes.

        Returns:
            The page copies made, (source, target) ids.

        Raises:
            OutOfPagesError: nothing changed.
        """
        with self.pool.lock:
            copies = self.allocator.try_reserve(sequence_ids, num_new)
            if copies is None:
                self._make_room(sequence_ids, num_new)
                copies = self.allocator.try_reserve(sequence_ids, num_new)
                while copies is None:
                    self._grow(2 * self.allocator.num_pages, 1)
                    copies = self.allocator.try_reserve(sequence_ids, num_new)
            if copies:
                self.note_page(max(target for _, target in copies))
                self._copy_pages(copies)
            return copies

    def note_page(self, page_id: int) -> None:
        """Tells the group that this page (and so any below) may hold data."""
        if page_id >= self.high_water:
            with self.pool.lock:
                self.high_water = max(self.high_water, page_id + 1)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        device = self.pool.device
        sources = torch.tensor([source for source, _ in copies], dtype=torch.int32, device=device)
        targets = torch.tensor([target for _, target in copies], dtype=torch.int32, device=device)
        with torch.no_grad():
            for pool in self.layers:
                ops.copy_pages(sources, targets, *pool.parts)

    def _make_room(self, sequence_ids: list[int], num_new: list[int]) -> None:
        """Grows by doubling until the new pages fit; copies that sharing may cost are not counted."""
        allocator = self.allocator
        page_size = allocator.page_size
        needed = 0
        for sequence_id, new in zip(sequence_ids, num_new, strict=True):
            pages = -(-(allocator.length(sequence_id) + new) // page_size)
            needed += max(0, pages - allocator.num_pages_of(sequence_id))
        missing = needed - (allocator.num_free + allocator.num_cached)
        num_pages = allocator.num_pages
        while num_pages - allocator.num_pages < missing:
            num_pages *= 2
        if num_pages > allocator.num_pages:
            self._grow(num_pages, missing, needed)

    def _grow(self, num_pages: int, missing: int, needed: int = 1) -> None:
        allocator = self.allocator
        largest, reason = self.pool.largest(self)
        target = min(num_pages, largest)
        if target < allocator.num_pages + max(missing, 1):
            raise OutOfPagesError(
                f"page pool: expected room for {needed} more pages, got {allocator.num_free} free and "
                f"{allocator.num_cached} evictable of {allocator.num_pages} ({reason})",
                num_pages_needed=needed,
                num_pages_free=allocator.num_free + allocator.num_cached,
                num_pages_total=allocator.num_pages,
            )
        try:
            for layer in self.layers:
                if layer.num_pages < target:
                    layer.grow(target, min(self.high_water, layer.num_pages))
        except (RuntimeError, MemoryError) as error:  # layers already grown are only larger than needed
            raise OutOfPagesError(
                f"page pool: growing from {allocator.num_pages} to {target} pages failed: {error}",
                num_pages_needed=needed,
                num_pages_free=allocator.num_free + allocator.num_cached,
                num_pages_total=allocator.num_pages,
            ) from error
        allocator.grow(target)
        self.pool.num_growths += 1


class PagePool:
    """Pages of all layers of a model, for one cache or for several that share them.

    Args:
        num_layers, num_kv_heads, head_dim: shape of the model's KV.
        config: page size, scorer and `max_kv_bytes` are taken from it.
        dtype: element type of the pages.
        device: where they live.
        max_tokens: capacity at the start, summed over sequences; rounded up to pages. The allocator's records
            take about 30 bytes a page at once; the pages themselves cost memory when they are written.
        layer_groups: layers that share page tables; default one group of all layers.
        growable: whether it may grow past `max_tokens`, by doubling, up to `config.max_kv_bytes`. Default:
            only on the CPU. A pool that several threads use should not grow: it replaces its tensors, and is
            refused while another thread has a forward open.
        channel_major: layout of K; default on the CPU. The ops take both.

    Raises:
        ValueError: a layer is in no group or in two, `max_kv_bytes` does not hold a single page, or the ops
            have no kernels for the device.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        config: SparseConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_tokens: int,
        layer_groups: Sequence[Sequence[int]] | None = None,
        growable: bool | None = None,
        channel_major: bool | None = None,
    ) -> None:
        self.num_layers = _positive("num_layers", num_layers)
        self.num_kv_heads = _positive("num_kv_heads", num_kv_heads)
        self.head_dim = _positive("head_dim", head_dim)
        if head_dim % 8 or head_dim > 256:
            raise ValueError(f"head_dim: expected a multiple of 8 from 8 to 256, got {head_dim}")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
            raise ValueError(f"dtype: expected float32, float16, bfloat16 or int8, got {dtype}")
        self.page_size = config.page_size
        self.dtype = dtype
        self.device = _device_with_kernels(device)
        self.scorer = resolve(config.scorer, config.page_size, dtype)
        self.max_kv_bytes = config.max_kv_bytes
        self.layer_groups = _check_groups(layer_groups, num_layers)
        self.growable = self.device.type == "cpu" if growable is None else growable
        self.num_growths = 0
        self.lock = threading.RLock()
        # Both only under the lock. Cache -> how many compiled steps hold the tensors themselves; cache ->
        # thread with a forward in progress.
        self._reservations: dict[int, int] = {}
        self._open_forwards: dict[int, int] = {}
        on_cpu = self.device.type == "cpu"

        def make_layer(num_pages: int) -> LayerPool:
            return LayerPool(
                num_pages,
                num_kv_heads,
                self.page_size,
                head_dim,
                dtype=dtype,
                device=self.device,
                scorer=config.scorer,
                channel_major=on_cpu if channel_major is None else channel_major,
            )

        num_pages = -(-_positive("max_tokens", max_tokens) // self.page_size)
        if self.max_kv_bytes is not None:
            bytes_per_page = make_layer(0).bytes_per_page * num_layers
            if self.max_kv_bytes < bytes_per_page:
                raise ValueError(
                    f"max_kv_bytes: expected at least {bytes_per_page}, one page of {num_layers} layers, "
                    f"got {self.max_kv_bytes}"
                )
            num_pages = min(num_pages, self.max_kv_bytes // bytes_per_page)
        self.layers = [make_layer(num_pages) for _ in range(num_layers)]
        self.groups = [
            PageGroup(self, layer_ids, [self.layers[i] for i in layer_ids], num_pages)
            for layer_ids in self.layer_groups
        ]

    @property
    def bytes_held(self) -> int:
        """Bytes of the pages that hold tokens of live sequences or cached prefixes."""
        return sum(
            (group.allocator.num_used + group.allocator.num_cached) * group.bytes_per_page
            for group in self.groups
        )

    @property
    def bytes_reserved(self) -> int:
        """Bytes of the whole pool in virtual memory."""
        return sum(layer.num_pages * layer.bytes_per_page for layer in self.layers)

    def largest(self, group: PageGroup) -> tuple[int, str]:
        """How many pages `group` may have at most now, and why not more."""
        now = group.allocator.num_pages
        if not self.growable:
            return now, "a pool of fixed size"
        if self._reservations:
            return now, "a pool does not grow while a compiled step holds its tensors"
        if any(thread != threading.get_ident() for thread in list(self._open_forwards.values())):
            return now, "a pool does not grow while another thread has a forward open"
        if self.max_kv_bytes is None:
            return 2**31 - 1, "page ids are 32 bits wide"
        others = sum(g.allocator.num_pages * g.bytes_per_page for g in self.groups if g is not group)
        return (self.max_kv_bytes - others) // group.bytes_per_page, f"max_kv_bytes is {self.max_kv_bytes}"

    def forward_opened(self, cache_id: int) -> None:
        """A forward of that cache is in progress in this thread."""
        with self.lock:
            self._open_forwards[cache_id] = threading.get_ident()

    def forward_closed(self, cache_id: int) -> None:
        """It ended, either way."""
        with self.lock:
            self._open_forwards.pop(cache_id, None)

    def reservation_opened(self, cache_id: int) -> None:
        """A compiled step of that cache holds the tensors. The caller has had the lock since it took the
        pages, so that the pool has not grown in between.
        """
        with self.lock:
            self._reservations[cache_id] = self._reservations.get(cache_id, 0) + 1

    def reservation_closed(self, cache_id: int) -> None:
        """One of them ended."""
        with self.lock:
            left = self._reservations.pop(cache_id, 1) - 1
            if left:
                self._reservations[cache_id] = left

    def forget_cache(self, cache_id: int) -> None:
        """The cache is gone, with whatever it had open or reserved."""
        with self.lock:
            self._open_forwards.pop(cache_id, None)
            self._reservations.pop(cache_id, None)

    def check_matches(
        self,
        shape: tuple[int, int, int],
        config: SparseConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        layer_groups: Sequence[Sequence[int]] | None,
    ) -> None:
        """Raises ValueError, by name, where a cache that wants to share this pool differs from it.

        `shape` is num_layers, num_kv_heads, head_dim.
        """
        expected: dict[str, tuple[object, object]] = {
            "num_layers, num_kv_heads, head_dim": (
                (self.num_layers, self.num_kv_heads, self.head_dim),
                shape,
            ),
            "config.page_size": (self.page_size, config.page_size),
            "dtype": (self.dtype, dtype),
            "config.scorer": (self.scorer, resolve(config.scorer, config.page_size, dtype)),
            "device": (self.device, torch.device(device)),
        }
        if layer_groups is not None:
            expected["layer_groups"] = (self.layer_groups, tuple(tuple(group) for group in layer_groups))
        for name, (have, got) in expected.items():
            if have != got:
                raise ValueError(f"{name}: expected {have}, what the shared pool was made for, got {got}")

    def check(self) -> None:
        """Raises RuntimeError naming the first broken invariant of the page accounting."""
        for index, group in enumerate(self.groups):
            allocator = group.allocator
            allocator.check()
            total = allocator.num_free + allocator.num_cached + allocator.num_used
            if total != allocator.num_pages:
                raise RuntimeError(
                    f"layer group {index}: expected free + cached + used = {allocator.num_pages}, got "
                    f"{allocator.num_free} + {allocator.num_cached} + {allocator.num_used}"
                )
            for layer_id, layer in zip(group.layer_ids, group.layers, strict=True):
                if layer.num_pages < allocator.num_pages:
                    raise RuntimeError(
                        f"layer {layer_id}: expected storage for {allocator.num_pages} pages, "
                        f"got {layer.num_pages}"
                    )


def _device_with_kernels(device: torch.device | str) -> torch.device:
    """The device, if pages there can be written and read ("meta" holds none)."""
    found = torch.device(device)
    if found.type in ("cpu", "meta"):
        return found
    if found.type == "cuda":
        _library.load_cuda(found)
    key = torch._C._dispatch_key_for_device(found.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("tinyserve::append_kv", key):
        raise ValueError(
            f"device: expected cpu (the ops on pages have no {found.type} kernels in this build), got {found}"
        )
    return found


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a positive integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value}")
    return value


def _check_groups(
    layer_groups: Sequence[Sequence[int]] | None, num_layers: int
) -> tuple[tuple[int, ...], ...]:
    if layer_groups is None:
        return (tuple(range(num_layers)),)
    groups = tuple(tuple(group) for group in layer_groups)
    if sorted(layer for group in groups for layer in group) != list(range(num_layers)) or not all(groups):
        raise ValueError(
            f"layer_groups: expected each of {num_layers} layers in exactly one group, got {groups}"
        )
    return groups
