"""The goals table: what a run's records say about each goal; no value stands here, all are computed.

python -m benchmarks.goals FOLDER    reads every *.jsonl in it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import read_records

Record = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One value of a goal: where it was measured, from medians and from minima (None: has none)."""

    where: str
    value: float
    from_minima: float | None = None


@dataclass(frozen=True)
class Goal:
    """`values` must all be at least `bound` (`at_most`: not above it)."""

    what: str
    goal: str
    bound: float
    values: Callable[[list[Record]], list[Measured]]
    unit: str = "x"
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Whether one value reaches the goal."""
        return value <= self.bound if self.at_most else value >= self.bound


def _shape(record: Record) -> str:
    shape = f"{record['num_heads']}/{record['num_kv_heads']}/{record['head_dim']}"
    batch = f" x{record['batch']}" if record["batch"] > 1 else ""
    return f"{shape} {record['length'] // 1024}K{batch}"


def _where(record: Record) -> str:
    names = (record.get("scorer"), record.get("group_reduction"))
    return " ".join([_shape(record), *(name for name in names if name)])


def _select(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records whose fields have these values, or one of these where a tuple is given."""
    return [
        record
        for record in records
        if all(record.get(k) in (v if isinstance(v, tuple) else (v,)) for k, v in wanted.items())
    ]


def _cold(records: Iterable[Record], **wanted: Any) -> list[Record]:
    return _select(records, cache="cold", page_order="ascending", **wanted)


def _ratio(slow: list[Record], fast: Record) -> Measured | None:
    """How much faster `fast` is than the fastest of `slow` in the same run and setup."""
    keys = ("run", "num_heads", "num_kv_heads", "head_dim", "length", "batch", "dtype")
    same = [record for record in slow if all(record[key] == fast[key] for key in keys)]
    if not same:
        return None
    median, minimum = (min(record[key] for record in same) for key in ("median_us", "min_us"))
    return Measured(_where(fast), median / fast["median_us"], minimum / fast["min_us"])


def _ratios(slow: list[Record], fast: list[Record]) -> list[Measured]:
    return [ratio for record in fast if (ratio := _ratio(slow, record)) is not None]


def of_probe(records: list[Record]) -> list[Measured]:
    dense = _cold(records, op="attend_pages", variant="dense", dtype="bfloat16", point=_DENSE_POINTS)
    return [
        Measured(
            f"{_where(record)} ({100 * record['gbps'] / record['stream_gbps']:.0f} % of the stream)",
            100 * record["fraction_of_probe"],
            100 * record["fraction_of_probe_minima"],
        )
        for record in dense
        if record["fraction_of_probe"] is not None and record["length"] >= 4096 and record["stream_gbps"]
    ]


def over_bmm(records: list[Record]) -> list[Measured]:
    dense = _cold(records, op="attend_pages", variant="dense", dtype="bfloat16", num_heads=32)
    return _ratios(_select(records, op="torch_bmm"), dense)


def over_dense(records: list[Record]) -> list[Measured]:
    sparse = _cold(records, benchmark="sparse_decode", variant="sparse", dtype="bfloat16", budget=0.3)
    sparse = [record for record in sparse if record["length"] >= 8192]
    return _ratios(_select(records, op="attend_pages", variant="dense"), sparse)


def efficiency(records: list[Record]) -> list[Measured]:
    sparse = _cold(records, op="sparse_decode", point="sparse_decode, decode", dtype="bfloat16", budget=2048)
    return [_of_byte_ratio(_where(record), record) for record in sparse if record["length"] == 32768]


def _of_byte_ratio(where: str, record: Record) -> Measured:
    minima = record["speed_up_minima"] / record["byte_ratio"]
    return Measured(f"{where} (byte ratio {record['byte_ratio']:.2f})", record["efficiency"], minima)


def over_torch_selection(records: list[Record]) -> list[Measured]:
    sparse = _cold(records, op="sparse_decode", dtype="bfloat16", budget=0.3, length=32768)
    return _ratios(_select(records, op="torch_selection"), sparse)


def int8(records: list[Record]) -> list[Measured]:
    found = []
    for record in _cold(records, dtype="int8", op=("attend_pages", "sparse_decode")):
        if record["efficiency"] is not None and record["point"].endswith("dtypes"):
            what = f"sparse {record['budget']}" if record["op"] == "sparse_decode" else "dense"
            found.append(_of_byte_ratio(f"{what} {_shape(record)}", record))
    return found


def selection_share(records: list[Record]) -> list[Measured]:
    # A selection's record is compared with the whole step of its run.
    return [
        _inverse(f"{record['budget_pages']} of {record['num_pages']} pages, {_shape(record)}", record, 100)
        for record in _select(records, op="select_pages")
    ]


