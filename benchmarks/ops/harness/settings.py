"""How a run measures: repetitions, threads, how far beyond the last-level cache the layers reach."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_LLC_BYTES = 32 << 20


def llc_bytes() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = [_parse_size(path.read_text().strip()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_LLC_BYTES)


def _parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def memory_for_pools() -> int:
    """A quarter of the memory that is free now: what the layers of one point may take."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // 4
    return 2 << 30


@dataclass(frozen=True)
class Settings:
    """Shared by all points of a run.

    Attributes:
        llc_factor: the layers that a variant cycles through hold at least this many times the last-level
        cache, counted in the bytes that the variant reads, as far as `max_bytes` allows. max_bytes: of the
        pools of one setup, and of the contiguous copies for torch.
    """

    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    repetitions: int = 15
    warmup: int = 2
    llc_bytes: int = field(default_factory=llc_bytes)
    llc_factor: float = 4.0
    max_bytes: int = field(default_factory=memory_for_pools)
    seed: int = 0
    quick: bool = False

    def layers_for(self, bytes_per_call: int, bytes_per_layer: int) -> int:
        """Layers to cycle so that what is read exceeds the cache, limited by the memory they take."""
        wanted = -(-int(self.llc_factor * self.llc_bytes) // bytes_per_call)
        return max(1, min(wanted, self.max_bytes // bytes_per_layer))
