"""Windows of exactly so many tokens, cut from documents."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tinyserve.eval.corpora import Document
from tinyserve.haystack import encode_long

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["disjoint_windows", "sliding_windows", "streams"]


def streams(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], num_tokens: int
) -> Iterator[tuple[str, list[int]]]:
    """Title and tokens of each document of at least `num_tokens` tokens; shorter ones are joined, in order,
    with those that follow until they are as long. What is left at the end is dropped.
    """
    title, tokens = "", list[int]()
    for document in documents:
        title = title or document.title
        tokens = tokens + encode_long(tokenizer, document.text.rstrip() + "\n\n")
        if len(tokens) >= num_tokens:
            yield title, tokens
            title, tokens = "", []


def disjoint_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], num_tokens: int, seed: int
) -> Iterator[tuple[str, int, list[int]]]:
    """Title, first token and tokens of windows that do not overlap: one from each stream in random order,
    then another one from each, and so on until there are no more.
    """
    rng = random.Random(f"windows {seed}")
    shuffled = rng.sample(documents, len(documents))
    seen = []
    for title, tokens in streams(tokenizer, shuffled, num_tokens):
        starts = list(range(0, len(tokens) - num_tokens + 1, num_tokens))
        rng.shuffle(starts)
        first = starts.pop()
        yield title, first, tokens[first : first + num_tokens]
        seen.append((title, tokens, starts))
    while seen:
        seen = [stream for stream in seen if stream[2]]
        for title, tokens, starts in seen:
            first = starts.pop()
            yield title, first, tokens[first : first + num_tokens]


def sliding_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    num_tokens: int,
    overlap: int,
    seed: int,
) -> Iterator[tuple[str, int, list[int]]]:
    """The same for windows of which each repeats the last `overlap` tokens of the one before, stream after
    stream; the seed shuffles the documents.
    """
    shuffled = random.Random(f"windows {seed}").sample(documents, len(documents))
    for title, tokens in streams(tokenizer, shuffled, num_tokens):
        for first in range(0, len(tokens) - num_tokens + 1, num_tokens - overlap):
            yield title, first, tokens[first : first + num_tokens]