def low_rank_scan(records: list[Record]) -> list[Measured]:
    # A scan's record is compared with that of the full-precision box and group maximum.
    scans = _select(records, op="score_pages", scorer="low_rank", num_heads=32)
    return [_inverse(_where(record), record) for record in scans if record["speed_up"] is not None]


def low_rank_step(records: list[Record]) -> list[Measured]:
    found = []
    sparse = _cold(records, point="sparse_decode, decode", op="sparse_decode", budget=0.3, dtype="bfloat16")
    for record in _select(sparse, scorer="low_rank", num_heads=32):
        for box in _select(sparse, run=record["run"], scorer="bounds_full", group_reduction="max"):
            median, minimum = record["median_us"] / box["median_us"], record["min_us"] / box["min_us"]
            found.append(Measured(_where(record), median, minimum))
    return found


def sealing_share(records: list[Record]) -> list[Measured]:
    # A sealing's record is compared with the attention of the same chunk.
    sealed = _select(records, op="seal_pages", scorer="low_rank")
    return [_inverse(f"{_where(record)}, {record['new_tokens']} new", record, 100) for record in sealed]


def _inverse(where: str, record: Record, unit: float = 1) -> Measured:
    return Measured(where, unit / record["speed_up"], unit / record["speed_up_minima"])


def threads(records: list[Record]) -> list[Measured]:
    found = []
    for record in _cold(records, point="attend_pages, threads", variant="dense", threads=2):
        one = _select(records, run=record["run"], variant="dense", op="attend_pages", threads=1)
        found += [
            Measured(_shape(record), o["median_us"] / record["median_us"], o["min_us"] / record["min_us"])
            for o in one
        ]
    return found


def _growth(int8_summaries: bool) -> Callable[[list[Record]], list[Measured]]:
    def values(records: list[Record]) -> list[Measured]:
        found = []
        sparse = _select(records, point="sparse_decode, growth", op="sparse_decode")
        for short in sparse:
            is_int8 = short["scorer"] not in ("bounds_full",)
            same = {key: short[key] for key in ("run", "scorer", "group_reduction")}
            long = [record for record in _select(sparse, **same) if record["length"] > short["length"]]
            if is_int8 != int8_summaries or not long:
                continue
            dense = {
                record["length"]: record
                for record in _select(records, run=short["run"], op="attend_pages", variant="dense")
            }
            slopes = []
            for key in ("median_us", "min_us"):
                sparse_slope = long[0][key] - short[key]
                dense_slope = dense[long[0]["length"]][key] - dense[short["length"]][key]
                slopes.append(dense_slope / sparse_slope if sparse_slope > 0 else float("inf"))
            name = f"{_where(short)} to {long[0]['length'] // 1024}K"
            found.append(Measured(name, slopes[0], slopes[1]))
        return found

    return values


def _generate(ours: str, theirs: str, dtype: str) -> Callable[[list[Record]], list[Measured]]:
    def values(records: list[Record]) -> list[Measured]:
        rows = [
            record
            for record in _select(records, benchmark="generate", dtype=dtype)
            if record["context"] >= 8000
        ]
        found = []
        for record in rows:
            if record["variant"] == ours:
                other = [r for r in rows if r["context"] == record["context"] and theirs in r["variant"]][-1:]
                found += [
                    Measured(
                        f"{record['context']} tokens",
                        row["median_ms"] / record["median_ms"],
                        row["minimum_ms"] / record["minimum_ms"],
                    )
                    for row in other
                ]
        return found

    return values


def _over_peer(evicts: bool) -> Callable[[list[Record]], list[Measured]]:
    def values(records: list[Record]) -> list[Measured]:
        rows = [record for record in _select(records, benchmark="generate") if record["context"] >= 8000]
        peers = [r for r in _select(records, benchmark="peers") if r["context"] >= 8000]
        peers = [r for r in peers if ("eviction" in r["variant"]) == evicts]
        if not peers:
            return []
        best = min(peers, key=lambda record: record["median_ms"])
        theirs = f"{best['engine']} {best['kv_dtype']} {best['tokens_per_second']:.1f} tok/s"
        return [
            Measured(
                f"{row['dtype']}, {1e3 / row['median_ms']:.1f} tok/s over {theirs}",
                best["median_ms"] / row["median_ms"],
                best["minimum_ms"] / row["minimum_ms"],
            )
            for row in _select(rows, variant=_OURS)
        ]

    return values


def overhead(records: list[Record]) -> list[Measured]:
    rows = [record for record in _select(records, benchmark="generate") if "overhead_us_per_layer" in record]
    return [
        Measured(f"{r['variant']}, {r['context']} tokens, {r['dtype']}", r["overhead_us_per_layer"])
        for r in rows
    ]


