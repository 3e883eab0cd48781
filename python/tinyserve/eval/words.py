"""Words for made-up facts: names of things, and words that are one token of a tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Container
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NUM_THINGS", "thing_names", "word_tokens"]

_ADJECTIVES = """
amber ancient blue brass bright broken bronze calm clever cold copper crooked dark distant dusty early empty
famous foreign frozen gentle golden green grey heavy hidden hollow honest humble iron late lonely marble
modern narrow northern orange painted pale patient purple quiet rapid round royal rusty secret silent silver
simple southern square steep sturdy violet western wooden yellow
"""
_NOUNS = """
anchor archive balcony bakery barrel bell bridge cabin candle castle chapel clock compass cottage engine
factory ferry forge fountain garage garden gate greenhouse harbour hotel kettle lantern library lighthouse
market mill mirror museum observatory orchard palace parlour piano pier pottery pump quarry railway school
shop stable statue submarine tavern telescope temple theatre tower tractor tunnel vault wagon warehouse
windmill workshop
"""
NUM_THINGS = len(_ADJECTIVES.split()) * len(_NOUNS.split())
# How byte-level BPE and SentencePiece spell a token that begins a word.
_WORD = re.compile(r"[Ġ▁][a-z]{3,}")


def thing_names(rng: random.Random, count: int) -> list[str]:
    """Different "adjective noun" pairs in random order.

    Raises:
        UsageError: more than there are.
    """
    every = [f"{adjective} {noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()]
    if count > NUM_THINGS:
        raise UsageError(f"expected at most {NUM_THINGS} different things, got {count}")
    return rng.sample(every, count)


def word_tokens(
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    count: int,
    *,
    rarest: float,
    avoid: Container[int],
) -> list[int]:
    """Different random tokens that are a space and a word of lower-case letters.

    Args:
        rarest: share of the vocabulary to draw from, at its end. Byte-pair encodings number their tokens in
            the order they were learnt, from frequent to rare.
        avoid: tokens not to take.

    Raises:
        UsageError: the tokenizer has too few such tokens.
    """
    size = len(tokenizer)
    ids = range(size - int(size * rarest), size)
    found: list[int] = []
    for token in rng.sample(ids, len(ids)):
        if len(found) == count:
            break
        if token not in avoid and _WORD.fullmatch(str(tokenizer.convert_ids_to_tokens(token))):
            found.append(token)
    if len(found) < count:
        raise UsageError(
            f"expected a tokenizer with at least {count} tokens that are a word, got {len(found)}"
        )
    return found
