"""Every preset on a tiny model, from samples to tables and plots. `make sweep` runs them on the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import NUM_LAYERS, SMALL, NumberTokenizer, ScoreTask, tiny_model

from tinyserve.errors import UsageError
from tinyserve.eval.evaluate import evaluate
from tinyserve.eval.maps import SelectionMaps
from tinyserve.eval.plots import plot_sweep
from tinyserve.eval.results import ResultFile
from tinyserve.eval.rows import Row, make_rows
from tinyserve.eval.runner import Runner
from tinyserve.eval.sweeps import ABLATION, PRESETS, Sweep, preset
from tinyserve_ops import SparseConfig

BASE = SparseConfig(page_size=16, token_budget=256, dense_layers=1)
NUM_TOKENS = 400
pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> ResultFile:
    return ResultFile(tmp_path_factory.mktemp("sweeps") / "results.jsonl")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(tiny_model(), NumberTokenizer(), measured_steps=4) as runner:
        yield runner


def run(runner: Runner, sweep: Sweep, results: ResultFile, folder: Path) -> list[Row]:
    task = ScoreTask()
    counts = evaluate(
        runner,
        [task],
        sweep.methods,
        results,
        model_name="tiny",
        num_samples=2,
        num_tokens=NUM_TOKENS,
        on_run=SelectionMaps(folder, "tiny", 3),
    )
    assert counts.failed == 0
    facts = [method.facts for method in sweep.methods]
    return make_rows([r for r in results.records if r["method"] in facts], {task.name: task})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_and_draws(name: str, runner: Runner, results: ResultFile, tmp_path: Path) -> None:
    sweep = preset(name, BASE)
    rows = run(runner, sweep, results, tmp_path)
    assert len(rows) == len(sweep.methods)
    dense = next(row for row in rows if row.policy == "full_cache")
    assert dense.value is not None
    for row in rows:
        assert row.num_samples == 2
        assert row.value is not None
        layers = row.method["dense_layers"]  # None where the policy reads everything
        assert (row.measures["recall"] is None) == (layers is None or layers >= NUM_LAYERS)
        assert row.measures["kv_bytes"] <= dense.measures["kv_bytes"]
    files = plot_sweep(sweep, rows, results.records, tmp_path)
    stems = {path.stem.removeprefix(f"{name}_score_{NUM_TOKENS}_") for path in files}
    assert stems == {"score", "recall", "bytes", "hit_rate_over_time", "kv_bytes_over_time"}
    assert {path.suffix for path in files} == {".png", ".svg"}
    for path in files:
        start = path.read_bytes()[:80]
        assert start.startswith(b"\x89PNG\r\n" if path.suffix == ".png" else b"<?xml")


def test_a_larger_budget_keeps_more_mass(runner: Runner, results: ResultFile, tmp_path: Path) -> None:
    rows = run(runner, preset("budget", BASE), results, tmp_path)
    of_bounds = [row for row in rows if row.method.get("scorer") == "bounds"]
    recalls = [
        row.measures["recall"] for row in sorted(of_bounds, key=lambda row: row.method["token_budget"])
    ]
    assert len(recalls) == 6
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.9 < recalls[-1]
    covering = [row.against_dense.value for row in of_bounds if row.method["token_budget"] >= 512]
    assert covering == pytest.approx([0.0] * 3, abs=1e-3)


def test_an_ablation_switches_off_one_part(runner: Runner, results: ResultFile, tmp_path: Path) -> None:
    sweep = preset(ABLATION, BASE)
    by_facts = {repr(row.method): row for row in run(runner, sweep, results, tmp_path)}
    rows = {point.x: by_facts[repr(point.method.facts)] for point in sweep.points if point.x is not None}
    on, off = rows["everything on"], rows["no query router"]
    assert on.measures["tokens_attended"] == pytest.approx(off.measures["tokens_attended"])
    assert off.measures["recall"] < on.measures["recall"]
    assert off.measures["reuse_rate"] > 0.9  # the same pages whatever the query
    assert rows["no page manager"].measures["recall"] > on.measures["recall"]
    assert rows["no page manager"].measures["summary_bytes"] > 4 * on.measures["summary_bytes"]
    staged = rows["no cache fusion"]
    assert staged.value.value == pytest.approx(on.value.value, rel=1e-5)
    assert staged.measures["kv_bytes"] == on.measures["kv_bytes"]


def test_points_of_presets_differ_only_in_what_varies() -> None:
    for name in ("budget", "keep-ratio", "dense-layers"):
        for point in preset(name, BASE).points:
            if point.x is not None:
                config = point.method.config
                assert (config.page_size, config.num_sink_pages, config.num_recent_pages) == (16, 1, 2)
    for point in preset("page-size", BASE).points:
        config = point.method.config
        if point.x is not None:
            assert (config.page_size, config.token_budget) == (point.x, 256)
            assert config.forced_pages * config.page_size <= max(48, 2 * config.page_size)


def test_an_unknown_preset_and_an_impossible_base_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"sweep: expected one of page-size, .*, got 'page'"):
        preset("page", BASE)
    with pytest.raises(UsageError, match="sweep page-size: token_budget: expected at least 128"):
        preset("page-size", BASE.replace(token_budget=64))
    with pytest.raises(UsageError, match="sweep ablation: token_budget: expected a number of tokens"):
        preset(ABLATION, BASE.replace(keep_ratio=0.5))


def test_a_selection_map_is_drawn_once_per_task_for_a_method_that_left_pages_out(
    runner: Runner, tmp_path: Path
) -> None:
    drawn = SelectionMaps(tmp_path, "tiny", 3)
    task = ScoreTask()
    methods = preset("scorer", SMALL).methods[:3]
    results = ResultFile(tmp_path / "results.jsonl")
    evaluate(
        runner,
        [task],
        methods,
        results,
        model_name="tiny",
        num_samples=2,
        num_tokens=90,
        on_run=drawn,
    )
    assert sorted(path.name for path in tmp_path.glob("selection_map*")) == [
        "selection_map_score.png",
        "selection_map_score.svg",
    ]
