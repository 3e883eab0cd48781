"""`Sample`, `Output` and `Task`: all that a task and the runner know of each other.

Only single-token steps are sparse, so a sample says how much of its prompt is context (prefilled densely);
everything behind it goes through the model one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Output", "Sample", "Task"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt, and what is asked of the model behind it.

    Attributes:
        sample_id: unique within its task, and the same for the same arguments of `Task.samples`.
        prompt_ids: token ids of the whole prompt, at least one.
        num_dense: that many first tokens are prefilled densely; the rest of the prompt, at least its last
            token, goes one token at a time.
        max_new_tokens: greedy tokens after the prompt; 0 for none. Decoding ends before an end-of-text token.
        continuations: token ids whose probabilities are asked for, each fed one token at a time from a fork
            of the prompt.
        references: right answers, as text.
        details: more about it, for the score and the tables (depth, filler, subject); JSON values.

    Raises:
        ValueError: an empty prompt or continuation, or a `num_dense` that leaves no token of the prompt.
    """

    sample_id: str
    prompt_ids: tuple[int, ...]
    num_dense: int
    max_new_tokens: int = 0
    continuations: tuple[tuple[int, ...], ...] = ()
    references: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt_ids: expected at least one token, got none")
        if not 0 <= self.num_dense < len(self.prompt_ids):
            raise ValueError(
                f"num_dense: expected 0 to {len(self.prompt_ids) - 1}, one less than the prompt has tokens, "
                f"got {self.num_dense}"
            )
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: expected an integer >= 0, got {self.max_new_tokens}")
        if not all(self.continuations):
            raise ValueError("continuations: expected at least one token in each, got an empty one")


@dataclass(frozen=True)
class Output:
    """What the model made of a sample.

    Attributes:
        text: the greedy tokens as text, special tokens left out.
        token_ids: the greedy tokens, without the end-of-text token.
        logprobs: natural logarithms, per continuation and token.
        greedy: per continuation, whether every token of it was the most probable one.
    """

    text: str
    token_ids: list[int]
    logprobs: list[list[float]]
    greedy: list[bool]


class Task(Protocol):
    """A set of samples and how their outputs are scored: one file in `eval/tasks/`.

    A task may also have `compare(dense, scores)`: numbers about a method beside the full cache, from the
    scores of the same samples under both.

    Attributes:
        name: on the command line and in results.
        metric: the headline metric, a key of `summary`.
    """

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> str: ...

    def samples(self, tokenizer: Any, *, num_samples: int, num_tokens: int, seed: int) -> Iterator[Sample]:
        """Yields up to `num_samples` samples with prompts of at most `num_tokens` tokens; the same arguments
        give the same samples.
        """
        ...

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        """Numbers about one sample."""
        ...

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        """Numbers about all samples, from what `score` returned for each: means, exp(mean nll) and so on."""
        ...
