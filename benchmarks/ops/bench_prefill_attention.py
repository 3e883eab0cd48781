"""`prefill_attention`: a whole prompt, and a chunk behind stored tokens, against torch's SDPA."""

from __future__ import annotations

import torch

from benchmarks.ops.harness.layers import Setup
from benchmarks.ops.harness.points import LLAMA, SMALL, Point
from benchmarks.ops.harness.prefill import add_prefill, add_torch_prefill
from benchmarks.ops.harness.run import Run, make_layers

_CHUNK = 512


def chunk(run: Run, setups: tuple[Setup, ...]) -> None:
    """The last 512 tokens; all of them where the setup holds no more."""
    setup = setups[0]
    layers = make_layers(run.settings, setup, max_layers=2)
    ours = add_prefill(run, layers, _CHUNK)
    for dtype in dict.fromkeys((torch.float32, setup.compute_dtype)):
        add_torch_prefill(run, layers, _CHUNK, dtype, ours)


def points() -> list[Point]:
    found = [Point("whole prompt", (Setup(*shape, _CHUNK),), chunk) for shape in (LLAMA, SMALL)]
    found += [
        Point("behind stored tokens", (Setup(*SMALL, 8192, dtype=d),), chunk) for d in ("bfloat16", "float32")
    ]
    found += [Point("behind stored tokens", (Setup(*LLAMA, 2048),), chunk)]
    return found
