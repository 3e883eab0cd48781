"""Prompts of an exact length with hidden pieces: where they lie, and what does not fit."""

from __future__ import annotations

import made_up_texts as made
import pytest

from tinyserve.errors import UsageError
from tinyserve.haystack import MARK, around, build_haystack, encode, encode_long, hide, start_ids, take


def test_hidden_pieces_lie_between_pieces_nearest_to_their_depths() -> None:
    pieces = [[1] * 10, [2] * 10, [3] * 10]
    hidden = [[7, 7], [8], [9, 9, 9]]
    token_ids, spans = hide(pieces, hidden, [1.0, 0.3, 0.36])
    # 0.3 and 0.36 of 30 tokens are nearest to the gap at 10; 1.0 is the end. Equal gaps keep the given order.
    assert token_ids == [1] * 10 + [8, 9, 9, 9] + [2] * 10 + [3] * 10 + [7, 7]
    assert spans == [(34, 36), (10, 11), (11, 14)]
    assert [token_ids[start:end] for start, end in spans] == hidden


def test_the_last_piece_is_cut_to_fit() -> None:
    assert take([[1, 2, 3], [4, 5, 6]], 4) == [[1, 2, 3], [4]]
    assert take([[1, 2, 3]], 3) == [[1, 2, 3]]
    assert take([[1]], 5) == [[1]]


def test_a_prompt_is_head_filler_and_tail_of_exactly_the_asked_length() -> None:
    hay = build_haystack([0], [5, 6], [[1, 1]] * 50, [[9]], [0.5], num_tokens=24)
    assert len(hay.token_ids) == 24
    assert hay.token_ids[0] == 0
    assert hay.token_ids[-2:] == [5, 6]
    assert hay.num_context == 22
    ((start, end),) = hay.spans
    assert hay.token_ids[start:end] == [9]
    assert hay.token_ids.count(1) == 20


def test_too_short_a_prompt_and_too_short_a_text_are_refused_with_the_number() -> None:
    with pytest.raises(UsageError, match=r"--size: expected at least 5 tokens .*, got 4"):
        build_haystack([0], [5, 6], [[1]], [[9]], [0.5], num_tokens=4, option="--size")
    with pytest.raises(UsageError, match="num_tokens: the text has only 2 tokens, 6 are needed"):
        build_haystack([0], [5, 6], [[1, 1]], [[9]], [0.5], num_tokens=10)


def test_plain_prompts_begin_with_what_the_model_expects_and_chat_prompts_with_their_template() -> None:
    message = f"Remember.\n\n{MARK}\n\nWhat?"
    for kind, head, tail in (
        ("plain", "Remember.\n\n", "\n\nWhat? It is"),
        ("bos", "<s>Remember.\n\n", "\n\nWhat? It is"),
        ("chat", "<user>Remember.\n\n", "\n\nWhat?</user><assistant>It is"),
    ):
        tokenizer = made.tokenizer(kind)
        assert tuple(map(tokenizer.decode, around(tokenizer, message, "It is"))) == (head, tail)
    tokenizer = made.tokenizer("chat")
    head, tail = around(tokenizer, message, "It is", chat=False, joint="\n")
    assert (tokenizer.decode(head), tokenizer.decode(tail)) == ("Remember.\n\n", "\n\nWhat?\nIt is")


def test_only_a_bos_token_counts_as_the_start() -> None:
    assert start_ids(made.tokenizer("plain")) == []
    assert start_ids(made.tokenizer("bos")) == [0]
    assert encode(made.tokenizer("bos"), "x") == encode(made.tokenizer("plain"), "x")


def test_a_long_text_is_encoded_line_by_line_without_loss() -> None:
    tokenizer = made.tokenizer("plain")
    text = made.text(5, 3) + "\r\nodd\x0bline\n\n\nend"
    assert tokenizer.decode(encode_long(tokenizer, text)) == text
