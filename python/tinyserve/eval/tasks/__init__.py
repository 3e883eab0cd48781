"""The registry of evaluation tasks: names on the command line, what they are made of, and their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from tinyserve.errors import UsageError
from tinyserve.eval.questions import read_hotpotqa, read_squad
from tinyserve.eval.samples import Task
from tinyserve.eval.tasks.aliasing import Aliasing
from tinyserve.eval.tasks.document_qa import DocumentQA
from tinyserve.eval.tasks.lambada import Lambada
from tinyserve.eval.tasks.longbench import LongBench
from tinyserve.eval.tasks.mmlu import Mmlu
from tinyserve.eval.tasks.needles import Needles
from tinyserve.eval.tasks.passkey import Passkey
from tinyserve.eval.tasks.perplexity import Perplexity
from tinyserve.eval.tasks.rare_tokens import RareTokens
from tinyserve.eval.tasks.repetition import Repetition
from tinyserve.eval.tasks.variable_tracking import VariableTracking

__all__ = ["about", "get", "names"]


@dataclass(frozen=True)
class _Entry:
    """A task under a name: its class, the options that make it this one, and a line for the list."""

    make: Callable[..., Task]
    options: dict[str, Any]
    about: str


_TASKS: dict[str, _Entry] = {
    "perplexity_books": _Entry(Perplexity, {"text": "plays"}, "long text: Shakespeare's plays"),
    "perplexity_wikipedia": _Entry(Perplexity, {"text": "wikipedia"}, "long text: Wikipedia articles"),
    "perplexity_c4": _Entry(Perplexity, {"text": "c4"}, "long text: C4 documents, joined"),
    "passkey": _Entry(Passkey, {}, "a number hidden in repeated sentences"),
    "passkey_natural": _Entry(Passkey, {"filler": "natural"}, "a number hidden in a play"),
    "needle_single": _Entry(Needles, {}, "one fact in natural text"),
    "needle_multi_key": _Entry(Needles, {"num_keys": 4}, "one fact among four of the same form"),
    "needle_multi_value": _Entry(Needles, {"num_values": 4}, "all four values of one thing"),
    "variable_tracking": _Entry(VariableTracking, {}, "a chain of assignments to follow"),
    "hotpotqa": _Entry(
        DocumentQA, {"read": read_hotpotqa, "source": "hotpotqa"}, "questions over two of many paragraphs"
    ),
    "squad": _Entry(
        DocumentQA, {"read": read_squad, "source": "squad"}, "questions over one of many paragraphs"
    ),
    "longbench_hotpotqa": _Entry(
        LongBench, {"dataset": "hotpotqa"}, "LongBench (local data): questions over paragraphs"
    ),
    "longbench_narrativeqa": _Entry(
        LongBench, {"dataset": "narrativeqa"}, "LongBench (local data): questions about a story"
    ),
    "longbench_qasper": _Entry(
        LongBench, {"dataset": "qasper"}, "LongBench (local data): questions about a paper"
    ),
    "longbench_triviaqa": _Entry(
        LongBench, {"dataset": "triviaqa"}, "LongBench (local data): trivia with examples"
    ),
    "longbench_gov_report": _Entry(
        LongBench, {"dataset": "gov_report"}, "LongBench (local data): sum up a report"
    ),
    "lambada": _Entry(Lambada, {}, "last word of a passage in Wikipedia articles"),
    "mmlu": _Entry(Mmlu, {}, "multiple choice; agreement with dense attention"),
    "repetition": _Entry(Repetition, {}, "diagnostic: go on with a block that repeats"),
    "rare_tokens": _Entry(RareTokens, {}, "diagnostic: a phrase of rare tokens that occurred once"),
    "aliasing": _Entry(Aliasing, {}, "diagnostic: one record among many that look alike"),
}


def names() -> list[str]:
    """All tasks, in the order of the list."""
    return list(_TASKS)


def about(name: str) -> str:
    """One line on what the task asks.

    Raises:
        UsageError: no such task.
    """
    return _entry(name).about


def get(name: str, **options: Any) -> Task:
    """The task under that name.

    Args:
        options: fields of its class, in place of the defaults under that name.

    Raises:
        UsageError: no such task, an option that it does not have, or a value that it cannot have.
    """
    entry = _entry(name)
    known = {option: hint for option, hint in get_type_hints(entry.make).items() if option != "name"}
    for option, value in options.items():
        if option not in known:
            raise UsageError(f"{name}: expected options among {', '.join(known)}, got {option!r}")
        if not _fits(value, known[option]):
            hint = known[option]
            expected = hint.__name__ if isinstance(hint, type) and not get_args(hint) else hint
            raise UsageError(f"{name}: {option}: expected {expected}, got {value!r}")
    return entry.make(name=name, **{**entry.options, **options})


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has the type of a field; on a command line a number may turn out a word."""
    if get_origin(hint) in (tuple, Callable):
        return isinstance(value, tuple) if get_origin(hint) is tuple else callable(value)
    kinds = get_args(hint) or (hint,)
    return bool in kinds if isinstance(value, bool) else isinstance(value, kinds)


def _entry(name: str) -> _Entry:
    if name not in _TASKS:
        raise UsageError(f"expected a task among {', '.join(_TASKS)}, got {name!r}")
    return _TASKS[name]
