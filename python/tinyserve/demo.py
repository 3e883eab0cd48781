"""The demo: hide a fact in a play, ask for it with full and with sparse attention, and show what each side
paid.

Whatever comes out is printed: a key the sparse side loses is reported as lost.
"""

from __future__ import annotations

import re
import shutil
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.environment import environment
from tinyserve.errors import SetupError, UsageError
from tinyserve.models import DISPLAY_NAME, load_model, smollm2_folder
from tinyserve.needles import Prompt, build_prompt, found, make_needle
from tinyserve.texts import DEFAULT_PLAY, load_play

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tinyserve.comparison import ModeResult
    from tinyserve.results import Answer
    from tinyserve_ops import SparseConfig


@dataclass(frozen=True)
class DemoOptions:
    """What the command line asks for; ranges that do not depend on the model are checked there."""

    context: int
    budget: int | None
    keep_ratio: float | None
    page_size: int
    scorer: str
    model: Path | None
    depth: float
    key: str
    seed: int
    new_tokens: int
    threads: int | None
    dtype: str
    output: Path


def run_demo(options: DemoOptions) -> None:
    """Prints the comparison and writes the picture, with the numbers as JSON beside it.

    Raises:
        UsageError: an option that does not fit the model or the library.
        SetupError: a missing package, a damaged file, a library that is not built.
    """
    started = time.perf_counter()
    _check_output(options.output)
    needle = make_needle(options.key, options.seed)
    config = _sparse_config(options)
    import torch

    from tinyserve.comparison import compare
    from tinyserve.process_memory import peak_bytes
    from tinyserve.report import side_by_side, summary
    from tinyserve.results import save_numbers, save_picture

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = options.model if options.model is not None else smollm2_folder()
    model_name = DISPLAY_NAME if options.model is None else folder.name
    model, tokenizer = load_model(folder, getattr(torch, options.dtype))
    _check_positions(model, options)
    prompt = build_prompt(
        tokenizer, load_play(), needle, num_tokens=options.context, depth=options.depth, seed=options.seed
    )
    print(_opening(options, model, model_name, prompt), flush=True)

    full, sparse = compare(model, prompt.token_ids, options.new_tokens, config)
    answers = (_answer(full, prompt, tokenizer), _answer(sparse, prompt, tokenizer))

    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    texts = [needle.answer_start + " " + re.sub(r"\n+", "\n", answer.text) for answer in answers]
    print("\n" + side_by_side([full.title, sparse.title], texts, width))
    print("\n" + summary(full, sparse, (answers[0].found, answers[1].found), peak_bytes()))
    for note in _notes(options, sparse, answers):
        print("\n" + textwrap.fill(note, width))
    print()
    if sparse.sparse_engaged:
        tokens = [tokenizer.decode([token]) for token in sparse.token_ids]
        save_picture(
            options.output,
            sparse,
            answers[1],
            prompt,
            model_name=model_name,
            num_layers=model.config.num_hidden_layers,
            page_size=options.page_size,
            tokens=tokens,
        )
        print(f"picture  {options.output.resolve()}")
    numbers = options.output.with_suffix(".json")
    save_numbers(numbers, vars(options), prompt, (full, sparse), answers, environment())
    print(f"numbers  {numbers.resolve()}")
    print(f"total    {time.perf_counter() - started:.0f} s")


def _sparse_config(options: DemoOptions) -> SparseConfig:
    """The library checks its own options; its message names the argument, what was expected and what came."""
    try:
        from tinyserve_ops import SparseConfig
    except ImportError as error:
        raise SetupError(
            f"cannot import tinyserve_ops (built with pip install -e . --no-build-isolation?): {error}"
        ) from error
    try:
        return SparseConfig(
            token_budget=options.budget,
            keep_ratio=options.keep_ratio,
            page_size=options.page_size,
            scorer=options.scorer,
            record_selection=True,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _check_output(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UsageError(f"--output: expected a file name ending in .png, got {path}")
    if path.is_dir():
        raise UsageError(f"--output: expected a file, got the folder {path}")


def _check_positions(model: PreTrainedModel, options: DemoOptions) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    needed = options.context + options.new_tokens
    if limit is not None and needed > limit:
        raise UsageError(
            f"--context: the model has {limit} positions, got {options.context} + {options.new_tokens}"
        )


def _opening(options: DemoOptions, model: PreTrainedModel, model_name: str, prompt: Prompt) -> str:
    import torch

    play = DEFAULT_PLAY.rpartition("/")[2].replace("-", " ").title()
    where = prompt.needle_start / len(prompt.token_ids)
    return (
        f"model    {model_name}, {model.config.num_hidden_layers} layers, {options.dtype}, "
        f"{torch.get_num_threads()} threads\n"
        f"prompt   {len(prompt.token_ids)} tokens of {play} (seed {options.seed})\n"
        f"hidden   {prompt.needle.sentence}   (at {where:.0%} of the prompt)\n"
        f"asked    {prompt.needle.question}   {prompt.needle.answer_start} ..."
    )


def _answer(result: ModeResult, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """The tokens before the end of the turn, as text; the decoding loop went on for the timing."""
    from tinyserve.results import Answer

    ids = result.token_ids
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
    return Answer(ids, text, found(prompt.needle, text))


def _notes(options: DemoOptions, sparse: ModeResult, answers: tuple[Answer, Answer]) -> list[str]:
    notes = [
        f"The sides took turns for {options.new_tokens} tokens each, so that their times compare; the texts "
        "stop where the answer ends. Full attention runs as transformers runs it by default: DynamicCache "
        "copies the whole cache at every token, which is part of its time. benchmarks/bench_generate.py also "
        "measures the static cache."
    ]
    if not sparse.sparse_engaged:
        notes.append("The budget covers the whole context, so the sparse side left nothing out: no picture.")
    if answers[0].found and not answers[1].found:
        notes.append(
            "The sparse side lost the key. A larger --budget, a smaller --page-size or another --scorer may "
            "keep it."
        )
    if not answers[0].found:
        notes.append(
            "Full attention itself does not find the key here, so this prompt says little about the sparse "
            "side."
        )
    return notes
