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
from tinyserve.haystack import MARK, around, build_haystack, encode, room, take
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
_LENGTH = "--context"  # the option that errors name
INSTRUCTION = (
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
    head, tail = around(tokenizer, f"{INSTRUCTION}\n\n{MARK}\n\n{needle.question}", needle.answer_start)
    hidden = [encode(tokenizer, needle.sentence + "\n\n")]
    pieces = _excerpt(tokenizer, text, room(head, tail, hidden, num_tokens, _LENGTH), seed)
    prompt = build_haystack(head, tail, pieces, hidden, [depth], num_tokens=num_tokens, option=_LENGTH)
    return Prompt(prompt.token_ids, needle, *prompt.spans[0])


def _excerpt(tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int, seed: int) -> list[list[int]]:
    """Consecutive blocks of the text, tokenized one by one, `num_tokens` in all if the text has as many."""
    every = blocks(text)
    # Start in the first half, so that the rest is usually long enough; a long prompt starts at the beginning.
    start = random.Random(f"place {seed}").randrange(max(1, len(every) // 2))
    pieces: list[list[int]] = []
    for first in (start, 0):
        pieces = take((encode(tokenizer, block + "\n\n") for block in every[first:]), num_tokens)
        if sum(map(len, pieces)) == num_tokens:
            break
    return pieces
