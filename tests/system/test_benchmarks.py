"""The benchmarks themselves: they count what is read, stop on a wrong path, and write what they promise."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are not installed

from benchmarks import bench_peers, goals  # noqa: E402
from benchmarks.common import WrongPath, read_records  # noqa: E402
from benchmarks.gpu import run as gpu_run  # noqa: E402
from benchmarks.gpu.layers import Setup as GpuSetup  # noqa: E402
from benchmarks.ops import __main__ as runner  # noqa: E402
from benchmarks.ops import bench_sparse_decode  # noqa: E402
from benchmarks.ops.harness import checks, plots, probe  # noqa: E402
from benchmarks.ops.harness.layers import Layers, Setup, supported_dtypes  # noqa: E402
from benchmarks.ops.harness.ours import add_dense, add_sparse  # noqa: E402
from benchmarks.ops.harness.points import Point  # noqa: E402
from benchmarks.ops.harness.records import FIELDS, measure  # noqa: E402
from benchmarks.ops.harness.run import Run  # noqa: E402
from benchmarks.ops.harness.scoring import SCORINGS  # noqa: E402
from benchmarks.ops.harness.settings import Settings  # noqa: E402
from benchmarks.ops.harness.timing import Timing, Variant, time_variants  # noqa: E402

SETTINGS = Settings(threads=1, repetitions=2, warmup=1, llc_bytes=1 << 15, llc_factor=2.0, max_bytes=1 << 24)
TINY = Setup(4, 2, 16, 256)


def new_run() -> Run:
    return Run(SETTINGS, [])


def new_layers(setup: Setup = TINY, num_layers: int = 2) -> Layers:
    return Layers(setup, num_layers, ("bounds",), seed=0)


@pytest.mark.parametrize("name", runner.NAMES)
def test_a_tiny_point_of_every_op_gives_complete_records(name: str) -> None:
    module = importlib.import_module(f"benchmarks.ops.bench_{name}")
    length = 1024  # the benchmarks' own budgets and chunks must leave something out
    builds = {point.build: point for point in module.points()}
    for point in builds.values():
        setups = tuple(replace(setup, num_heads=4, num_kv_heads=2, head_dim=16) for setup in point.setups)
        short = tuple(replace(setup, length=length << min(i, 1), batch=1) for i, setup in enumerate(setups))
        if name == "select_pages" or point.name == "growth":
            short = tuple(replace(setup, length=4 * setup.length) for setup in short)
        run = Point(point.name, short, point.build, hot=point.hot).run(SETTINGS)
        records = measure(name, f"{name}, {point.name}", run)
        assert len(records) == len(run.variants) > 0
        for record in records:
            assert set(FIELDS) <= set(record), set(FIELDS) - set(record)
            assert record["bytes"] > 0
            assert record["median_us"] >= record["min_us"] > 0
        json.dumps(records)
        goals.table(records)


@pytest.mark.parametrize("dtype", supported_dtypes(("float32", "float16", "bfloat16", "int8")))
@pytest.mark.parametrize("page_order", ["ascending", "random"])
def test_bytes_equal_a_count_by_hand(dtype: str, page_order: str) -> None:
    setup = replace(TINY, dtype=dtype, batch=3, length=256 + 5, page_order=page_order)
    run, layers = new_run(), new_layers(setup)
    dense = add_dense(run, layers)
    sparse = add_sparse(run, layers, 64, SCORINGS[0], compared_with=dense)
    per_token = 2 * (16 * setup.kv_dtype.itemsize + (4 if dtype == "int8" else 0))
    assert dense.num_bytes == 3 * 2 * (256 + 5) * per_token
    # Four pages of each sequence and head, of which the last holds 5 tokens; 16 sealed pages are scanned.
    assert sparse.num_bytes == 3 * 2 * ((3 * 16 + 5) * per_token + 16 * layers.pools[0].summary_bytes)


@pytest.mark.parametrize("order", probe.ORDERS)
def test_the_probe_reads_the_pages_and_summaries_that_the_kernel_reads(order: str) -> None:
    setup = replace(TINY, batch=2, page_order="random")
    layers = new_layers(setup)
    every_page = torch.arange(setup.num_pages).expand(2, 2, -1)
    segments = probe.page_segments(layers, layers.pools[1], every_page, order)
    pool = layers.pools[1]
    assert segments.num_bytes == pool.k_pages.numel() * 2 * pool.k_pages.element_size()
    assert len(np.unique(segments.addresses)) == len(segments.addresses)
    page_id = int(layers.page_table[1, 3])
    wanted = pool.v_pages[page_id, 1].data_ptr()
    assert np.count_nonzero(segments.addresses == wanted) == 1
    # Sequence 1, head 1, page 3, V.
    expected = {
        "by chunk": 2 * (1 * 2 * 16) + 2 * 16 + 16 + 3,
        "by page": 2 * (1 * 2 * 16 + 3 * 2 + 1) + 1,
        "by head": 2 * (1 * 2 * 16 + 1 * 16 + 3) + 1,
    }
    assert int(np.flatnonzero(segments.addresses == wanted)[0]) == expected[order]
    assert probe.summary_segments(pool).num_bytes == pool.page_summary.numel()


@pytest.mark.skipif(not probe.has_reader(), reason="needs a C compiler")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("ahead", [0, 2])
def test_the_reader_reads_every_byte(num_threads: int, ahead: int) -> None:
    data = torch.zeros(5, 1000, dtype=torch.uint8)
    segments = probe.Segments(
        np.array([data[row].data_ptr() for row in range(5)]), np.array([1000, 256, 8, 3, 700], dtype=np.int64)
    )
    data[0, 999] = 1
    data[4, 650] = 3  # bytes behind the last whole block are added one by one,
    data[4, 11] = 4  # the others as words of eight
    data[3, 2] = 2
    data[1, 300] = 50  # beyond its segment
    reader = probe.Reader(num_threads, ahead)
    assert reader(reader.split(segments)) > 0
    assert sum(reader.sums) == 1 + 2 + 3 + (4 << 8 * (11 % 8))


def test_a_budget_that_covers_everything_is_no_sparse_measurement() -> None:
    run, layers = new_run(), new_layers()
    dense = add_dense(run, layers)
    with pytest.raises(WrongPath, match="covers all 16"):
        add_sparse(run, layers, TINY.length, SCORINGS[0], compared_with=dense)


def test_a_wrong_number_of_pages_stops_the_run() -> None:
    layers = new_layers()
    selected = torch.arange(12, 16).expand(1, 2, -1)
    with pytest.raises(WrongPath, match="pages selected per head"):
        checks.check_selection("sparse", layers, 4, selected, torch.tensor([[4, 3]]))


def test_a_wrong_output_stops_the_run() -> None:
    layers = new_layers()
    out = torch.zeros(1, TINY.num_heads, TINY.head_dim, dtype=torch.bfloat16)
    with pytest.raises(WrongPath, match="relative error"):
        checks.check_output("dense", layers, 0, out)


def test_another_number_of_threads_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant("work", lambda layer: None, [0], 1, threads=2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(WrongPath, match="threads: expected 2, got 1"):
        time_variants([variant], SETTINGS)


def test_a_wrong_path_ends_the_command_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_sparse_decode, "_KEEP_RATIO", 1.0)  # sparse is asked for, everything is kept
    setup = replace(TINY, length=4096)
    monkeypatch.setattr(
        bench_sparse_decode, "points", lambda: [Point("decode", (setup,), bench_sparse_decode.compare)]
    )
    assert runner.main(["sparse_decode", "--threads", "1", "--output", str(tmp_path)]) == 1
    assert "wrong path measured" in capsys.readouterr().err


def test_variants_take_turns_and_every_layer_is_called_once_a_pass() -> None:
    calls: list[tuple[str, int]] = []
    variants = [
        Variant(name, lambda layer, name=name: calls.append((name, layer)), range(3), 1, threads=1)
        for name in "ab"
    ]
    timings = time_variants(variants, SETTINGS)
    passes = ["a", "b", "b", "a", "a", "b"]  # three rounds, the first one a warm-up
    assert calls == [(name, layer) for name in passes for layer in range(3)]
    assert timings["a"].seconds.shape == (2, 3)


def test_the_minimum_is_no_single_lucky_layer() -> None:
    timing = Timing(np.array([[1.0, 4.0], [3.0, 2.0]]), preemptions=0)
    assert timing.minimum == 1.5
    assert timing.median == 2.5


def test_layers_exceed_the_cache_where_memory_allows() -> None:
    settings = replace(SETTINGS, llc_bytes=1000, llc_factor=4.0, max_bytes=10_000)
    assert settings.layers_for(300, 500) == 14
    assert settings.layers_for(300, 2000) == 5
    assert settings.layers_for(300, 20_000) == 1


def test_goals_are_computed_from_records_only() -> None:
    empty = goals.table([])
    assert empty.count("not measured") == len(goals.GOALS)
    fields = {
        "run": "r",
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "batch": 1,
        "dtype": "bfloat16",
    }
    fields |= {"cache": "cold", "page_order": "ascending", "length": 32768, "point": "sparse_decode, decode"}
    dense = fields | {"op": "attend_pages", "variant": "dense", "median_us": 10.0, "min_us": 8.0}
    dense |= {"fraction_of_probe": None}
    bmm = fields | {"op": "torch_bmm", "variant": "bmm", "median_us": 30.0, "min_us": 16.0}
    [row] = [line for line in goals.table([dense, bmm]).splitlines() if "grouped bmm" in line]
    assert re.search(r"3\.00 \(2\.00\)x \| met \|$", row)
    slower = bmm | {"median_us": 20.0}
    [row] = [line for line in goals.table([dense, slower]).splitlines() if "grouped bmm" in line]
    assert row.endswith("| not met |")


def test_the_command_writes_records_plots_and_goals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setups = [replace(TINY, length=length) for length in (4096, 8192)]
    points = [Point("decode", (setup,), bench_sparse_decode.compare) for setup in setups]
    points += [Point("budgets", (setups[0],), bench_sparse_decode.budgets)]
    monkeypatch.setattr(bench_sparse_decode, "points", lambda: points)
    arguments = ["sparse_decode", "--threads", "1", "--repetitions", "2", "--output", str(tmp_path)]
    monkeypatch.setattr(runner, "settings_of", lambda options: SETTINGS)
    assert runner.main(arguments) == 0
    output = capsys.readouterr().out
    assert "| goal | asked |" in output
    records = read_records(tmp_path / "ops.jsonl")
    assert {record["op"] for record in records} >= {
        "attend_pages",
        "sparse_decode",
        "torch_sdpa",
        "torch_bmm",
    }
    for stem in ("time_against_length_4-2-16", "speed_up_against_budget_4-2-16", "roofline"):
        for suffix in (".png", ".svg"):
            assert (tmp_path / f"{stem}{suffix}").stat().st_size > 1000
    assert plots.plot_all([], tmp_path) == []


def test_an_engine_that_is_not_installed_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_peers, "ENGINES", {"no_such_engine": "no-such-engine"})
    monkeypatch.setattr(bench_peers, "smollm2_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--python", sys.executable])
    assert bench_peers.main() == 0
    assert "no-such-engine skipped, not installed" in capsys.readouterr().err


def test_the_goals_compare_with_the_fastest_engine_measured_here() -> None:
    options = argparse.Namespace(steps=3, depth=8000, seed=0, threads=2)
    result = {"engine": "e", "engine_version": "1", "kv_dtype": "u8", "prefill_seconds": 1.0}
    slow = bench_peers.record_of(result | {"variant": "v", "step_seconds": [0.02, 0.03, 0.01]}, options)
    fast = bench_peers.record_of(result | {"variant": "v", "step_seconds": [0.01, 0.01, 0.01]}, options)
    assert (slow["median_ms"], slow["minimum_ms"], slow["tokens_per_second"]) == (20.0, 10.0, 50.0)
    ours = {"benchmark": "generate", "variant": "ours, budget 1024 tokens", "dtype": "float32"}
    ours |= {"context": 8128, "median_ms": 5.0, "minimum_ms": 5.0}
    rows = goals.table([slow, fast, ours]).splitlines()
    [row] = [line for line in rows if "fastest other engine" in line]
    assert "2.00 (2.00)x | met |" in row
    with pytest.raises(RuntimeError, match="expected 3 decoded tokens, got 1"):
        bench_peers.record_of(result | {"variant": "v", "step_seconds": [0.02]}, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_benchmark_for_gpus_checks_and_counts_its_variants(dtype: str) -> None:
    setup = GpuSetup(4, 2, 16, 250, batch=2, dtype=dtype)
    records = gpu_run.measure_setup(
        setup, "cpu", 1.0, l2_bytes=1 << 13, memory_bytes=1 << 28, repetitions=2, peers=("sdpa", "flashinfer")
    )
    by_name = {record["variant"]: record for record in records}
    dense = by_name["dense"]
    assert dense["phi"] == dense["speed_up"] == dense["byte_ratio"] == 1.0
    assert dense["cold"]
    assert {f"sparse 62 {scorer}" for scorer in gpu_run.SCORERS} < set(by_name)
    assert ("torch sdpa" in by_name) == (dtype != "int8")
    row = 16 * setup.kv_dtype.itemsize + (4 if dtype == "int8" else 0)
    assert dense["bytes"] == 2 * 2 * 2 * 256 * row
    sparse = by_name["sparse 62 bounds"]
    assert sparse["bytes"] == 2 * 2 * 2 * 3 * 16 * row + 2 * 2 * 16 * 48
    assert sparse["byte_ratio"] == pytest.approx(dense["bytes"] / sparse["bytes"], rel=1e-3)
    assert gpu_run.table(records).count("\n") == len(records) + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_the_benchmark_for_gpus_says_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["--device", "cuda", "--output", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().out
