"""Command line of `python -m tinyserve.eval.train_small`: trains a GPT-2 (or OPT) of our own.

No package registry has weights of these architectures, and random weights attend to nothing in particular.
A model of four layers that learnt from Shakespeare's plays does, so that what sparse attention loses can be
seen on them, too. It goes into a Hugging Face folder for `tinyserve eval --model`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, OPTConfig, PreTrainedModel, PreTrainedTokenizerFast

from tinyserve.environment import environment
from tinyserve.errors import SetupError, UsageError
from tinyserve.eval.corpora import Document, load
from tinyserve.eval.lessons import Lessons
from tinyserve.haystack import encode_long
from tinyserve.options import integer
from tinyserve.progress import bar

__all__ = ["CONFIGS", "main", "train"]

POSITIONS = 1024
_VOCABULARY = 4096
_END = "<|endoftext|>"
_NUM_HELD_OUT = 2  # documents at the end of the corpus
# Most of it is learnt faster from short sequences at random positions; the last ones are as long as they get.
_STAGES = ((0.6, 256), (1.0, POSITIONS))  # up to this share of the steps, tokens of a sequence
_TOKENS_OF_A_STEP = 4096
_LEARNING_RATE, _LAST_LEARNING_RATE, _WARMUP_STEPS = 2e-3, 1e-4, 60


def _gpt2(**shape: Any) -> GPT2Config:
    return GPT2Config(
        n_positions=POSITIONS,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **shape,
    )


def _opt(**shape: Any) -> OPTConfig:
    return OPTConfig(
        max_position_embeddings=POSITIONS,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        dropout=0.0,
        **shape,
    )


CONFIGS: dict[str, Callable[..., GPT2Config | OPTConfig]] = {"gpt2": _gpt2, "opt": _opt}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the text is missing, 2 bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tinyserve.eval.train_small",
        description="Trains a model of four layers on Shakespeare's plays, copying and pass keys; "
        "the same seed and number of threads give the same model.",
    )
    add = parser.add_argument
    add("architecture", choices=sorted(CONFIGS))
    add("--output", type=Path, required=True, metavar="FOLDER", help="a new folder for the model")
    add("--text", default="plays", help="a corpus or path, as for evaluation tasks (%(default)s)")
    add("--steps", type=integer(1), default=1500, help=f"of {_TOKENS_OF_A_STEP} tokens (%(default)s)")
    add("--seed", type=integer(0), default=42, help="(%(default)s)")
    add("--threads", type=integer(1), help="CPU threads (torch's choice)")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        facts = train(
            options.architecture, options.output, options.text, num_steps=options.steps, seed=options.seed
        )
    except (SetupError, UsageError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(json.dumps(facts, indent=1))
    return 0


def train(architecture: str, folder: Path, text: str | Path, *, num_steps: int, seed: int) -> dict[str, Any]:
    """Writes model, tokenizer, `held_out.jsonl` (documents that were not learnt) and `training.json`.

    Returns:
        What stands in `training.json`: settings, loss on the held-out documents in nats per token, seconds,
        machine and versions.

    Raises:
        UsageError: the folder is there already, or the text is too short.
        SetupError: the corpus is not on this machine.
    """
    if folder.exists():
        raise UsageError(f"--output: expected a new folder, got {folder}, which exists")
    documents = load(text)
    learnt, held_out = documents[:-_NUM_HELD_OUT], documents[-_NUM_HELD_OUT:]
    if not learnt:
        raise UsageError(f"--text: expected more than {_NUM_HELD_OUT} documents, got {len(documents)}")
    started = time.perf_counter()
    tokenizer = _train_tokenizer(learnt)
    torch.manual_seed(seed)
    end = int(tokenizer.eos_token_id)
    config = CONFIGS[architecture](
        vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, pad_token_id=None
    )
    model = _new_model(config)
    lessons = Lessons(tokenizer, learnt, seed=seed)
    if lessons.num_tokens < POSITIONS:
        raise UsageError(
            f"--text: expected at least {POSITIONS} tokens to learn from, got {lessons.num_tokens}"
        )
    losses = list(_steps(model, lessons, num_steps))
    facts = {
        "architecture": architecture,
        "parameters": model.num_parameters(),
        "text": str(text),
        "steps": num_steps,
        "tokens": num_steps * _TOKENS_OF_A_STEP,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "first_loss": losses[0],
        "last_loss": sum(losses[-20:]) / len(losses[-20:]),
        "held_out_loss": _held_out_loss(model, tokenizer, held_out),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
    }
    _write(folder, model, tokenizer, held_out, facts)
    return facts


def _train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of the text, every digit a token of its own, so that a pass key has to be copied
    digit by digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, model_max_length=POSITIONS
    )


def _new_model(config: GPT2Config | OPTConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.train()


def _steps(model: PreTrainedModel, lessons: Lessons, num_steps: int) -> Iterator[float]:
    """Trains; the loss of each step."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    with bar("training", total=num_steps, unit=" steps") as progress:
        for step in range(num_steps):
            num_tokens = next(tokens for share, tokens in _STAGES if step < share * num_steps)
            ids = lessons.batch(_TOKENS_OF_A_STEP // num_tokens, num_tokens)
            first = torch.randint(POSITIONS - num_tokens + 1, (len(ids), 1))
            positions = first + torch.arange(num_tokens)
            loss = _loss(model(input_ids=ids, position_ids=positions, use_cache=False).logits, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            progress.update(1)
            yield loss.item()


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, given those before it; nats."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _rate(step: int, num_steps: int) -> float:
    """Share of the learning rate: a linear rise, then half a cosine down to the last one."""
    warmup = min(_WARMUP_STEPS, max(num_steps // 10, 1))
    if step < warmup:
        return (step + 1) / warmup
    last = _LAST_LEARNING_RATE / _LEARNING_RATE
    done = (step - warmup) / max(num_steps - warmup, 1)
    return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2


@torch.inference_mode()
def _held_out_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]
) -> float:
    """Mean over the tokens of the documents, in windows of all positions."""
    model.eval()
    tokens = [token for document in documents for token in encode_long(tokenizer, document.text)]
    windows = torch.tensor(tokens[: len(tokens) // POSITIONS * POSITIONS]).view(-1, POSITIONS)
    if not len(windows):
        windows = torch.tensor([tokens])
    losses = [_loss(model(input_ids=ids[None], use_cache=False).logits, ids[None]) for ids in windows]
    return torch.stack(losses).mean().item()


def _write(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: Sequence[Document],
    facts: dict[str, Any],
) -> None:
    model.config.pad_token_id = tokenizer.pad_token_id  # not before: the model would take ends for padding
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = [json.dumps({"title": document.title, "text": document.text}) for document in held_out]
    (folder / "held_out.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
