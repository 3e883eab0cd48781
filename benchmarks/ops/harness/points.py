"""A point of a benchmark: what is measured in one run. The command line narrows them, it never adds any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.ops.harness.layers import Setup
from benchmarks.ops.harness.run import Run
from benchmarks.ops.harness.settings import Settings


@dataclass(frozen=True)
class Point:
    """One run: `setups` are cached side by side, `build` puts the variants together.

    Attributes:
        in_quick: also part of `--quick`.
        hot: the caches stay within the last-level cache.
    """

    name: str
    setups: tuple[Setup, ...]
    build: Callable[[Run, tuple[Setup, ...]], None]
    in_quick: bool = False
    hot: bool = False

    def run(self, settings: Settings) -> Run:
        """The point's variants, checked and ready to be timed."""
        run = Run(settings, [], hot=self.hot)
        self.build(run, self.setups)
        return run


LLAMA = (32, 8, 128)  # query heads, kv heads, head_dim: grouped heads of a large model
MHA = (12, 12, 64)  # no grouping
SMALL = (9, 3, 64)  # SmolLM2-135M: three kv heads for however many cores
SHAPES = (LLAMA, MHA, SMALL)
