"""Command line of `python -m tinyserve`: parses options, turns expected errors into one line and an exit
code.

Nothing heavy is imported before the options are known to be good, so `--help` and a wrong option answer at
once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tinyserve.errors import SetupError, UsageError
from tinyserve.eval.commands import add_evaluation
from tinyserve.needles import DEFAULT_KEY
from tinyserve.options import integer, share

_DEFAULT_BUDGET = 512


class _OneLineParser(argparse.ArgumentParser):
    """argparse prints the usage before its message; one clear line is easier to read."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 the set-up is incomplete, 2 bad options, 130 interrupted."""
    parser = _OneLineParser(prog="tinyserve", description="Long contexts on small machines.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", parser_class=_OneLineParser
    )
    _add_demo(commands)
    add_evaluation(commands)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    options.command_line = shlex.join(["python", "-m", "tinyserve", *words])  # for what is published
    prog = f"tinyserve {options.command}"
    # Everything comes from disk; this keeps the libraries from asking the network for what is not there.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        options.run(options)
    except UsageError as error:
        return _complain(prog, error, 2)
    except SetupError as error:
        return _complain(prog, error, 1)
    except KeyboardInterrupt:
        return _complain(prog, "interrupted", 130)
    return 0


def _complain(prog: str, reason: object, code: int) -> int:
    print(f"{prog}: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return code


def _add_demo(commands: argparse._SubParsersAction[_OneLineParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="full against sparse attention on a real model and a real text",
        description="Hides a fact in a play, asks for it with full and with sparse attention, and compares "
        "answers, time and memory.",
    )

    def add(name: str, help: str, **settings: Any) -> None:
        demo.add_argument(name, help=f"{help} (%(default)s)" if "default" in settings else help, **settings)

    add("--context", "length of the prompt", type=integer(1), default=3072, metavar="TOKENS")
    budget = demo.add_mutually_exclusive_group()
    text = f"tokens a decode step may read per layer and kv head ({_DEFAULT_BUDGET})"
    budget.add_argument("--budget", help=text, type=integer(1), metavar="TOKENS")
    text = "share of the pages it may read instead, 0 to 1"
    budget.add_argument("--keep-ratio", help=text, type=float, metavar="SHARE")
    add("--page-size", "tokens of a page", type=integer(1), default=16, metavar="TOKENS")
    add("--scorer", "how pages are ranked", default="low_rank", metavar="NAME")
    add("--model", "a Hugging Face model folder in place of SmolLM2", type=Path, metavar="FOLDER")
    add("--depth", "where in the text the fact hides, 0 to 1", type=share, default=0.2, metavar="SHARE")
    add("--key", "the fact: letters or digits", default=DEFAULT_KEY, metavar="TEXT")
    add("--seed", "picks the excerpt and what the key belongs to", type=integer(0), default=0, metavar="N")
    add("--new-tokens", "tokens to decode on each side", type=integer(2), default=32, metavar="N")
    add("--threads", "CPU threads (torch's choice)", type=integer(1), metavar="N")
    add("--dtype", "of weights and KV", choices=("float32", "bfloat16", "float16"), default="float32")
    text = "the picture; all numbers go beside it as .json"
    add("--output", text, type=Path, default=Path("tinyserve-demo.png"), metavar="PNG")
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> None:
    from tinyserve.demo import DemoOptions, run_demo

    ours = ("command", "command_line", "run")
    chosen = {name: value for name, value in vars(options).items() if name not in ours}
    if options.budget is None and options.keep_ratio is None:
        chosen["budget"] = _DEFAULT_BUDGET
    run_demo(DemoOptions(**chosen))
