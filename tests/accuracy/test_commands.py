"""`tinyserve eval` and `tinyserve sweep` from options to files, on a tiny model folder and two tiny tasks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from lab import GenerateTask, NumberTokenizer, ScoreTask, tiny_model

from tinyserve.cli import main
from tinyserve.errors import UsageError
from tinyserve.eval import tasks
from tinyserve.eval.results import read_records

TASKS = {"generate": GenerateTask, "score": ScoreTask}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks and model of `lab` in place of the real ones."""

    def get(name: str, **options: Any) -> Any:
        if name not in TASKS:
            raise UsageError(f"expected a task among {', '.join(TASKS)}, got {name!r}")
        task: Any = TASKS[name]()
        vars(task).update(options)
        return task

    monkeypatch.setattr(tasks, "get", get)
    monkeypatch.setattr(tasks, "names", lambda: list(TASKS))
    monkeypatch.setattr(tasks, "about", lambda name: f"about {name}")
    monkeypatch.setattr(
        "tinyserve.eval.application.load_model",
        lambda folder, dtype: (tiny_model(dtype=dtype), NumberTokenizer()),
    )


def arguments(tmp_path: Path, *more: str) -> list[str]:
    sizes = ["--samples", "2", "--tokens", "120", "--dense-layers", "1", "--model", str(tmp_path)]
    return [*sizes, "--threads", "1", *more]


def test_eval_writes_results_and_tables_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "results.jsonl"
    command = ["eval", "score", "generate", *arguments(tmp_path, "--output", str(output))]
    command += ["--policy", "full_cache", "query_aware", "snapkv:window=16", "oracle"]
    command += ["--budget", "64", "96", "--scorer", "bounds", "low_rank"]
    assert main(command) == 0
    first = capsys.readouterr()
    # The full cache once, four query-aware, two of each that has no scorer.
    assert len(read_records(output)) == 2 * 2 * (1 + 4 + 2 + 2)
    assert "36 results, 0 from before" in first.err
    assert "## score, 120 tokens" in first.out
    assert "| snapkv 64, page 16, window 16, dense_layers 1 | 2 |" in first.out
    given = shlex.join(["python", "-m", "tinyserve", *command])
    assert output.with_suffix(".md").read_text().startswith(f"# Evaluation\n\n```\n{given}\n```\n")
    assert output.with_suffix(".csv").read_text().count("\n") == 1 + 2 * 9
    assert main([*command, "--samples", "3"]) == 0
    again = capsys.readouterr()
    assert "18 results, 36 from before" in again.err
    assert "| 3 |" in again.out


def test_tables_show_only_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "results.jsonl")
    assert main(["eval", "score", *arguments(tmp_path, "--output", output, "--budget", "64")]) == 0
    assert main(["eval", "score", *arguments(tmp_path, "--output", output, "--budget", "80")]) == 0
    capsys.readouterr()
    assert main(["eval", "score", *arguments(tmp_path, "--output", output, "--keep-ratio", "0.5")]) == 0
    table = capsys.readouterr().out
    assert "query_aware low_rank 50%" in table
    assert "low_rank 64" not in table
    assert main(["eval", "score:shift=1", *arguments(tmp_path, "--output", output, "--budget", "64")]) == 0
    assert read_records(Path(output))[-1]["task_options"] == {"shift": 1}
    assert "| full_cache, page 16 | 2 |" in capsys.readouterr().out


def test_plugins_stack_on_the_policies_and_files_add_pipelines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text("policy: {name: snapkv, window: 16}\nplugins: [early_exit]\n")
    output = tmp_path / "results.jsonl"
    command = ["eval", "score", *arguments(tmp_path, "--output", str(output), "--budget", "64")]
    command += ["--plugin", "approximate_attention:estimate=false", "--pipeline", str(pipeline)]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "| full_cache, page 16 | 2 |" in table
    assert (
        "| query_aware low_rank 64, page 16, dense_layers 1, +approximate_attention estimate False |" in table
    )
    assert "| snapkv 64, page 16, window 16, dense_layers 1, +early_exit |" in table
    by_policy = {record["policy"]: record for record in read_records(output)}
    assert by_policy["query_aware"]["method"]["plugins"][0]["name"] == "approximate_attention"
    assert set(by_policy["snapkv"]["plugin_reports"]) == {"early_exit"}
    assert by_policy["full_cache"]["plugin_reports"] == {}


def test_a_sweep_fills_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    command = ["sweep", "group-reduction", "ablation", "--task", "score", "--output", str(folder)]
    assert main([*command, *arguments(tmp_path, "--budget", "64")]) == 0
    names = {path.name for path in folder.iterdir()}
    assert {"results.jsonl", "ablation.md", "ablation.csv", "group-reduction.md"} <= names
    assert {"ablation_score_120_score.png", "selection_map_score.svg"} <= names
    assert "| query_aware low_rank 64" in (folder / "ablation.md").read_text()
    assert str(folder / "ablation_score_120_recall.svg") in capsys.readouterr().out


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "list"]) == 0
    assert capsys.readouterr().out == "generate  about generate\nscore     about score\n"
    assert main(["sweep", "list"]) == 0
    assert "page-size\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["eval", "nothing"], "expected a task among generate, score, got 'nothing'"),
        (["eval", "score:shift"], "score: expected options as OPTION=VALUE, got 'shift'"),
        (["eval", "score", "--policy", "magic"], "--policy: policy: expected one of"),
        (["eval", "score", "--policy", "snapkv:windows=3"], "expected parameters among"),
        (["eval", "score", "--plugin", "magic"], "--plugin: plugin: expected one of"),
        (["eval", "score", "--pipeline", "nowhere.yaml"], "nowhere.yaml: expected a YAML file"),
        (["eval", "score", "--policy", "soft_prune", "--scorer", "mean"], "scorer: expected low_rank"),
        (["eval", "score", "--budget", "0"], "expected an integer >= 1, got '0'"),
        (["eval", "score", "--budget", "16"], "token_budget: expected at least 48"),
        (["eval", "score", "--budget", "64", "--keep-ratio", "0.5"], "not allowed with argument"),
        (["eval", "score", "--scorer", "magic"], "scorer: expected one of"),
        (["eval"], "the following arguments are required: TASK"),
        (["sweep", "magic"], "sweep: expected one of page-size"),
        (["sweep", "page-size", "--budget", "64"], "sweep page-size: token_budget: expected at least 128"),
    ],
)
def test_a_bad_option_gives_one_line_and_exit_code_2(
    command: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main([*command, "--model", str(tmp_path), "--output", str(tmp_path / "x")])
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert code == 2
    assert message in output.err
    assert output.err.count("\n") == 1


def test_a_run_without_any_result_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "score", *arguments(tmp_path, "--output", str(tmp_path / "r.jsonl"))]
    assert main([*command, "--tokens", "600"]) == 1
    assert "0 results, 0 from before, 4 FAILED" in capsys.readouterr().err
    assert (
        "max_position_embeddings" in json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])["error"]
    )


def test_a_broken_harness_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyserve.eval.methods.Method.covers", lambda self, num_tokens: True)
    command = ["eval", "score", *arguments(tmp_path, "--output", str(tmp_path / "r.jsonl"), "--budget", "64")]
    assert main(command) == 1
    assert "the run was stopped: query_aware" in capsys.readouterr().err
