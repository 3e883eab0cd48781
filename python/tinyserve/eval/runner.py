"""`Runner`: a sample through every method. The context is prefilled densely once; from there each method goes
its own way, one token at a time, because only such steps are sparse.

What comes out has been checked: the steps counted by the cache are the ones that were fed, and a budget that
covers everything gives the output of dense attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tinyserve.decode import share_weights
from tinyserve.errors import UsageError
from tinyserve.eval.batch import EvalBatch
from tinyserve.eval.guards import GuardError, check_equal, check_logprobs, check_steps, tolerance_of
from tinyserve.eval.measures import StepMeasures
from tinyserve.eval.methods import Method, full_cache
from tinyserve.eval.prefixes import Prefix, observation_window, prefill
from tinyserve.eval.probes import EvictionProbe, SelectionProbe, StepProbe
from tinyserve.eval.samples import Output, Sample
from tinyserve_ops import SparseConfig
from tinyserve_ops.hf import Handle, enable
from tinyserve_ops.policies import EntropyStop, FullCache, Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tinyserve_ops import PagedKVCache

__all__ = ["Failure", "MethodRun", "Runner"]

MEASURED_STEPS = 64
_CHECKED_TOKENS = 256  # of a sample, against the unpatched model
_CHECKED_STEPS = 8


@dataclass(frozen=True)
class MethodRun:
    """One sample under one method.

    Attributes:
        num_dense: tokens prefilled densely.
        scored_tokens: tokens fed one at a time after them (prompt, continuations, greedy tokens).
        sparse_share: sparse steps per scored token and layer that selects pages: 1.0, None without such
            layers.
        engaged: something was left out: a page not read, or a token evicted.
        kv_bytes_held: bytes of the pages of the sequence at the end of the prompt.
        step_ms: median time of a step, without measuring; None without steps.
        plugin_reports: what each plugin did, by its name.
        steps: measures of the first steps.
        selections: selected pages of the measured steps, as `count_selection` takes them.
    """

    method: Method
    output: Output
    num_dense: int
    scored_tokens: int
    sparse_share: float | None
    engaged: bool
    kv_bytes_held: int
    step_ms: float | None
    plugin_reports: dict[str, dict[str, Any]]
    steps: list[StepMeasures] = field(repr=False)
    selections: list[dict[int, Any]] = field(repr=False)


@dataclass(frozen=True)
class Failure:
    """A method that did not get through a sample."""

    method: Method
    error: Exception


class Runner:
    """Runs samples on one model. A context manager: the model attends through the library inside.

    Args:
        model: a transformers model, not enabled; its weights are shared, the object itself stays as it is.
        tokenizer: decodes the greedy tokens.
        measured_steps: steps of each sample and method that are measured; 0 for none.

    Raises:
        UsageError: the library does not support this model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        measured_steps: int = MEASURED_STEPS,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._measured_steps = measured_steps
        self._end_ids = _end_ids(model, tokenizer)
        self._handles: list[Handle] = []
        self._twin = self._enabled(None)
        self._leaving_twin: PreTrainedModel | None = None

    def _enabled(self, policy: Policy | None) -> PreTrainedModel:
        """A model object over the same weights that attends through the library."""
        twin = share_weights(self.model)
        try:
            self._handles.append(enable(twin, policy=policy))
        except ValueError as error:
            raise UsageError(f"--model: {error}") from error
        return twin

    def _model_of(self, method: Method) -> PreTrainedModel:
        """The model object that a method runs on: tokens can leave only one that is prepared for it."""
        if not method.reads_logits(int(self.model.config.num_hidden_layers)):
            return self._twin
        if self._leaving_twin is None:
            self._leaving_twin = self._enabled(EntropyStop())
        return self._leaving_twin

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.disable()

    @torch.inference_mode()
    def check_dense(self, sample: Sample) -> None:
        """Holds the full cache to the unpatched model, on the first tokens of a sample.

        Raises:
            GuardError: their log-probabilities differ.
        """
        ids = sample.prompt_ids[:_CHECKED_TOKENS]
        num_dense = max(1, len(ids) - _CHECKED_STEPS)
        expected = self.model(torch.tensor([ids])).logits[0, num_dense:].float().log_softmax(-1)
        method = full_cache(SparseConfig())
        prefix = Prefix(self._twin, ids, num_dense, method, window=0, max_tokens=2 * len(ids))
        line = _Line(self._twin, prefix, method, ids, measured_steps=0)
        for token, logprobs in zip(ids[num_dense:], expected, strict=True):
            got = line.feed(line.seq, token).log_softmax(-1)
            best = logprobs.topk(min(8, logprobs.numel())).indices
            check_logprobs(
                "full cache against the unpatched model",
                logprobs[best].tolist(),
                got[best].tolist(),
                tolerance_of(self.model.dtype),
            )

    def run(
        self,
        sample: Sample,
        methods: Sequence[Method],
        *,
        stop: Callable[[list[int]], bool] | None = None,
    ) -> Iterator[MethodRun | Failure]:
        """Yields one result per method: the full cache first, then those of one page format after each other.

        A method that raises becomes a `Failure` and leaves the others alone.

        Args:
            stop: asked after each greedy token, with all of them, whether they are enough.

        Raises:
            GuardError: a result that can't be trusted; it was yielded as a `Failure` before.
        """
        if not methods:
            return
        num_layers = int(self.model.config.num_hidden_layers)
        ordered = _in_order(methods, num_layers)
        room = len(sample.prompt_ids) + sample.max_new_tokens + sum(map(len, sample.continuations))
        try:
            prefix = self._prefill(sample, ordered, 2 * room + 128)
        except Exception as error:
            yield from (Failure(method, error) for method in ordered)
            return
        dense: MethodRun | None = None
        for method in ordered:
            try:
                run = self._run_method(prefix, sample, method, stop)
                if dense is None and isinstance(method.policy, FullCache):
                    dense = run
                elif dense is not None and method.covers(room):
                    self._check_covering(dense, run, num_layers)
            except Exception as error:
                yield Failure(method, error)
                if isinstance(error, GuardError):
                    raise
                continue
            yield run

    @torch.inference_mode()
    def _prefill(self, sample: Sample, methods: Sequence[Method], max_tokens: int) -> Prefix:
        suitable = [m for m in methods if m.eviction is None and m.config.kv_dtype is None]
        base = suitable[0] if suitable else full_cache(methods[0].config.replace(kv_dtype=None))
        windows = [observation_window(m.eviction) or 0 for m in methods if m.eviction is not None]
        return Prefix(
            self._twin,
            sample.prompt_ids,
            sample.num_dense,
            base,
            window=max(windows, default=0),
            max_tokens=max_tokens,
        )

    def _check_covering(self, dense: MethodRun, run: MethodRun, num_layers: int) -> None:
        """Holds a run whose budget covers everything to the full cache, where its pages are exact."""
        page_format = run.method.page_format(num_layers)
        if page_format.is_exact:
            check_equal(
                run.method.label,
                dense.output,
                run.output,
                bit_for_bit=page_format == dense.method.page_format(num_layers),
                tolerance=tolerance_of(self.model.dtype),
            )

    @torch.inference_mode()
    def _run_method(
        self,
        prefix: Prefix,
        sample: Sample,
        method: Method,
        stop: Callable[[list[int]], bool] | None,
    ) -> MethodRun:
        model = self._model_of(method)
        line = _Line(model, prefix, method, sample.prompt_ids, measured_steps=self._measured_steps)
        logits = line.logits
        for token in sample.prompt_ids[line.num_dense :]:
            logits = line.feed(line.seq, token)
        held = _bytes_held(line.kv, line.seq)
        scored = [line.score(logits, continuation) for continuation in sample.continuations]
        token_ids = line.generate(logits, sample.max_new_tokens, self._end_ids, stop)
        share = check_steps(method, line.kv, num_steps=line.num_steps, num_prompt=line.num_dense)
        stats = line.kv.stats()
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""
        return MethodRun(
            method=method,
            output=Output(text, token_ids, [found for found, _ in scored], [best for _, best in scored]),
            num_dense=line.num_dense,
            scored_tokens=line.num_steps,
            sparse_share=share,
            engaged=stats.selection_engaged or stats.tokens_evicted > 0,
            kv_bytes_held=held,
            step_ms=1e3 * statistics.median(line.seconds) if line.seconds else None,
            plugin_reports=line.kv.plugin_reports(),
            steps=line.measures,
            selections=[step.selected_pages for step in line.kv.selection_history()[: len(line.measures)]],
        )


