"""`Line`: a method's own way through a sample, from the context that all share.

It asks for one token after the other and is given the logits behind each, so that whoever drives several
lines can take their steps together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from tinyserve.eval.batch import EvalBatch
from tinyserve.eval.measures import StepMeasures
from tinyserve.eval.methods import Method
from tinyserve.eval.prefixes import Prefix, prefill
from tinyserve.eval.probes import EvictionProbe, SelectionProbe, StepProbe
from tinyserve.eval.samples import Output, Sample

__all__ = ["Line", "Steps"]

# Yields (sequence, token to append) and is sent the logits [vocabulary] behind it.
Steps = Generator[tuple[int, int], torch.Tensor, Output]


class Line:
    """Token by token from where a method begins; attention is timed, the first steps are measured.

    Attributes:
        method: whose way it is.
        batch: its forwards.
        kv, seq: its cache and sequence.
        num_dense: tokens of the prompt that the sequence holds.
        num_steps: tokens fed since.
        bytes_held: of the pages of the sequence at the end of the prompt; None before.
        attention_seconds: of each step.
        measures: of the first steps.
    """

    def __init__(
        self,
        model: Any,
        prefix: Prefix,
        method: Method,
        prompt_ids: Sequence[int],
        *,
        measured_steps: int,
    ) -> None:
        config = method.config.replace(record_selection=measured_steps > 0)
        # A full cache beside the policy's would miss the keys of layers that tokens have left.
        num_layers = int(model.config.num_hidden_layers)
        wants_full = measured_steps > 0 and not method.reads_logits(num_layers)
        begin = prefix.begin(method, config, wants_full=wants_full)
        self.method = method
        self.kv, self.seq, self.num_dense = begin.kv, begin.seq, begin.num_dense
        self.num_steps = 0
        self.bytes_held: int | None = None
        self.attention_seconds: list[float] = []
        self.measures: list[StepMeasures] = []
        self.batch = EvalBatch(model, self.kv)
        self._measured_steps = measured_steps
        self._probe: StepProbe | None = None
        if begin.full is not None:
            self._probe = EvictionProbe(self.kv, self.seq, begin.full)
        elif measured_steps and method.eviction is None:
            self._probe = SelectionProbe(self.kv)
        self.batch.probe = self._probe
        if begin.num_stored < begin.num_dense:
            self._logits = prefill(self.batch, self.seq, prompt_ids[begin.num_stored : begin.num_dense])
            if begin.num_dense == 1:  # a piece of one token counts as a step
                self.kv.reset_stats()
        else:
            assert begin.logits is not None
            self._logits = begin.logits
        self._prompt_ids = prompt_ids

    def steps(
        self, sample: Sample, end_ids: frozenset[int], stop: Callable[[list[int]], bool] | None
    ) -> Steps:
        """What is left of the prompt, the continuations, the greedy tokens; returns the output, without its
        text.
        """
        logits = self._logits
        for token in self._prompt_ids[self.num_dense :]:
            logits = yield from self._feed(self.seq, token)
        self.bytes_held = sum(
            self.kv.page_ids(self.seq, index).numel() * group.bytes_per_page
            for index, group in enumerate(self.kv.pool.groups)
        )
        logprobs, greedy = [], []
        for continuation in sample.continuations:
            found, is_greedy = yield from self._score(logits, continuation)
            logprobs.append(found)
            greedy.append(is_greedy)
        token_ids = yield from self._generate(logits, sample.max_new_tokens, end_ids, stop)
        return Output("", token_ids, logprobs, greedy)

    def _feed(self, seq: int, token: int) -> Generator[tuple[int, int], torch.Tensor, torch.Tensor]:
        """One step; logits [vocabulary] behind the token."""
        if self.num_steps == self._measured_steps:
            self.batch.probe = self._probe = None
        before = self.batch.attention_seconds
        logits = yield seq, token
        self.attention_seconds.append(self.batch.attention_seconds - before)
        self.num_steps += 1
        if self._probe is not None:
            self.measures.append(self._probe.finish_step())
        return logits

    def _score(
        self, logits: torch.Tensor, continuation: Sequence[int]
    ) -> Generator[tuple[int, int], torch.Tensor, tuple[list[float], bool]]:
        """Log-probability of each token after the prompt, and whether each was the most probable one.

        Args:
            logits: behind the prompt.
        """
        fork = self.kv.fork(self.seq)
        if self._probe is not None:
            self._probe.fork(self.seq, fork)
        logprobs, is_greedy = [], True
        for position, token in enumerate(continuation):
            logprobs.append(float(logits.log_softmax(-1)[token]))
            is_greedy = is_greedy and int(logits.argmax()) == token
            if position + 1 < len(continuation):
                logits = yield from self._feed(fork, token)
        self.kv.free(fork)
        if self._probe is not None:
            self._probe.free(fork)
        return logprobs, is_greedy

    def _generate(
        self,
        logits: torch.Tensor,
        max_new_tokens: int,
        end_ids: frozenset[int],
        stop: Callable[[list[int]], bool] | None,
    ) -> Generator[tuple[int, int], torch.Tensor, list[int]]:
        """Greedy tokens after the prompt, up to an end-of-text token or to where `stop` has enough."""
        token_ids: list[int] = []
        while len(token_ids) < max_new_tokens:
            token = int(logits.argmax())
            if token in end_ids:
                break
            token_ids.append(token)
            if stop is not None and stop(token_ids):
                break
            if len(token_ids) < max_new_tokens:
                logits = yield from self._feed(self.seq, token)
        return token_ids
