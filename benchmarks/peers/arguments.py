"""What every engine's script is given, and how it reports: one JSON object a line, on its standard output.

The scripts run in another environment than the library's; nothing here imports more than the standard
library.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from typing import Any

# Ordinary tokens of SmolLM2: special ones stand at the beginning of its vocabulary.
_TOKEN_IDS = range(1000, 49000)


@dataclass(frozen=True)
class Arguments:
    """`depth` random tokens are cached, then `warmup + steps` are decoded one by one."""

    model: str
    depth: int
    steps: int
    warmup: int
    threads: int
    seed: int

    def token_ids(self) -> list[int]:
        """The prompt, then one token for each step where the engine lets us choose."""
        source = random.Random(self.seed)
        return [source.choice(_TOKEN_IDS) for _ in range(self.depth + self.warmup + self.steps)]


def parse() -> Arguments:
    """The arguments that `benchmarks/bench_peers.py` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("depth", "steps", "warmup", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Arguments(**vars(parser.parse_args()))


def report(
    arguments: Arguments,
    *,
    engine: str,
    version: str,
    variant: str,
    kv: str,
    prefill_seconds: float,
    step_seconds: list[float],
) -> None:
    """Prints one result. `step_seconds` holds the warm-up too, which is left out here."""
    result: dict[str, Any] = {"engine": engine, "engine_version": version, "variant": variant, "kv_dtype": kv}
    result |= {"prefill_seconds": prefill_seconds, "step_seconds": step_seconds[arguments.warmup :]}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
