"""How answers are scored: the measures of SQuAD, LongBench and RULER, from their definitions.

All return a share from 0 to 1. LongBench's scorer is that of its repository (THUDM/LongBench, metrics.py): F1
over normalised words, and the ROUGE-L of the package `rouge` 1.0.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

__all__ = ["best", "contained", "exact_match", "means", "normalize", "rouge_l", "word_f1"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces (SQuAD's rule)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 where both are the same after `normalize`."""
    return float(normalize(prediction) == normalize(reference))


def word_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the bags of normalised words."""
    ours, theirs = normalize(prediction).split(), normalize(reference).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L as LongBench reports it: the summary-level F-measure of the package `rouge`, over distinct
    words.

    Sentences end at full stops. The longest common subsequences of every pair of a reference sentence and a
    predicted one are united; the share of the reference's and of the prediction's distinct words in that
    union are recall and precision.
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    union = {word for right in theirs for answer in ours for word in _common_subsequence(right, answer)}
    recall = len(union) / len({word for sentence in theirs for word in sentence})
    precision = len(union) / len({word for sentence in ours for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def contained(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, whatever their case (RULER's "all" rule)."""
    lower = prediction.lower()
    return sum(reference.lower() in lower for reference in references) / len(references)


def best(measure: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    """The measure against the reference that suits the prediction best."""
    return max(measure(prediction, reference) for reference in references)


def means(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every number over the samples.

    Raises:
        ValueError: no samples, or samples with different numbers.
    """
    if not scores or any(score.keys() != scores[0].keys() for score in scores):
        raise ValueError(f"scores: expected one or more with the same names, got {len(scores)}")
    return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}


def _sentences(text: str) -> list[list[str]]:
    # A part of spaces alone counts as one empty word, as it does in the package.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several, the one that the package's walk finds: from the ends, a step
    back in `left` only where that keeps more than a step back in `right`.
    """
    lengths = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, word in enumerate(left, 1):
        for j, other in enumerate(right, 1):
            same = lengths[i - 1][j - 1] + 1
            lengths[i][j] = same if word == other else max(lengths[i - 1][j], lengths[i][j - 1])
    found = []
    i, j = len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            found.append(left[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
