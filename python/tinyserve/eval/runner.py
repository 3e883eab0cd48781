"""`Runner`: a sample through every method. The context is prefilled densely once; from there each method goes
its own way, one token at a time, because only such steps are sparse; methods take their steps together.

What comes out has been checked: the steps counted by the cache are the ones that were fed, and a budget that
covers everything gives the output of dense attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from tinyserve.decode import share_weights
from tinyserve.errors import UsageError
from tinyserve.eval.batch import EvalBatch
from tinyserve.eval.guards import GuardError, check_equal, check_logprobs, check_steps, tolerance_of
from tinyserve.eval.joint import JointBatch
from tinyserve.eval.line import Line, Steps
from tinyserve.eval.measures import StepMeasures
from tinyserve.eval.methods import Method, full_cache
from tinyserve.eval.prefixes import Prefix, observation_window
from tinyserve.eval.samples import Output, Sample
from tinyserve_ops import SparseConfig
from tinyserve_ops.hf import Handle, enable
from tinyserve_ops.policies import EntropyStop, FullCache, Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Failure", "MethodRun", "Runner"]

MEASURED_STEPS = 64
_CHECKED_TOKENS = 256  # of a sample, against the unpatched model
_CHECKED_STEPS = 8
_MOST_FORMATS = 4  # page formats whose copies of the context are held at once


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
        attention_ms: median time that a step spends in attention, all layers; None without steps.
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
    attention_ms: float | None
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
        begin = prefix.begin(method, method.config, wants_full=False)
        batch = EvalBatch(self._twin, begin.kv)
        for token, logprobs in zip(ids[num_dense:], expected, strict=True):
            got = batch.feed(begin.seq, [token]).log_softmax(-1)
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
        for together in self._groups(ordered, room, num_layers):
            for result in self._run_together(prefix, sample, together, stop):
                checked = result
                if isinstance(result, MethodRun) and isinstance(result.method.policy, FullCache):
                    dense = dense or result
                elif isinstance(result, MethodRun) and dense is not None and result.method.covers(room):
                    checked = self._held_to(dense, result, num_layers)
                yield checked
                if isinstance(checked, Failure) and isinstance(checked.error, GuardError):
                    raise checked.error

    def _groups(self, ordered: Sequence[Method], room: int, num_layers: int) -> list[list[Method]]:
        """Methods that take their steps together; the full cache is in the first group.

        A product of matrices with another number of rows may round otherwise, so what is compared bit for bit
        (the full cache, where other methods must give the same) goes alone. So does what may leave the model
        early. Each page format of a group holds a copy of the context.
        """
        covering = [m for m in ordered if m.covers(room)]
        alone = [m for m in ordered if m.reads_logits(num_layers) or (m in covering and len(covering) > 1)]
        joint = [m for m in ordered if m not in alone]
        formats = list(dict.fromkeys(method.page_format(num_layers) for method in joint))
        groups = [[method] for method in alone]
        for start in range(0, len(formats), _MOST_FORMATS):
            chosen = formats[start : start + _MOST_FORMATS]
            groups.append([m for m in joint if m.page_format(num_layers) in chosen])
        return sorted(groups, key=lambda group: not isinstance(group[0].policy, FullCache))

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

    def _held_to(self, dense: MethodRun, run: MethodRun, num_layers: int) -> MethodRun | Failure:
        """A run whose budget covers everything, unless it differs from the full cache where its pages are
        exact.
        """
        page_format = run.method.page_format(num_layers)
        if page_format.is_exact:
            try:
                check_equal(
                    run.method.label,
                    dense.output,
                    run.output,
                    bit_for_bit=page_format == dense.method.page_format(num_layers),
                    tolerance=tolerance_of(self.model.dtype),
                )
            except GuardError as error:
                return Failure(run.method, error)
        return run

    @torch.inference_mode()
    def _run_together(
        self,
        prefix: Prefix,
        sample: Sample,
        methods: Sequence[Method],
        stop: Callable[[list[int]], bool] | None,
    ) -> list[MethodRun | Failure]:
        """One result per method, of steps taken together."""
        try:
            model = self._model_of(methods[0])
        except UsageError as error:
            return [Failure(method, error) for method in methods]
        results: dict[Method, MethodRun | Failure] = {}
        lines: list[tuple[Line, Steps]] = []
        for method in methods:
            try:
                line = Line(model, prefix, method, sample.prompt_ids, measured_steps=self._measured_steps)
                lines.append((line, line.steps(sample, self._end_ids, stop)))
            except Exception as error:
                results[method] = Failure(method, error)
        prefix.forget_copies()
        for line, outcome in _drive(model, lines):
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                results[line.method] = self._finish(line, outcome)
            except Exception as error:
                results[line.method] = Failure(line.method, error)
        return [results[method] for method in methods]

    def _finish(self, line: Line, output: Output) -> MethodRun:
        method = line.method
        share = check_steps(method, line.kv, num_steps=line.num_steps, num_prompt=line.num_dense)
        stats = line.kv.stats()
        ids = output.token_ids
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
        seconds = line.attention_seconds
        return MethodRun(
            method=method,
            output=replace(output, text=text),
            num_dense=line.num_dense,
            scored_tokens=line.num_steps,
            sparse_share=share,
            engaged=stats.selection_engaged or stats.tokens_evicted > 0,
            kv_bytes_held=line.bytes_held or 0,
            attention_ms=1e3 * statistics.median(seconds) if seconds else None,
            plugin_reports=line.kv.plugin_reports(),
            steps=line.measures,
            selections=[step.selected_pages for step in line.kv.selection_history()[: len(line.measures)]],
        )


def _drive(
    model: PreTrainedModel, lines: Sequence[tuple[Line, Steps]]
) -> Iterator[tuple[Line, Output | Exception]]:
    """Takes the steps of all lines together; yields each with what came out of it, as it ends."""
    waiting: list[tuple[Line, Steps, torch.Tensor | Exception | None]] = [(*line, None) for line in lines]
    if not waiting:
        return
    joint = JointBatch(model, lines[0][0].batch)
    while waiting:
        asked: list[tuple[Line, Steps, tuple[int, int]]] = []
        for line, steps, logits in waiting:
            try:
                if isinstance(logits, Exception):
                    raise logits
                asked.append((line, steps, next(steps) if logits is None else steps.send(logits)))
            except StopIteration as end:
                yield line, end.value
            except Exception as error:
                yield line, error
        answers = joint.step([(line.batch, *request) for line, _, request in asked])
        waiting = [(line, steps, answer) for (line, steps, _), answer in zip(asked, answers, strict=True)]


def _in_order(methods: Sequence[Method], num_layers: int) -> list[Method]:
    """The full cache first, because others are held to it; methods of one page format together."""
    by_policy = sorted(methods, key=lambda method: not isinstance(method.policy, FullCache))
    formats = list(dict.fromkeys(method.page_format(num_layers) for method in by_policy))
    return sorted(by_policy, key=lambda method: formats.index(method.page_format(num_layers)))


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a text: the model's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)
