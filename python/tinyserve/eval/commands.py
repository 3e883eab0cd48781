"""The commands `eval` and `sweep`: their options. Everything heavy comes with the first run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tinyserve.options import integer, share

__all__ = ["add_evaluation"]

_DEFAULT_BUDGET = 256
_DEFAULT_PAGE_SIZE = 16
_DEFAULT_SCORER = "low_rank"


def add_evaluation(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds `eval` and `sweep`."""
    evaluation = commands.add_parser(
        "eval",
        help="tasks under every policy, on equal footing",
        description="Runs tasks under policies: the context is prefilled densely, the rest goes one token at "
        "a time. Started again with the same output, an interrupted run goes on where it stopped.",
    )
    text = "what to run, as NAME or NAME:OPTION=VALUE,...; 'list' names all"
    evaluation.add_argument("tasks", nargs="+", metavar="TASK", help=text)
    add = evaluation.add_argument
    add(
        "--policy",
        nargs="+",
        default=["full_cache", "query_aware"],
        metavar="NAME",
        help="as NAME or NAME:OPTION=VALUE,... (%(default)s)",
    )
    text = "stacked on every policy but full_cache, as NAME or NAME:OPTION=VALUE,..."
    add("--plugin", nargs="+", metavar="NAME", help=text)
    text = "YAML files, each with a policy and plugins to run as well"
    add("--pipeline", nargs="+", type=Path, metavar="YAML", help=text)
    budget = evaluation.add_mutually_exclusive_group()
    text = f"tokens a step may read per layer and kv head ({_DEFAULT_BUDGET})"
    budget.add_argument("--budget", nargs="+", type=integer(1), metavar="TOKENS", help=text)
    text = "share of the pages it may read instead, 0 to 1"
    budget.add_argument("--keep-ratio", nargs="+", type=share, metavar="SHARE", help=text)
    text = f"tokens of a page ({_DEFAULT_PAGE_SIZE})"
    add("--page-size", nargs="+", type=integer(1), default=[_DEFAULT_PAGE_SIZE], metavar="TOKENS", help=text)
    text = f"how pages are ranked ({_DEFAULT_SCORER})"
    add("--scorer", nargs="+", default=[_DEFAULT_SCORER], metavar="NAME", help=text)
    _add_shared(evaluation)
    text = "result file; tables go beside it as .md and .csv (%(default)s)"
    add("--output", type=Path, default=Path("tinyserve-eval.jsonl"), metavar="JSONL", help=text)
    evaluation.set_defaults(run=_run_eval)

    sweep = commands.add_parser(
        "sweep",
        help="one setting varied: tables and plots",
        description="Varies one setting and holds the others; writes results, tables and plots to a folder.",
    )
    sweep.add_argument(
        "presets", nargs="+", metavar="PRESET", help="what varies; 'all', or 'list' names them"
    )
    add = sweep.add_argument
    add("--task", nargs="+", default=["passkey"], metavar="TASK", help="(%(default)s)")
    text = "tokens a step may read where that does not vary (%(default)s)"
    add("--budget", type=integer(1), default=_DEFAULT_BUDGET, metavar="TOKENS", help=text)
    text = "tokens of a page where that does not vary (%(default)s)"
    add("--page-size", type=integer(1), default=_DEFAULT_PAGE_SIZE, metavar="TOKENS", help=text)
    text = "how pages are ranked where that does not vary (%(default)s)"
    add("--scorer", default=_DEFAULT_SCORER, metavar="NAME", help=text)
    _add_shared(sweep)
    text = "folder of results, tables and plots (%(default)s)"
    add("--output", type=Path, default=Path("tinyserve-sweep"), metavar="FOLDER", help=text)
    sweep.set_defaults(run=_run_sweep)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--samples", type=integer(1), default=20, metavar="N", help="per task (%(default)s)")
    add("--tokens", type=integer(1), default=2048, metavar="N", help="of a prompt (%(default)s)")
    text = "first layers that read everything (%(default)s)"
    add("--dense-layers", type=integer(0), default=2, metavar="N", help=text)
    add("--kv-dtype", metavar="NAME", help="of the pages (the model's)")
    add("--model", type=Path, metavar="FOLDER", help="a Hugging Face model folder in place of SmolLM2")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and KV")
    add("--threads", type=integer(1), metavar="N", help="CPU threads (torch's choice)")
    text = "steps of each sample whose recall and hit rate are measured; 0 for none (%(default)s)"
    add("--measured-steps", type=integer(0), default=64, metavar="N", help=text)
    add("--seed", type=integer(0), default=42, metavar="N", help="of the samples (%(default)s)")
    text = "tables count only samples on which the full cache reaches the best score"
    add("--only-solved", action="store_true", help=text)


def _run_eval(options: argparse.Namespace) -> None:
    from tinyserve.eval.application import run_eval

    run_eval(options)


def _run_sweep(options: argparse.Namespace) -> None:
    from tinyserve.eval.application import run_sweep

    run_sweep(options)
