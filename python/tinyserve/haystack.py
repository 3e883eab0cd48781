"""Prompts of an exact number of tokens: instruction, filler with sentences hidden in it, question.

Pieces of text are tokenized one by one and joined as token ids. So the place of a piece never changes its
tokens, lengths add up exactly, and the positions of what was hidden are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyserve.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\u241f"  # stands for the long text while a prompt is written down; no text contains it


@dataclass(frozen=True)
class Haystack:
    """Token ids of a whole prompt.

    Attributes:
        num_context: tokens before the question: instruction and filler.
        spans: token positions [start, end) of each hidden sentence, in the order they were given.
    """

    token_ids: list[int]
    num_context: int
    spans: list[tuple[int, int]]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the text alone, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_long(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The same for a text of any length, line by line: tokenizers warn of texts that exceed the model."""
    return [token for line in text.splitlines(keepends=True) for token in encode(tokenizer, line)]


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the model expects before plain text: a BOS token, or nothing."""
    ids = list(tokenizer.encode(""))
    return ids[:1] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else []


def around(
    tokenizer: PreTrainedTokenizerBase,
    message: str,
    answer_start: str,
    *,
    chat: bool = True,
    joint: str = " ",
) -> tuple[list[int], list[int]]:
    """Token ids before and after the long text.

    Args:
        message: instruction and question, with `MARK` where the long text goes.
        answer_start: the first words of the answer, which the model continues.
        chat: use the tokenizer's chat template if it has one; otherwise the message is plain text.
        joint: what stands between a plain message and `answer_start`.
    """
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": message}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head, tail = str(rendered).split(MARK)
        return encode(tokenizer, head), encode(tokenizer, tail + answer_start)
    head, tail = message.split(MARK)
    return start_ids(tokenizer) + encode(tokenizer, head), encode(tokenizer, tail + joint + answer_start)


def room(
    head: Sequence[int], tail: Sequence[int], hidden: Sequence[Sequence[int]], num_tokens: int, option: str
) -> int:
    """Tokens of filler in a prompt of `num_tokens`.

    Args:
        option: name of the length in the error message.

    Raises:
        UsageError: there is none.
    """
    left = num_tokens - len(head) - len(tail) - sum(map(len, hidden))
    if left < 1:
        raise UsageError(
            f"{option}: expected at least {num_tokens - left + 1} tokens for instruction and question, "
            f"got {num_tokens}"
        )
    return left


def take(pieces: Iterable[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The first pieces, `num_tokens` tokens in all, the last one cut to fit; fewer where the pieces end."""
    taken: list[list[int]] = []
    missing = num_tokens
    for piece in pieces:
        taken.append(list(piece[:missing]))
        missing -= len(taken[-1])
        if missing == 0:
            break
    return taken


def hide(
    pieces: Sequence[Sequence[int]], hidden: Sequence[Sequence[int]], depths: Sequence[float]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Joins the pieces with each hidden one between the two of them that are nearest to its depth.

    Args:
        depths: one for each hidden piece, 0 (before all others) to 1 (after them), in tokens of the filler.

    Returns:
        The token ids, and [start, end) of each hidden piece in them.
    """
    gaps = [0]
    for piece in pieces:
        gaps.append(gaps[-1] + len(piece))
    hay = [token for piece in pieces for token in piece]
    places = [min(gaps, key=lambda position: abs(position - depth * len(hay))) for depth in depths]
    token_ids: list[int] = []
    spans = [(0, 0)] * len(hidden)
    done = 0
    for idx in sorted(range(len(hidden)), key=places.__getitem__):
        token_ids += hay[done : places[idx]]
        done = places[idx]
        spans[idx] = (len(token_ids), len(token_ids) + len(hidden[idx]))
        token_ids += hidden[idx]
    return token_ids + hay[done:], spans


def build_haystack(
    head: Sequence[int],
    tail: Sequence[int],
    pieces: Iterable[Sequence[int]],
    hidden: Sequence[Sequence[int]],
    depths: Sequence[float],
    *,
    num_tokens: int,
    option: str = "num_tokens",
) -> Haystack:
    """`head`, filler with the hidden pieces in it, `tail`: exactly `num_tokens` tokens.

    Raises:
        UsageError: no room for filler, or not enough of it.
    """
    needed = room(head, tail, hidden, num_tokens, option)
    filler = take(pieces, needed)
    have = sum(map(len, filler))
    if have < needed:
        raise UsageError(f"{option}: the text has only {have} tokens, {needed} are needed")
    middle, spans = hide(filler, hidden, depths)
    token_ids = [*head, *middle, *tail]
    assert len(token_ids) == num_tokens
    start = len(head)
    return Haystack(token_ids, num_tokens - len(tail), [(start + a, start + b) for a, b in spans])
