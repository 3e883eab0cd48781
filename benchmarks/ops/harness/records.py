"""Timings of one run become records: one JSON object per variant, with all that a published number needs."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.common import environment, load_average
from benchmarks.ops.harness.run import Run
from benchmarks.ops.harness.timing import Timing, Variant, time_variants

# Fields of every record of an op benchmark.
FIELDS = (
    "benchmark", "point", "run", "op", "variant", "num_heads", "num_kv_heads", "head_dim", "page_size",
    "length", "batch", "dtype", "page_order", "cache", "threads", "median_us", "min_us", "repetitions",
    "preemptions", "layers", "bytes", "gbps", "probe_gbps", "fraction_of_probe", "fraction_of_probe_minima",
    "stream_gbps", "byte_ratio", "speed_up", "speed_up_minima", "efficiency", "cycled_bytes", "llc_bytes",
    "seed", "load_average", "machine", "commit", "torch", "tinyserve_ops", "cpu_target",
)  # fmt: skip


def measure(benchmark: str, point: str, run: Run) -> list[dict[str, Any]]:
    """Times all variants of a run against each other; one record each, in the order they were added."""
    timings = time_variants(run.variants, run.settings, hot=run.hot)
    by_name = {variant.name: variant for variant in run.variants}
    shared = environment() | {
        "run": f"{point} @ {time.time():.3f}",
        "cache": "hot" if run.hot else "cold",
        "llc_bytes": run.settings.llc_bytes,
        "seed": run.settings.seed,
        "load_average": load_average(),
    }
    streams = _fastest_streams(run.variants, timings)
    records = []
    for variant in run.variants:
        timing = timings[variant.name]
        record = {
            "benchmark": benchmark,
            "point": point,
            **shared,
            **variant.facts,
            "threads": variant.threads,
            "median_us": round(1e6 * timing.median, 3),
            "min_us": round(1e6 * timing.minimum, 3),
            "repetitions": timing.seconds.shape[0],
            "preemptions": timing.preemptions,
            "layers": len(set(variant.layers)),
            "bytes": variant.num_bytes,
            "gbps": _gbps(variant.num_bytes, timing.median),
            "cycled_bytes": variant.num_bytes * len(set(variant.layers)),
            "stream_gbps": streams.get(_pool_of(variant)),
            **_against_probe(variant, timings, by_name),
            **_against_reference(variant, timings, by_name),
        }
        records.append(record)
    return records


def _gbps(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3)


def _against_probe(
    variant: Variant, timings: dict[str, Timing], by_name: dict[str, Variant]
) -> dict[str, float | None]:
    if variant.probe is None:
        return dict.fromkeys(("probe_gbps", "fraction_of_probe", "fraction_of_probe_minima"))
    probe, timing = timings[variant.probe], timings[variant.name]
    # The probe reads whole pages; the last one of a sequence may hold fewer tokens, which only the kernel
    # skips.
    share = variant.num_bytes / by_name[variant.probe].num_bytes
    return {
        "probe_gbps": _gbps(by_name[variant.probe].num_bytes, probe.median),
        "fraction_of_probe": round(share * probe.median / timing.median, 4),
        "fraction_of_probe_minima": round(share * probe.minimum / timing.minimum, 4),
    }


def _against_reference(
    variant: Variant, timings: dict[str, Timing], by_name: dict[str, Variant]
) -> dict[str, float | None]:
    if variant.compared_with is None:
        return dict.fromkeys(("byte_ratio", "speed_up", "speed_up_minima", "efficiency"))
    reference, timing = timings[variant.compared_with], timings[variant.name]
    byte_ratio = by_name[variant.compared_with].num_bytes / variant.num_bytes
    speed_up = reference.median / timing.median
    return {
        "byte_ratio": round(byte_ratio, 4),
        "speed_up": round(speed_up, 4),
        "speed_up_minima": round(reference.minimum / timing.minimum, 4),
        "efficiency": round(speed_up / byte_ratio, 4),
    }


def _pool_of(variant: Variant) -> tuple[Any, ...]:
    facts = variant.facts
    names = ("num_heads", "num_kv_heads", "head_dim", "length", "batch", "dtype", "page_order")
    return (variant.threads, *(facts.get(name) for name in names))


def _fastest_streams(variants: list[Variant], timings: dict[str, Timing]) -> dict[tuple[Any, ...], float]:
    fastest: dict[tuple[Any, ...], float] = {}
    for variant in variants:
        if variant.facts["op"] == "read_stream":
            gbps = _gbps(variant.num_bytes, timings[variant.name].median)
            fastest[_pool_of(variant)] = max(gbps, fastest.get(_pool_of(variant), 0.0))
    return fastest


def table(records: list[dict[str, Any]]) -> str:
    """The records of one run as a Markdown table."""
    titles = ("variant", "dtype", "length", "threads", "median us", "min us", "GB/s", "of probe", "speed-up")
    lines = [f"| {' | '.join(titles)} | byte ratio |", "|---|---|" + "--:|" * 8]
    for record in records:
        name = " ".join(
            str(record[key])
            for key in ("variant", "budget", "scorer", "group_reduction")
            if record.get(key) is not None
        )
        cells = [name, record["dtype"], record["length"], record["threads"], f"{record['median_us']:.1f}"]
        cells += [f"{record['min_us']:.1f}", f"{record['gbps']:.1f}", _percent(record["fraction_of_probe"])]
        cells += [_times(record["speed_up"]), _times(record["byte_ratio"])]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
