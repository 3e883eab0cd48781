"""What `tinyserve eval` and `tinyserve sweep` do once their options are known."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tinyserve.errors import SetupError, UsageError
from tinyserve.eval import tasks as task_registry
from tinyserve.eval.evaluate import evaluate
from tinyserve.eval.guards import GuardError
from tinyserve.eval.maps import SelectionMaps
from tinyserve.eval.methods import Method, grid, named_plugin, named_policy, with_options
from tinyserve.eval.plots import plot_sweep
from tinyserve.eval.results import Record, ResultFile, model_sha256
from tinyserve.eval.rows import Row, make_rows
from tinyserve.eval.runner import Runner
from tinyserve.eval.sweeps import PRESETS, preset
from tinyserve.eval.tables import markdown, write_csv, write_markdown
from tinyserve.models import DISPLAY_NAME, load_model, smollm2_folder
from tinyserve.pipeline import load_pipeline
from tinyserve_ops import SparseConfig
from tinyserve_ops.plugins import Plugin
from tinyserve_ops.policies import FullCache, Policy, QueryAware

__all__ = ["run_eval", "run_sweep"]

_DEFAULT_BUDGET = 256


def run_eval(options: argparse.Namespace) -> None:
    """Runs tasks, prints their tables and writes them beside the results."""
    if options.tasks == ["list"]:
        width = max(map(len, task_registry.names()))
        print("\n".join(f"{name:{width}}  {task_registry.about(name)}" for name in task_registry.names()))
        return
    run = _Run(options, options.tasks, grid(_pipelines(options), _configs(options)), options.output)
    run.evaluate()
    rows = run.rows(run.records(run.methods))
    _write_tables(rows, options.output.with_suffix(""), "Evaluation", options.command_line)


def run_sweep(options: argparse.Namespace) -> None:
    """Runs presets over one set of results; writes tables and plots of each."""
    if options.presets == ["list"]:
        print("\n".join(PRESETS))
        return
    folder: Path = options.output
    base = _config(options, options.page_size, options.scorer, token_budget=options.budget)
    names = list(PRESETS) if options.presets == ["all"] else options.presets
    sweeps = [preset(name, base) for name in names]
    methods = list(dict.fromkeys(method for sweep in sweeps for method in sweep.methods))
    run = _Run(options, options.task, methods, folder / "results.jsonl")
    run.evaluate(maps=folder)
    for sweep in sweeps:
        records = run.records(sweep.methods)
        rows = run.rows(records)
        _write_tables(rows, folder / sweep.name, f"Sweep: {sweep.name}", options.command_line)
        for path in plot_sweep(sweep, rows, records, folder):
            print(path)


class _Run:
    """One call of a command: its model, what it runs, and the part of the result file that is about it."""

    def __init__(
        self, options: argparse.Namespace, tasks: Sequence[str], methods: Sequence[Method], output: Path
    ) -> None:
        self.options = options
        self._task_options = dict(map(with_options, tasks))
        self.tasks = [task_registry.get(name, **chosen) for name, chosen in self._task_options.items()]
        self.methods = methods
        self._results = ResultFile(output)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        folder = options.model if options.model is not None else smollm2_folder()
        self._name = DISPLAY_NAME if options.model is None else folder.name
        self._model, self._tokenizer = load_model(folder, getattr(torch, options.dtype))
        self._model_hash = model_sha256(self._model)

    def evaluate(self, *, maps: Path | None = None) -> None:
        """Fills the result file, and draws selection maps into the folder `maps`.

        Raises:
            SetupError: the results can't be trusted, or there are none.
        """
        num_layers = self._model.config.num_hidden_layers
        on_run = None if maps is None else SelectionMaps(maps, self._name, num_layers)
        try:
            with Runner(self._model, self._tokenizer, measured_steps=self.options.measured_steps) as runner:
                counts = evaluate(
                    runner,
                    self.tasks,
                    self.methods,
                    self._results,
                    model_name=self._name,
                    num_samples=self.options.samples,
                    num_tokens=self.options.tokens,
                    seed=self.options.seed,
                    task_options=self._task_options,
                    on_run=on_run,
                )
        except GuardError as error:
            raise SetupError(f"the run was stopped: {error}") from error
        failed = f", {counts.failed} FAILED (records with an error)" if counts.failed else ""
        said = f"{counts.finished} results, {counts.reused} from before{failed}: {self._results.path}"
        if counts.finished + counts.reused == 0:
            raise SetupError(said)
        print(said, file=sys.stderr)

    def records(self, methods: Sequence[Method]) -> list[Record]:
        """What the file says about these methods and the command's tasks, model, lengths and seed."""
        wanted: dict[str, Any] = {
            "model_sha256": self._model_hash,
            "num_tokens": self.options.tokens,
            "seed": self.options.seed,
        }
        facts = [method.facts for method in methods]
        return [
            record
            for record in self._results.records
            if record["method"] in facts
            and record["task_options"] == self._task_options.get(record["task"])
            and all(record[name] == value for name, value in wanted.items())
        ]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        tasks = {task.name: task for task in self.tasks}
        return make_rows(records, tasks, only_solved=self.options.only_solved)


def _write_tables(rows: Sequence[Row], stem: Path, title: str, command: str) -> None:
    print(f"# {title}\n\n{markdown(rows)}\n")
    write_markdown(rows, stem.with_suffix(".md"), title=title, command=command)
    write_csv(rows, stem.with_suffix(".csv"))


def _pipelines(options: argparse.Namespace) -> list[tuple[Policy, tuple[Plugin, ...]]]:
    """The policies, with the plugins on all but the full cache, which others are held to; then the files."""
    stacked = tuple(named_plugin(text) for text in options.plugin or ())
    chosen = [named_policy(text) for text in options.policy]
    pipelines = [(policy, () if isinstance(policy, FullCache) else stacked) for policy in chosen]
    for path in options.pipeline or ():
        pipeline = load_pipeline(path)
        pipelines.append((pipeline.policy or QueryAware(), pipeline.plugins))
    return pipelines


def _configs(options: argparse.Namespace) -> list[SparseConfig]:
    """Every page size with every scorer and budget."""
    budgets: list[dict[str, Any]] = [{"keep_ratio": ratio} for ratio in options.keep_ratio or ()]
    budgets = budgets or [{"token_budget": tokens} for tokens in options.budget or (_DEFAULT_BUDGET,)]
    return [
        _config(options, page_size, scorer, **budget)
        for page_size, scorer, budget in itertools.product(options.page_size, options.scorer, budgets)
    ]


def _config(options: argparse.Namespace, page_size: int, scorer: str, **budget: Any) -> SparseConfig:
    try:
        return SparseConfig(
            page_size=page_size,
            scorer=scorer,
            dense_layers=options.dense_layers,
            kv_dtype=options.kv_dtype,
            **budget,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
