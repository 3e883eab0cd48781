"""Results as JSON lines: one line per sample and method, each with all that a published number needs.

A line is written whole and flushed before the next sample begins, so an interrupted run loses at most the
sample under way, and a second run with the same arguments goes on behind it. Lines are never changed: of two
about the same sample and method the later one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyserve.errors import UsageError
from tinyserve.eval.measures import StepMeasures, mean_measures
from tinyserve.eval.methods import Method
from tinyserve.eval.samples import Sample, Task

if TYPE_CHECKING:
    import torch

    from tinyserve.eval.runner import MethodRun

__all__ = [
    "Record",
    "ResultFile",
    "failure_record",
    "identity",
    "is_failure",
    "model_sha256",
    "read_records",
    "sample_record",
]

Record = dict[str, Any]
# What makes two lines about the same thing: the scope of a run, then the sample and the method.
_SCOPE = ("model_sha256", "task", "task_options", "num_tokens", "seed")
_IDENTITY = (*_SCOPE, "sample_id", "sample_sha256", "method")


class ResultFile:
    """A file of records that grows.

    Args:
        path: made with its folder when it does not exist. A last line that an interruption cut is dropped.

    Raises:
        UsageError: the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for record in read_records(path):
                self._records[_key(record)] = record
            _drop_cut_line(path)

    @property
    def records(self) -> list[Record]:
        """The records that count, in the order of their first lines."""
        return list(self._records.values())

    def has(self, identity: Record) -> bool:
        """Whether there is a record of this sample and method, and not of its failure."""
        found = self._records.get(_key(identity))
        return found is not None and not is_failure(found)

    def append(self, record: Record) -> None:
        """Writes a record through to the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._records[_key(record)] = record


def read_records(path: Path) -> list[Record]:
    """All whole lines of a result file.

    Raises:
        UsageError: a line is not a record.
    """
    records = []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or any(name not in record for name in _IDENTITY):
            raise UsageError(
                f"--output: expected a file of evaluation results, got {path} with line {number}"
            )
        records.append(record)
    return records


def identity(scope: Record, sample: Sample, method: Method) -> Record:
    """The part of a record that says which sample under which method it is about.

    Args:
        scope: what the samples of a run have in common: model_sha256, task, task_options, num_tokens, seed.
    """
    asked = [sample.prompt_ids, sample.num_dense, sample.max_new_tokens, sample.continuations]
    return {
        **{name: scope[name] for name in _SCOPE},
        "sample_id": sample.sample_id,
        "sample_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16],
        "method": method.facts,
    }


def sample_record(identity: Record, task: Task, sample: Sample, run: MethodRun) -> Record:
    """The record of a finished sample, without what is the same for the whole run."""
    output, page_size = run.output, run.method.config.page_size
    return {
        **identity,
        "label": run.method.label,
        "policy": run.method.policy.name,
        "budget_tokens": run.method.budget_tokens(len(sample.prompt_ids)),
        "page_size": page_size,
        "metric": task.metric,
        "scores": task.score(sample, output),
        "text": output.text,
        "token_ids": output.token_ids,
        "logprobs": [[round(value, 6) for value in values] for values in output.logprobs],
        "greedy": output.greedy,
        "references": list(sample.references),
        "details": sample.details,
        "prompt_tokens": len(sample.prompt_ids),
        "dense_tokens": run.num_dense,
        "scored_tokens": run.scored_tokens,
        "sparse_share": run.sparse_share,
        "engaged": run.engaged,
        "kv_bytes_held": run.kv_bytes_held,
        "attention_ms": run.attention_ms,
        "plugin_reports": run.plugin_reports,
        "measures": mean_measures(run.steps),
        "series": _series(run.steps),
    }


def failure_record(identity: Record, method: Method, error: BaseException) -> Record:
    """The record of a sample that did not get through."""
    reason = " ".join(str(error).split())
    return {**identity, "label": method.label, "error": f"{type(error).__name__}: {reason}"}


def is_failure(record: Record) -> bool:
    return "error" in record


def model_sha256(model: torch.nn.Module) -> str:
    """A hash of the weights as they are in memory, names, shapes and types included."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _series(steps: Iterable[StepMeasures]) -> dict[str, list[float | None]]:
    rows = [asdict(step) for step in steps]
    return {
        name: [None if row[name] is None else round(row[name], 4) for row in rows]
        for name in StepMeasures.__dataclass_fields__
    }


def _key(record: Record) -> str:
    return json.dumps([record[name] for name in _IDENTITY], sort_keys=True)


def _drop_cut_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    cut, beginning = content[whole:], b'{"model_sha256":'
    if not cut:
        return
    if cut[: len(beginning)] != beginning[: len(cut)]:
        raise UsageError(f"--output: expected a file of evaluation results, got {path}")
    with path.open("r+b") as file:
        file.truncate(whole)