class _Line:
    """A method's own way from where it begins: token by token, timed, the first steps measured.

    Attributes:
        kv, seq: its cache and sequence.
        num_dense: tokens of the prompt that the sequence holds.
        logits: behind them.
        num_steps: tokens fed since.
        seconds: of each step, without measuring.
        measures: of the first steps.
    """

    def __init__(
        self, model: Any, prefix: Prefix, method: Method, prompt_ids: Sequence[int], *, measured_steps: int
    ) -> None:
        config = method.config.replace(record_selection=measured_steps > 0)
        # A full cache beside the policy's would miss the keys of layers that tokens have left.
        num_layers = int(model.config.num_hidden_layers)
        wants_full = measured_steps > 0 and not method.reads_logits(num_layers)
        begin = prefix.begin(method, config, wants_full=wants_full)
        self.kv, self.seq, self.num_dense = begin.kv, begin.seq, begin.num_dense
        self.num_steps = 0
        self.seconds: list[float] = []
        self.measures: list[StepMeasures] = []
        self._batch = EvalBatch(model, self.kv)
        self._measured_steps = measured_steps
        self._probe: StepProbe | None = None
        if begin.full is not None:
            self._probe = EvictionProbe(self.kv, self.seq, begin.full)
        elif measured_steps and method.eviction is None:
            self._probe = SelectionProbe(self.kv)
        self._batch.probe = self._probe
        if begin.num_stored < begin.num_dense:
            self.logits = prefill(self._batch, self.seq, prompt_ids[begin.num_stored : begin.num_dense])
            if begin.num_dense == 1:  # a piece of one token counts as a step
                self.kv.reset_stats()
        else:
            assert begin.logits is not None
            self.logits = begin.logits

    def feed(self, seq: int, token: int) -> torch.Tensor:
        """One step; logits [vocabulary] behind the token."""
        if self.num_steps == self._measured_steps:
            self._batch.probe = self._probe = None
        started, before = time.perf_counter(), self._batch.probe_seconds
        logits = self._batch.feed(seq, [token])
        self.seconds.append(time.perf_counter() - started - (self._batch.probe_seconds - before))
        self.num_steps += 1
        if self._probe is not None:
            self.measures.append(self._probe.finish_step())
        return logits

    def score(self, logits: torch.Tensor, continuation: Sequence[int]) -> tuple[list[float], bool]:
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
                logits = self.feed(fork, token)
        self.kv.free(fork)
        if self._probe is not None:
            self._probe.free(fork)
        return logprobs, is_greedy

    def generate(
        self,
        logits: torch.Tensor,
        max_new_tokens: int,
        end_ids: frozenset[int],
        stop: Callable[[list[int]], bool] | None,
    ) -> list[int]:
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
                logits = self.feed(self.seq, token)
        return token_ids


def _in_order(methods: Sequence[Method], num_layers: int) -> list[Method]:
    """The full cache first, because others are held to it; methods of one page format together."""
    by_policy = sorted(methods, key=lambda method: not isinstance(method.policy, FullCache))
    formats = list(dict.fromkeys(method.page_format(num_layers) for method in by_policy))
    return sorted(by_policy, key=lambda method: formats.index(method.page_format(num_layers)))


def _bytes_held(kv: PagedKVCache, seq: int) -> int:
    return sum(
        kv.page_ids(seq, index).numel() * group.bytes_per_page for index, group in enumerate(kv.pool.groups)
    )


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a text: the model's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)
