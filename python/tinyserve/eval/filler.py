"""Text that carries no answer: the same few sentences again and again, or an excerpt of natural text.

Repeated sentences make pages alike, which is hard for scores that bound a page; natural text has pages that
draw attention away.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tinyserve.eval.corpora import Document
from tinyserve.haystack import encode
from tinyserve.texts import blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["natural", "repeated"]

_LINE = "The river is wide. The hills are green. The road is long. We walk and rest. The day goes by.\n"


def repeated(tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """One line of five short sentences, without end."""
    return itertools.repeat(encode(tokenizer, _LINE))


def natural(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], rng: random.Random
) -> Iterator[list[int]]:
    """Paragraphs from a random place in the first half of a random document, and on through the next ones."""
    first = rng.randrange(len(documents))
    for document in [*documents[first:], *documents[:first]]:
        paragraphs = blocks(document.text)
        start = rng.randrange(max(1, len(paragraphs) // 2)) if document is documents[first] else 0
        for paragraph in paragraphs[start:]:
            yield encode(tokenizer, paragraph + "\n\n")
