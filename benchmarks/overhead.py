"""What the drop-in costs outside the kernels: the time in its two entry points, less that of the ops."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from transformers import AttentionInterface

from tinyserve_ops import ops
from tinyserve_ops.hf import TinyServeCache
from tinyserve_ops.hf.attention import attention_forward, register
from tinyserve_ops.hf.cache import ATTENTION_NAME


class Clock:
    """Seconds spent in the functions that `timed` wrapped."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


class _TimedOps:
    """Stands in for `torch.ops.tinyserve`: every op under a clock."""

    def __init__(self, real: Any, clock: Clock) -> None:
        self._real, self._clock = real, clock

    def __getattr__(self, name: str) -> Any:
        timed = SimpleNamespace(default=self._clock.timed(getattr(self._real, name).default))
        setattr(self, name, timed)
        return timed


@contextmanager
def _watched() -> Iterator[tuple[Clock, Clock]]:
    """Clocks of our two entry points (the ops included) and of the ops alone, while the block runs."""
    outer, inner = Clock(), Clock()
    real_ops, real_update = ops.OPS, TinyServeCache.update
    ops.OPS = _TimedOps(real_ops, inner)  # type: ignore[assignment]
    TinyServeCache.update = outer.timed(real_update)  # type: ignore[method-assign]
    AttentionInterface.register(ATTENTION_NAME, outer.timed(attention_forward))
    try:
        yield outer, inner
    finally:
        ops.OPS = real_ops
        TinyServeCache.update = real_update  # type: ignore[method-assign]
        register()


def overhead_us_per_layer(step: Callable[[], None], num_layers: int, num_steps: int) -> dict[str, float]:
    """Median over `num_steps` calls of `step`, which decodes one token with an enabled model."""
    found = []
    ops_found = []
    with _watched() as (outer, inner):
        for _ in range(num_steps):
            outer.seconds = inner.seconds = 0.0
            step()
            found.append(1e6 * (outer.seconds - inner.seconds) / num_layers)
            ops_found.append(1e6 * inner.seconds / num_layers)
    return {
        "overhead_us_per_layer": round(statistics.median(found), 2),
        "overhead_us_per_layer_minimum": round(min(found), 2),
        "ops_us_per_layer": round(statistics.median(ops_found), 2),
    }
