"""A fact hidden in a long text, and the prompt that asks for it.

A `Needle` is a key (a number by default) in a sentence that has nothing to do with the play. `build_prompt`
makes a chat prompt of an exact number of tokens with that sentence at a given depth, and with the start of
the answer at its end, as retrieval tests for small models do: what counts is finding the key, not the art of
answering. The same arguments always give the same prompt.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError
from tinyserve.texts import blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_KEY = "48213"
_THINGS = (
    "lighthouse",
    "bakery",
    "submarine",
    "library",
    "greenhouse",
    "observatory",
    "windmill",
    "aquarium",
)
_MARK = "\u241f"  # stands for the long text while the chat template is rendered; no play contains it
_INSTRUCTION = (
    "There is important information hidden inside a lot of irrelevant text. Find it and memorize it."
)


@dataclass(frozen=True)
class Needle:
    """The hidden fact: `sentence` states `key`, `question` asks for it, `answer_start` opens the answer."""

    key: str
    thing: str

    @property
    def sentence(self) -> str:
        return f"The pass key of the {self.thing} is {self.key}. Remember it. {self.key} is the pass key."

    @property
    def question(self) -> str:
        return f"What is the pass key of the {self.thing}?"

    @property
    def answer_start(self) -> str:
        return f"The pass key of the {self.thing} is"


@dataclass(frozen=True)
class Prompt:
    """Token ids of the whole prompt, and the token positions [needle_start, needle_end) of the needle's
    sentence."""

    token_ids: list[int]
    needle: Needle
    needle_start: int
    needle_end: int


def make_needle(key: str, seed: int) -> Needle:
    """The needle for a key; the seed picks what the pass key belongs to."""
    if not re.fullmatch(r"\w{1,32}", key):
        raise UsageError(f"--key: expected 1 to 32 letters or digits, got {key!r}")
    return Needle(key, random.Random(f"thing {seed}").choice(_THINGS))


def found(needle: Needle, answer: str) -> bool:
    """True when the key stands in the answer, whatever separators the model put between its digits or
    letters."""
    squeezed = re.sub(r"(?<=\w)[ ,.\-](?=\w)", "", answer)
    return any(
        re.search(rf"(?<!\w){re.escape(needle.key)}(?!\w)", text) is not None for text in (answer, squeezed)
    )


def build_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, needle: Needle, *, num_tokens: int, depth: float, seed: int
) -> Prompt:
    """A chat prompt of exactly `num_tokens` tokens: instruction, text with the needle in it, question.

    Args:
        tokenizer: of the model; its chat template is used when it has one.
        text: the haystack; an excerpt long enough is taken from a place the seed picks.
        depth: where in the excerpt the needle goes, 0 (start) to 1 (end); between two speeches.

    Raises:
        UsageError: the length is too small for instruction and question, or the text is too short for it.
    """
    head, tail = _around_text(tokenizer, needle)
    needle_ids = _encode(tokenizer, needle.sentence + "\n\n")
    room = num_tokens - len(head) - len(needle_ids) - len(tail)
    if room < 1:
        smallest = num_tokens - room + 1
        raise UsageError(
            f"--context: expected at least {smallest} tokens for instruction and question, got {num_tokens}"
        )
    pieces = _excerpt(tokenizer, text, room, seed)
    gaps = [0]
    for piece in pieces:
        gaps.append(gaps[-1] + len(piece))
    gap = min(gaps, key=lambda position: abs(position - depth * room))
    hay = [token for piece in pieces for token in piece]
    start = len(head) + gap
    token_ids = head + hay[:gap] + needle_ids + hay[gap:] + tail
    assert len(token_ids) == num_tokens
    return Prompt(token_ids, needle, start, start + len(needle_ids))


def _around_text(tokenizer: PreTrainedTokenizerBase, needle: Needle) -> tuple[list[int], list[int]]:
    """Token ids before and after the long text."""
    message = f"{_INSTRUCTION}\n\n{_MARK}\n\n{needle.question}"
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": message}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head, tail = str(rendered).split(_MARK)
        return _encode(tokenizer, head), _encode(tokenizer, tail + needle.answer_start)
    head, tail = message.split(_MARK)
    # Without a chat template the tokenizer adds what its model expects at the start (a BOS token, or
    # nothing).
    return list(tokenizer.encode(head)), _encode(tokenizer, f"{tail} {needle.answer_start}")


def _excerpt(tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int, seed: int) -> list[list[int]]:
    """Consecutive blocks of the text, tokenized one by one, `num_tokens` in all (the last one cut to fit)."""
    every = blocks(text)
    # Start in the first half, so that the rest is usually long enough; a long prompt starts at the beginning.
    start = random.Random(f"place {seed}").randrange(max(1, len(every) // 2))
    for first in (start, 0):
        pieces: list[list[int]] = []
        missing = num_tokens
        for block in every[first:]:
            pieces.append(_encode(tokenizer, block + "\n\n")[:missing])
            missing -= len(pieces[-1])
            if missing == 0:
                return pieces
    raise UsageError(f"--context: the text has only {num_tokens - missing} tokens, {num_tokens} are needed")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
