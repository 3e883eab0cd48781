"""Scores of answers, against values worked out by hand."""

from __future__ import annotations

import pytest

from tinyserve.eval.metrics import best, contained, exact_match, means, normalize, rouge_l, word_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, and a DOG!", "cat and dog"),
        ("theatre an-other Anna", "theatre another anna"),
        ("“Über” it's", "“über” its"),  # only ASCII punctuation goes
        ("The a an", ""),
        ("", ""),
    ],
)
def test_answers_are_compared_without_case_punctuation_and_articles(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "f1", "exact"),
    [
        ("the cat sat", "A cat sat.", 1.0, 1.0),
        ("a cat sat down", "the cat ran", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2), 0.0),
        ("yes yes yes", "yes", 2 * (1 / 3) * 1 / (1 / 3 + 1), 0.0),
        ("cat cat dog", "cat cat bird dog", 2 * 1 * (3 / 4) / (1 + 3 / 4), 0.0),
        ("", "cat", 0.0, 0.0),
        ("the", "a", 0.0, 1.0),  # both are empty without articles
    ],
)
def test_f1_counts_shared_words_as_often_as_both_have_them(
    prediction: str, reference: str, f1: float, exact: float
) -> None:
    assert word_f1(prediction, reference) == pytest.approx(f1)
    assert exact_match(prediction, reference) == exact


@pytest.mark.parametrize(
    ("prediction", "reference", "recall", "precision"),
    [
        # "police the gunman" is common: 3 of 4 distinct words on each side.
        ("police killed the gunman", "police kill the gunman", 3 / 4, 3 / 4),
        # Out of order: "the gunman" is the longest.
        ("the gunman police killed", "police kill the gunman", 2 / 4, 2 / 4),
        # Sentence by sentence: "the cat", "it" | "the", "it sat": {the, cat, it, sat} of 7 words, and of 5.
        ("the cat sat. it ran", "the cat ran. it sat on the mat", 4 / 7, 4 / 5),
        # Words count once, however often they stand.
        ("a a a b", "a b", 1.0, 1.0),
        ("same words", "same words.", 1.0, 1.0),
    ],
)
def test_rouge_l_unites_common_subsequences_of_sentences(
    prediction: str, reference: str, recall: float, precision: float
) -> None:
    expected = 2 * precision * recall / (precision + recall)
    assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("prediction", "reference"), [("", "x"), ("x", ""), (".", "x"), ("x", "y")])
def test_rouge_l_of_nothing_in_common_is_zero(prediction: str, reference: str) -> None:
    assert rouge_l(prediction, reference) == 0.0


# Computed with the package rouge 1.0.1, LongBench's scorer: get_scores(..., avg=True)["rouge-l"]["f"].
@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the cat sat. it ran", "the cat ran. it sat on the mat", 0.6666666618055556),
        ("police killed the gunman", "police kill the gunman", 0.749999995),
        ("a b c d. e f", "a c. b d f", 0.9090909041322315),
    ],
)
def test_rouge_l_is_that_of_the_package_to_the_last_digit(
    prediction: str, reference: str, expected: float
) -> None:
    assert rouge_l(prediction, reference) == expected


def test_containment_ignores_case_and_counts_shares() -> None:
    assert contained("Both 12345 and BLUE whale", ["12345", "blue", "red", "45 and"]) == 0.75
    assert contained("", ["x"]) == 0.0


def test_the_best_reference_counts() -> None:
    assert best(word_f1, "two", ["one", "one two", "two"]) == 1.0
    assert best(word_f1, "two", ["one", "one two"]) == pytest.approx(2 / 3)


def test_means_are_taken_name_by_name_and_refuse_gaps() -> None:
    assert means([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.5}]) == {"a": 0.5, "b": 0.25}
    with pytest.raises(ValueError, match="scores: expected one or more with the same names, got 2"):
        means([{"a": 1.0}, {"b": 1.0}])
