"""Runs the op benchmarks: `python -m benchmarks.ops [NAME ...] [--device D] [--quick] [--output FOLDER]`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import goals
from benchmarks.common import WrongPath, append_records
from benchmarks.gpu import run as gpu_run
from benchmarks.ops.harness import records as records_of
from benchmarks.ops.harness.plots import plot_all
from benchmarks.ops.harness.points import Point
from benchmarks.ops.harness.settings import Settings

NAMES = (
    "attend_pages",
    "sparse_decode",
    "score_pages",
    "select_pages",
    "append_kv",
    "seal_pages",
    "prefill_attention",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="the few points that the main ratios need")
    parser.add_argument("--points", nargs="+", help="only points whose name begins so")
    parser.add_argument("--shapes", nargs="+", help="only these: query heads/kv heads/head_dim, as 32/8/128")
    parser.add_argument(
        "--lengths", nargs="+", type=int, help="only points all of whose lengths are among these"
    )
    parser.add_argument("--batch", nargs="+", type=int, help="only these batch sizes")
    parser.add_argument("--dtype", nargs="+", help="only these page dtypes")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: decoding on a GPU (benchmarks/gpu), with --quick, --repetitions and --output",
    )
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--repetitions", type=int, help="timed passes of each variant")
    parser.add_argument("--max-gb", type=float, help="memory for the pools of one setup")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench"), help="folder of the records and plots"
    )
    parser.add_argument("--list", action="store_true", help="print the points and stop")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}")
    return options


def chosen_points(options: argparse.Namespace) -> Iterator[tuple[str, Point]]:
    """(benchmark, point) for all points that the options leave; a point keeps the setups they allow."""
    for name in options.names or NAMES:
        for point in importlib.import_module(f"benchmarks.ops.bench_{name}").points():
            if options.quick and not point.in_quick and not options.points:
                continue
            if options.points and not any(point.name.startswith(begin) for begin in options.points):
                continue
            setups = tuple(setup for setup in point.setups if _is_allowed(setup, options))
            if setups:
                yield name, replace(point, setups=setups)


def _is_allowed(setup: Any, options: argparse.Namespace) -> bool:
    shape = f"{setup.num_heads}/{setup.num_kv_heads}/{setup.head_dim}"
    return all(
        wanted is None or value in wanted
        for wanted, value in (
            (options.shapes, shape),
            (options.lengths, setup.length),
            (options.batch, setup.batch),
            (options.dtype, setup.dtype),
        )
    )


def settings_of(options: argparse.Namespace) -> Settings:
    settings = Settings(seed=options.seed, quick=options.quick)
    if options.threads is not None:
        settings = replace(settings, threads=options.threads)
    if options.repetitions is not None:
        settings = replace(settings, repetitions=options.repetitions)
    if options.max_gb is not None:
        settings = replace(settings, max_bytes=int(options.max_gb * 1e9))
    return settings


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda":
        return gpu_run.run(options.output, quick=options.quick, repetitions=options.repetitions)
    settings = settings_of(options)
    torch.set_num_threads(settings.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    output = options.output / "ops.jsonl"
    output.unlink(missing_ok=True)
    found: list[dict[str, Any]] = []
    for name, point in chosen_points(options):
        title = f"{name}, {point.name}: {', '.join(setup.label for setup in point.setups)}"
        print(f"\n## {title}\n", flush=True)
        if options.list:
            continue
        try:
            with torch.inference_mode():
                records = records_of.measure(name, f"{name}, {point.name}", point.run(settings))
        except WrongPath as error:
            print(f"benchmarks.ops: wrong path measured: {error}", file=sys.stderr)
            return 1
        append_records(records, output)
        print(records_of.table(records), flush=True)
        found += records
    if not found:
        return 0 if options.list else _nothing_chosen()
    for path in plot_all(found, options.output):
        print(f"wrote {path}", file=sys.stderr)
    print(f"\n## Goals\n\n{goals.disturbance(found)}\n\n{goals.table(found)}", flush=True)
    return 0


def _nothing_chosen() -> int:
    print("benchmarks.ops: expected options that leave points, got none; --list prints them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
