"""Tasks x samples x methods, with a bar, from where the last run stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyserve.environment import environment
from tinyserve.errors import UsageError
from tinyserve.eval.methods import Method
from tinyserve.eval.results import (
    Record,
    ResultFile,
    failure_record,
    identity,
    model_sha256,
    sample_record,
)
from tinyserve.eval.runner import Failure, MethodRun, Runner
from tinyserve.eval.samples import Sample, Task
from tinyserve.progress import bar

__all__ = ["SEED", "Counts", "evaluate"]

SEED = 42

_log = logging.getLogger(__name__)

OnRun = Callable[[Task, Sample, MethodRun], None]


@dataclass
class Counts:
    """Results, each of one sample and method, by what became of them."""

    finished: int = 0
    reused: int = 0
    failed: int = 0


def evaluate(
    runner: Runner,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    results: ResultFile,
    *,
    model_name: str,
    num_samples: int,
    num_tokens: int,
    seed: int = SEED,
    task_options: Mapping[str, Mapping[str, Any]] | None = None,
    on_run: OnRun | None = None,
) -> Counts:
    """Appends one record per task, sample and method to `results`; those that are there already are left out.

    Args:
        model_name: stands in the records beside the hash of the weights.
        num_samples, num_tokens, seed: as for `Task.samples`.
        task_options: by task name, what it was made with; stands in its records.
        on_run: called with every run, once its record is written.

    Raises:
        GuardError: the results can't be trusted; what is wrong stands in the last record.
        UsageError: a task has no samples of that size.
    """
    torch.manual_seed(seed)
    scope = {"model_sha256": model_sha256(runner.model), "num_tokens": num_tokens, "seed": seed}
    facts = {"model": model_name, **environment()}
    evaluation = _Evaluation(runner, methods, results, facts, on_run)
    for task in tasks:
        samples = list(
            task.samples(runner.tokenizer, num_samples=num_samples, num_tokens=num_tokens, seed=seed)
        )
        if not samples:
            raise UsageError(f"{task.name}: expected samples of up to {num_tokens} tokens, got none")
        options = dict((task_options or {}).get(task.name, {}))
        evaluation.run_task(task, samples, {**scope, "task": task.name, "task_options": options})
    return evaluation.counts


@dataclass
class _Evaluation:
    """One call of `evaluate`."""

    runner: Runner
    methods: Sequence[Method]
    results: ResultFile
    facts: Record
    on_run: OnRun | None
    counts: Counts = field(default_factory=Counts)
    _is_checked: bool = False

    def run_task(self, task: Task, samples: Sequence[Sample], scope: Record) -> None:
        with bar(task.name, total=len(samples) * len(self.methods), unit=" results") as progress:
            for sample in samples:
                pending = [m for m in self.methods if not self.results.has(identity(scope, sample, m))]
                self.counts.reused += len(self.methods) - len(pending)
                progress.update(len(self.methods) - len(pending))
                if pending and not self._is_checked:
                    self.runner.check_dense(sample)
                    self._is_checked = True
                for run in self.runner.run(sample, pending):
                    self._take(task, sample, run, scope)
                    progress.update(1)

    def _take(self, task: Task, sample: Sample, run: MethodRun | Failure, scope: Record) -> None:
        """Writes what came out of a method, or why nothing did."""
        key = identity(scope, sample, run.method)
        error = run.error if isinstance(run, Failure) else None
        if isinstance(run, MethodRun):
            try:
                record = sample_record(key, task, sample, run)
            except Exception as raised:  # a score that can't be computed loses this sample only
                error = raised
        if error is not None:
            self.results.append({**failure_record(key, run.method, error), **self.facts})
            self.counts.failed += 1
            _log.warning("%s, %s, %s: %s", task.name, sample.sample_id, run.method.label, error)
            return
        assert isinstance(run, MethodRun)
        self.results.append({**record, **self.facts})
        self.counts.finished += 1
        if self.on_run is not None:
            self.on_run(task, sample, run)
