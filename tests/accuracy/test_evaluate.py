"""Evaluations on disk: what a record carries, taking up an interrupted run, failures that cost one sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import SMALL, GenerateTask, NumberTokenizer, ScoreTask, tiny_model

from tinyserve.errors import UsageError
from tinyserve.eval.evaluate import Counts, evaluate
from tinyserve.eval.guards import GuardError
from tinyserve.eval.methods import Method, full_cache
from tinyserve.eval.results import ResultFile, is_failure, model_sha256, read_records
from tinyserve.eval.runner import Runner
from tinyserve.eval.samples import Output, Sample

FULL, SPARSE = full_cache(SMALL), Method(config=SMALL)


def run(
    path: Path,
    methods: Sequence[Method] = (FULL, SPARSE),
    tasks: Sequence[Any] = (GenerateTask(), ScoreTask()),
    model: Any = None,
    **changes: Any,
) -> Counts:
    sizes = {"num_samples": 3, "num_tokens": 60, **changes}
    with Runner(model if model is not None else tiny_model(), NumberTokenizer()) as runner:
        return evaluate(runner, tasks, methods, ResultFile(path), model_name="tiny", **sizes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "results.jsonl"


def test_a_record_carries_everything_a_published_number_needs(path: Path) -> None:
    assert run(path) == Counts(finished=12)
    records = read_records(path)
    assert len(records) == 12
    for record in records:
        assert record["model"] == "tiny"
        assert record["model_sha256"] == model_sha256(tiny_model())
        assert (record["seed"], record["num_tokens"], record["page_size"]) == (42, 60, 8)
        assert record["commit"]
        assert "logical cores" in record["machine"]
        assert record["torch"] == torch.__version__
        assert record["sparse_share"] == (None if record["policy"] == "full_cache" else 1.0)
        assert record["dense_tokens"] + 1 <= record["prompt_tokens"] == 60
    by_policy = {record["policy"]: record for record in records if record["task"] == "score"}
    assert by_policy["full_cache"]["budget_tokens"] == 60
    assert by_policy["query_aware"]["budget_tokens"] == 48
    assert by_policy["query_aware"]["method"]["scorer"] == "low_rank"
    sparse = by_policy["query_aware"]
    assert sparse["scores"] == {"nll": pytest.approx(-sum(sparse["logprobs"][0]) / 12, abs=1e-4)}
    assert len(sparse["series"]["recall"]) == sparse["scored_tokens"] == 12
    assert sparse["measures"]["recall"] == pytest.approx(sum(sparse["series"]["recall"]) / 12, abs=1e-4)
    assert [r["details"] for r in records if r["task"] == "generate"][::2] == [{"index": i} for i in range(3)]


def test_a_second_run_does_only_what_is_missing(path: Path) -> None:
    run(path, methods=[FULL])
    before = path.read_text()
    assert run(path) == Counts(finished=6, reused=6)
    assert path.read_text().startswith(before)
    assert run(path) == Counts(reused=12)
    assert run(path, num_samples=4) == Counts(finished=4, reused=12)


@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        ({"num_tokens": 61}, 0),
        ({"seed": 43}, 0),
        ({"model": tiny_model(seed=1)}, 0),
        ({"methods": [Method(config=SMALL.replace(token_budget=40))]}, 0),
        ({"methods": [Method(config=SMALL.replace(scorer="mean"))]}, 0),
        ({"methods": [Method(config=SMALL, staged=True)]}, 0),
        ({"methods": [full_cache(SMALL.replace(scorer="mean", num_sink_pages=2))]}, 3),
        ({"methods": [Method(config=SMALL.replace(max_kv_bytes=1 << 30))]}, 3),
        (
            {"methods": [Method(config=SMALL.replace(group_reduction="softmax"))]},
            3,
        ),  # the default by its name
    ],
)
def test_what_changes_a_result_makes_another_record(path: Path, changes: dict[str, Any], reused: int) -> None:
    run(path, tasks=[ScoreTask()])
    changes.setdefault("methods", [SPARSE])
    assert run(path, tasks=[ScoreTask()], **changes) == Counts(finished=3 - reused, reused=reused)


def test_a_sample_of_the_same_name_but_other_tokens_is_run_again(path: Path) -> None:
    class Changed(ScoreTask):
        def samples(self, tokenizer: Any, **sizes: Any) -> Any:
            for sample in super().samples(tokenizer, **sizes):
                yield Sample(**{**vars(sample), "prompt_ids": (1, *sample.prompt_ids[1:])})

    run(path, tasks=[ScoreTask()])
    assert run(path, tasks=[Changed()]).reused == 0


def test_a_line_cut_by_an_interruption_is_dropped_and_its_sample_run_again(path: Path) -> None:
    run(path, tasks=[ScoreTask()])
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert run(path, tasks=[ScoreTask()]) == Counts(finished=1, reused=5)
    assert len(read_records(path)) == 6
    assert all(line.endswith("}") for line in path.read_text().splitlines())


class Moody(GenerateTask):
    """Has no score for its second sample."""

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        if sample.sample_id == "1":
            raise ValueError("no score today")
        return super().score(sample, output)


def test_a_failed_sample_is_recorded_loses_no_other_and_is_tried_again(path: Path) -> None:
    assert run(path, tasks=[Moody()]) == Counts(finished=4, failed=2)
    failures = [record for record in read_records(path) if is_failure(record)]
    assert [(f["sample_id"], f["error"], f["seed"]) for f in failures] == [
        ("1", "ValueError: no score today", 42)
    ] * 2
    assert run(path, tasks=[GenerateTask()]) == Counts(finished=2, reused=4)
    assert not any(is_failure(record) for record in ResultFile(path).records)


def test_samples_past_the_positions_of_the_model_are_recorded_as_failures(path: Path) -> None:
    counts = run(path, tasks=[ScoreTask()], num_tokens=600, num_samples=1)
    assert counts == Counts(failed=2)
    assert "max_position_embeddings" in read_records(path)[0]["error"]


def test_a_broken_harness_stops_the_run_and_says_so_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyserve_ops.SparseConfig.covers", lambda self, num_tokens: True)
    with pytest.raises(GuardError, match="bit for bit"):
        run(path, tasks=[ScoreTask()])
    assert [is_failure(record) for record in read_records(path)] == [False, True]
    assert read_records(path)[1]["error"].startswith("GuardError")


def test_a_task_without_samples_is_refused_by_name(path: Path) -> None:
    with pytest.raises(UsageError, match="generate: expected samples of up to 60 tokens, got none"):
        run(path, num_samples=0)


@pytest.mark.parametrize(
    "content", [json.dumps({"some": "numbers"}) + "\n", "to do:\n- rest", "1\n", "no line"]
)
def test_a_file_of_something_else_is_left_alone(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(UsageError, match="--output: expected a file of evaluation results"):
        ResultFile(path)
    assert path.read_text() == content


def test_the_hash_of_a_model_depends_on_its_weights_only() -> None:
    model = tiny_model()
    assert model_sha256(model) == model_sha256(tiny_model(max_position_embeddings=1024))
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert model_sha256(model) != model_sha256(tiny_model())
