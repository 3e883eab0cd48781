"""Times variants against each other: all take turns within one run, each over many layers.

A pass of a variant runs it once on each of its layers, in order. What a pass reads exceeds the last-level
cache, so every pass finds its layers cold, whoever read them last. Passes of all variants alternate, in
rotating order: a disturbance of seconds hits all of them, and ratios are of one run.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.common import expect
from benchmarks.ops.harness.settings import Settings

_WAKE = torch.zeros(1 << 17)


@dataclass
class Variant:
    """One thing to time.

    Attributes:
        call: runs it on a layer; returns seconds where it measures itself (the probe), else anything.
        prepare: runs before each call, untimed.
        layers: the layers of a pass, in order.
        num_bytes: read (and written) by one call, counted.
        facts: fields of its record.
        compared_with: name of the variant that its speed-up refers to.
        probe: name of the variant that reads the same bytes and computes nothing.
    """

    name: str
    call: Callable[[int], Any]
    layers: Sequence[int]
    num_bytes: int
    threads: int
    facts: dict[str, Any] = field(default_factory=dict)
    compared_with: str | None = None
    probe: str | None = None
    times_itself: bool = False
    prepare: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Timing:
    """Of one variant.

    Attributes:
        seconds: of each call, [repetitions, layers of a pass].
        preemptions: how often the system gave a core of ours to somebody else meanwhile.
    """

    seconds: np.ndarray
    preemptions: int

    @property
    def median(self) -> float:
        """Mean over the layers of each layer's median."""
        return float(np.median(self.seconds, axis=0).mean())

    @property
    def minimum(self) -> float:
        """Mean over the layers of each layer's best repetition: no single lucky layer decides."""
        return float(self.seconds.min(axis=0).mean())


def time_variants(variants: Sequence[Variant], settings: Settings, *, hot: bool = False) -> dict[str, Timing]:
    """Interleaved timings by variant name. `hot` runs each pass once untimed before it counts."""
    rows: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
    preemptions = dict.fromkeys(rows, 0)
    expect("names of variants are unique", len(variants), len(rows))
    threads_before = torch.get_num_threads()
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode():
            for repetition in range(settings.warmup + settings.repetitions):
                turn = repetition % len(variants)
                for variant in (*variants[turn:], *variants[:turn]):
                    before = _preemptions()
                    row = _run_pass(variant, hot)
                    if repetition >= settings.warmup:
                        rows[variant.name].append(row)
                        preemptions[variant.name] += _preemptions() - before
    finally:
        gc.enable()
        torch.set_num_threads(threads_before)
    return {name: Timing(np.array(seconds), preemptions[name]) for name, seconds in rows.items()}


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _run_pass(variant: Variant, hot: bool) -> list[float]:
    if torch.get_num_threads() != variant.threads:
        torch.set_num_threads(variant.threads)
    expect(f"{variant.name}: threads", variant.threads, torch.get_num_threads())
    if variant.times_itself:
        # torch's threads spin for a while after their last work, in the way of the probe's own.
        time.sleep(0.003)
    else:
        _WAKE.add_(1.0)  # brings torch's threads back from sleep
    if hot:
        for layer in variant.layers:
            variant.call(layer)
    seconds = []
    for layer in variant.layers:
        if variant.prepare is not None:
            variant.prepare(layer)
        start = time.perf_counter()
        result = variant.call(layer)
        end = time.perf_counter()
        seconds.append(result if variant.times_itself else end - start)
    return seconds