_DENSE_POINTS = (
    "sparse_decode, decode",
    "sparse_decode, batch 16",
    "attend_pages, batch 16",
    "attend_pages, dtypes",
)
_DEFAULT = "DynamicCache"
_OURS = "ours, budget 1024 tokens"

GOALS = (
    Goal("dense paged decode, bf16, of the read probe", ">= 80 %", 80, of_probe, unit=" %"),
    Goal("dense over torch's grouped bmm in its best dtype, 32/8/128 bf16", ">= 2.5x", 2.5, over_bmm),
    Goal("sparse at ratio 0.3, scoring and selection included, over our dense", ">= 2.6x", 2.6, over_dense),
    Goal("sparse 2048 of 32K over our dense, share of the byte ratio", ">= 0.85", 0.85, efficiency, unit=""),
    Goal("sparse at ratio 0.3 over torch's page selection, 32K bf16", ">= 4x", 4.0, over_torch_selection),
    Goal("int8 KV over bf16 KV, share of the byte ratio", ">= 0.85", 0.85, int8, unit=""),
    Goal("selection, share of the sparse step", "<= 10 %", 10, selection_share, unit=" %", at_most=True),
    Goal("low_rank scan over the bf16 box's with group max, time", "<= 2x", 2.0, low_rank_scan, at_most=True),
    Goal("the whole sparse step at ratio 0.3, the same", "<= 1.2x", 1.2, low_rank_step, at_most=True),
    Goal(
        "low_rank sealing, share of the chunk's attention",
        "<= 5 %",
        5,
        sealing_share,
        unit=" %",
        at_most=True,
    ),
    Goal("3 kv heads: 2 threads over 1", ">= 1.8x", 1.8, threads),
    Goal("growth 8K to 128K at 2048 tokens, dense slope over sparse slope", ">= 14x", 14, _growth(False)),
    Goal("the same with int8 summaries", ">= 28x", 28, _growth(True)),
    Goal(
        "SmolLM2 at 8K, fp32, budget 1024, over sdpa's default cache",
        ">= 2.8x",
        2.8,
        _generate(_OURS, _DEFAULT, "float32"),
    ),
    Goal("the same over its static cache", ">= 1.7x", 1.7, _generate(_OURS, "StaticCache", "float32")),
    Goal(
        "SmolLM2 at 8K, bf16, budget 1024, over the default cache",
        ">= 4x",
        4.0,
        _generate(_OURS, _DEFAULT, "bfloat16"),
    ),
    Goal(
        "SmolLM2 at 8K, budget 1024, over the fastest other engine (stretch)", "> 1x", 1.0, _over_peer(False)
    ),
    Goal("the same over the fastest with eviction (stretch)", "> 1x", 1.0, _over_peer(True)),
    Goal("drop-in overhead per layer and token, batch 1", "<= 40 us", 40, overhead, unit=" us", at_most=True),
)


def table(records: list[Record], goals: tuple[Goal, ...] = GOALS) -> str:
    """Markdown: each goal, the least favourable and all values of these records, and whether it is met."""
    lines = ["| goal | asked | measured, medians (minima) | |", "|---|---|---|---|"]
    for goal in goals:
        values = goal.values(records)
        lines.append(f"| {goal.what} | {goal.goal} | {_cell(goal, values)} | {_verdict(goal, values)} |")
    return "\n".join(lines)


def _cell(goal: Goal, values: list[Measured]) -> str:
    return "<br>".join(
        f"{value.where}: {value.value:.2f}"
        + (f" ({value.from_minima:.2f})" if value.from_minima is not None else "")
        + goal.unit
        for value in values
    )


def _verdict(goal: Goal, values: list[Measured]) -> str:
    if not values:
        return "not measured"
    met = sum(goal.is_met(value.value) for value in values)
    if met == len(values):
        return "met"
    return f"not met ({met} of {len(values)} values)" if met else "not met"


def disturbance(records: list[Record]) -> str:
    """One line on how quiet the machine was."""
    loads = [record["load_average"] for record in records if record.get("load_average") is not None]
    if not loads:
        return ""
    threads_used = max(record["threads"] for record in records)
    state = "loaded: medians are not quotable" if max(loads) > threads_used + 1 else "quiet enough"
    return f"Load average {min(loads):.1f} to {max(loads):.1f} on {records[0]['machine']}: {state}."


def main(arguments: list[str] | None = None) -> int:
    folder = Path((arguments or sys.argv[1:] or ["build/bench"])[0])
    records = [record for path in sorted(folder.glob("*.jsonl")) for record in read_records(path)]
    if not records:
        print(f"benchmarks.goals: expected *.jsonl with records in {folder}, found none", file=sys.stderr)
        return 1
    print(f"\n{disturbance(records)}\n\n{table(records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
