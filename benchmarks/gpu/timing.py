"""Microseconds per call: every variant is one CUDA graph over all layers, and the graphs take turns.

On a CPU (the tests of the benchmark itself) calls are made one after the other without a graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.variants import Variant


@dataclass(frozen=True)
class Timing:
    median_us: float
    min_us: float


def time_variants(
    variants: list[Variant], num_layers: int, device: str, repetitions: int = 30
) -> dict[str, Timing]:
    """Of one call of each variant, by name. A variant that cannot be captured is left out, by name."""
    runs: dict[str, Callable[[], float]] = {}
    for variant in variants:
        try:
            runs[variant.name] = _timed(variant, num_layers, device)
        except RuntimeError as error:
            print(f"left out: {variant.name}: {str(error)[:200]}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(3 + repetitions):
        for name, run in runs.items():
            elapsed = run()
            if repetition >= 3:
                seconds[name].append(elapsed / num_layers)
    return {
        name: Timing(1e6 * statistics.median(values), 1e6 * min(values)) for name, values in seconds.items()
    }


def copy_gbps(device: str, num_bytes: int = 2 << 30, repetitions: int = 20) -> float:
    """Bytes read and written per second by a plain copy on the device: the ceiling of the run."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = Variant("copy", lambda _: target.copy_(source), 2 * num_bytes, {})
    timing = time_variants([copy], 1, device, repetitions)["copy"]
    return 2 * num_bytes / timing.median_us / 1e3


def _timed(variant: Variant, num_layers: int, device: str) -> Callable[[], float]:
    """A function that makes a call on each layer and returns the seconds of all."""

    def calls() -> None:
        for layer in range(num_layers):
            variant.call(layer)

    if device == "cpu":
        return lambda: _seconds_on_cpu(calls)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return replay


def _seconds_on_cpu(calls: Callable[[], None]) -> float:
    begin = time.perf_counter()
    calls()
    return time.perf_counter() - begin
