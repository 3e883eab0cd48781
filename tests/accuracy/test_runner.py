"""The runner: what every method is fed, that its output is its own, and the guards that stop a wrong run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lab import (
    NUM_LAYERS,
    SMALL,
    VOCABULARY,
    GenerateTask,
    NumberTokenizer,
    ScoreTask,
    only_sample,
    tiny_model,
    tiny_opt,
)

import tinyserve_ops
from tinyserve.errors import UsageError
from tinyserve.eval.batch import EvalBatch
from tinyserve.eval.guards import GuardError
from tinyserve.eval.methods import Method, full_cache
from tinyserve.eval.runner import Failure, MethodRun, Runner
from tinyserve.eval.samples import Output, Sample
from tinyserve_ops import SparseConfig, plugins, policies
from tinyserve_ops.hf.support import cache_argument
from tinyserve_ops.policies import EvictionPolicy, StreamingLLM, TokenRows
from tinyserve_ops.scorers import summary_bytes

FULL = full_cache(SMALL)
SPARSE = Method(config=SMALL)
COVERING = Method(config=SMALL.replace(token_budget=4096))
LOW_RANK = SMALL.replace(scorer="low_rank")
READING_ALL = ("full_cache", "entropy_stop")
EVERY_POLICY = [Method(policy=policies.get(name), config=LOW_RANK) for name in policies.names()]


@pytest.fixture
def model() -> Any:
    return tiny_model()


@pytest.fixture
def runner(model: Any) -> Iterator[Runner]:
    with Runner(model, NumberTokenizer()) as runner:
        yield runner


def run_all(runner: Runner, sample: Sample, *methods: Method) -> dict[Method, MethodRun]:
    runs = {run.method: run for run in runner.run(sample, methods)}
    for run in runs.values():
        assert isinstance(run, MethodRun), run.error
    return runs


def assert_near(got: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=tolerance, rtol=0)


def unpatched_output(model: Any, sample: Sample) -> Output:
    """What the model itself makes of a sample, in whole forwards without any cache."""

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    prompt = list(sample.prompt_ids)
    token_ids: list[int] = []
    for _ in range(sample.max_new_tokens):
        token_ids.append(int(logprobs(prompt + token_ids)[-1].argmax()))
    scored, greedy = [], []
    for continuation in sample.continuations:
        rows = logprobs([*prompt, *continuation])[len(prompt) - 1 : -1]
        scored.append([float(row[token]) for row, token in zip(rows, continuation, strict=True)])
        greedy.append([int(row.argmax()) for row in rows] == list(continuation))
    return Output(" ".join(map(str, token_ids)), token_ids, scored, greedy)


def sparse_logprobs(model: Any, sample: Sample, config: SparseConfig) -> list[list[float]]:
    """The continuations by `enable` and a cache of its own each: prompt dense, then token by token."""
    twin, result = copy.deepcopy(model), []
    name = cache_argument(model)
    with tinyserve_ops.enable(twin, config) as handle, torch.no_grad():
        for continuation in sample.continuations:
            cache = handle.new_cache()
            dense, rest = sample.prompt_ids[: sample.num_dense], sample.prompt_ids[sample.num_dense :]
            twin(torch.tensor([dense]), **{name: cache}, use_cache=True)
            scored = []
            for token, following in zip(
                (*rest, *continuation), (*rest[1:], *continuation, None), strict=True
            ):
                logits = twin(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
                scored.append(None if following is None else float(logits.log_softmax(-1)[following]))
            result.append(scored[len(rest) - 1 : -1])
    return result


@pytest.mark.parametrize("task", [GenerateTask(), ScoreTask()])
@pytest.mark.parametrize("num_tokens", [120, 300])
def test_the_full_cache_gives_what_the_unpatched_model_gives(
    model: Any, runner: Runner, task: Any, num_tokens: int
) -> None:
    sample = only_sample(task, num_tokens)
    output = run_all(runner, sample, FULL)[FULL].output
    expected = unpatched_output(model, sample)
    assert (output.text, output.token_ids, output.greedy) == (
        expected.text,
        expected.token_ids,
        expected.greedy,
    )
    assert_near(output.logprobs, expected.logprobs, 1e-3)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL.replace(scorer="low_rank"),
        SMALL.replace(page_size=4, scorer="mean"),
        SMALL.replace(keep_ratio=0.3),
    ],
)
def test_a_sparse_method_gives_what_enable_gives(model: Any, runner: Runner, config: SparseConfig) -> None:
    """Whichever method's pages the context was prefilled into."""
    sample = only_sample(ScoreTask())
    expected = sparse_logprobs(model, sample, config)
    method = Method(config=config)
    for methods in ((method,), (FULL, method), (COVERING, SPARSE, method)):
        output = run_all(runner, sample, *methods)[method].output
        assert_near(output.logprobs, expected, 1e-4)
    dense = run_all(runner, sample, FULL)[FULL].output
    assert max(abs(a - b) for a, b in zip(dense.logprobs[0], expected[0], strict=True)) > 1e-2


def test_a_budget_that_covers_everything_gives_the_dense_output_bit_for_bit(runner: Runner) -> None:
    for task in (GenerateTask(), ScoreTask()):
        runs = run_all(runner, only_sample(task), FULL, COVERING, SPARSE)
        assert runs[FULL].output == runs[COVERING].output
        assert not runs[COVERING].engaged
        assert runs[SPARSE].engaged


def test_three_ops_in_a_row_give_what_the_fused_one_gives(runner: Runner) -> None:
    fused = tinyserve_ops.ops.sparse_decode
    staged = Method(config=SMALL, staged=True)
    runs = run_all(runner, only_sample(ScoreTask()), SPARSE, staged)
    assert runs[SPARSE].output == runs[staged].output
    assert tinyserve_ops.ops.sparse_decode is fused


@pytest.mark.parametrize("num_dense", [0, 1, 2, 255, 256, 257, 258, 299])
def test_all_tokens_behind_the_dense_ones_are_sparse_steps(runner: Runner, num_dense: int) -> None:
    prompt = only_sample(GenerateTask(), 304).prompt_ids[: num_dense + 5]
    sample = Sample(
        sample_id="x",
        prompt_ids=prompt,
        num_dense=num_dense,
        max_new_tokens=3,
        continuations=((1,), (2, 3, 4, 5)),
    )
    run = run_all(runner, sample, SPARSE)[SPARSE]
    assert run.num_dense == max(num_dense, 1)  # a first token attends to itself in any case
    fed = 5 + num_dense - run.num_dense
    assert run.scored_tokens == fed + 0 + 3 + 2  # the last token of each text is not fed
    assert run.sparse_share == 1.0
    assert len(run.steps) == run.scored_tokens


def test_a_prompt_of_one_token_has_nothing_to_feed_before_what_follows(runner: Runner) -> None:
    sample = Sample(sample_id="x", prompt_ids=(5,), num_dense=0, continuations=((1,),))
    for method, run in run_all(runner, sample, *EVERY_POLICY).items():
        got = (run.num_dense, run.scored_tokens, run.sparse_share, run.attention_ms)
        assert got == (1, 0, None, None), method
    expected = unpatched_output(tiny_model(), sample)
    assert_near(run_all(runner, sample, SPARSE)[SPARSE].output.logprobs, expected.logprobs, 1e-3)


def test_a_method_whose_layers_are_all_dense_has_no_share_of_sparse_steps(runner: Runner) -> None:
    method = Method(config=SMALL.replace(dense_layers=NUM_LAYERS))
    runs = run_all(runner, only_sample(ScoreTask()), FULL, method)
    assert runs[method].sparse_share is None
    assert runs[method].output == runs[FULL].output
    assert runs[method].steps[0].recall is None


def test_decoding_stops_before_an_end_of_text_token(model: Any) -> None:
    sample = only_sample(GenerateTask())
    with Runner(model, NumberTokenizer()) as runner:
        free = run_all(runner, sample, FULL)[FULL].output.token_ids
    end = free[3]
    model.generation_config.eos_token_id = [end, VOCABULARY + 1]
    with Runner(model, NumberTokenizer()) as runner:
        assert run_all(runner, sample, FULL)[FULL].output.token_ids == free[: free.index(end)]


def test_int8_pages_are_a_format_of_their_own_behind_an_exact_prefill(runner: Runner) -> None:
    int8 = Method(config=SMALL.replace(kv_dtype="int8"))
    among = run_all(runner, only_sample(ScoreTask()), FULL, SPARSE, int8)
    assert among[int8].output != among[SPARSE].output
    assert among[int8].kv_bytes_held < 0.5 * among[SPARSE].kv_bytes_held


def test_bytes_held_are_those_of_the_sequence_alone(runner: Runner) -> None:
    sample = only_sample(ScoreTask(), 120)
    wide = Method(config=SMALL.replace(page_size=16, token_budget=96))
    runs = run_all(runner, sample, FULL, SPARSE, wide)
    rows = NUM_LAYERS * 2 * 2 * 16 * 4  # layers, K and V, kv heads, head_dim, bytes
    for method in (FULL, SPARSE, wide):
        num_bytes = summary_bytes("low_rank", 16, method.config.page_size)
        pages = 120 // method.config.page_size + (120 % method.config.page_size > 0)
        kept = pages * (rows * method.config.page_size + NUM_LAYERS * 2 * num_bytes)
        assert runs[method].kv_bytes_held == kept


def test_a_method_that_fails_leaves_the_others_alone(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Method(config=SMALL.replace(max_kv_bytes=1, page_size=4))
    results = list(runner.run(only_sample(ScoreTask()), [SPARSE, bad, FULL]))
    assert [result.method for result in results] == [FULL, SPARSE, bad]
    assert [type(result) for result in results] == [MethodRun, MethodRun, Failure]
    assert "max_kv_bytes" in str(results[2].error)


class _FailingLater(StreamingLLM):
    """Raises in the second layer of the fifth step that asks it."""

    def score(self, rows: TokenRows) -> torch.Tensor:
        if rows.layer_idx == 2:
            type(self).steps += 1
            if type(self).steps == 5:
                raise RuntimeError("the fifth step")
        return super().score(rows)

    steps = 0


def test_a_method_that_fails_in_a_layer_of_a_later_step_leaves_the_others_alone(runner: Runner) -> None:
    sample = only_sample(ScoreTask())
    _FailingLater.steps = 0
    first, failed, last = runner.run(sample, [SPARSE, Method(policy=_FailingLater(), config=SMALL), FULL])
    assert isinstance(failed if isinstance(failed, Failure) else last, Failure)
    runs = [run for run in (first, failed, last) if isinstance(run, MethodRun)]
    assert {run.method for run in runs} == {SPARSE, FULL}
    for run in runs:
        alone = run_all(runner, sample, run.method)[run.method].output
        assert_near(run.output.logprobs, alone.logprobs, 1e-4)


def test_a_model_that_raises_fails_every_method_and_not_the_run(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = only_sample(ScoreTask())
    head = runner._twin.lm_head
    calls = itertools.count()

    def out_of_memory(*_: Any) -> None:
        if next(calls) == 4:  # a step of both, behind the prefill
            raise MemoryError("no room")

    hook = head.register_forward_hook(out_of_memory)
    results = list(runner.run(sample, [FULL, SPARSE]))
    hook.remove()
    assert [type(result) for result in results] == [Failure, Failure]
    assert all("no room" in str(result.error) for result in results)
    run_all(runner, sample, FULL, SPARSE)  # nothing is left of it


@pytest.mark.parametrize("task", [GenerateTask(), ScoreTask()])
def test_the_company_of_other_methods_changes_nothing_but_rounding(runner: Runner, task: Any) -> None:
    sample = only_sample(task)
    for method, run in run_all(runner, sample, *EVERY_POLICY).items():
        alone = run_all(runner, sample, method)[method]
        assert run.output.token_ids == alone.output.token_ids, method
        assert_near(run.output.logprobs, alone.output.logprobs, 1e-4)
        assert (run.num_dense, run.scored_tokens) == (alone.num_dense, alone.scored_tokens)
        assert run.kv_bytes_held == alone.kv_bytes_held
        assert [step.kv_bytes for step in run.steps] == [step.kv_bytes for step in alone.steps]


def test_a_prompt_past_the_positions_of_the_model_fails_in_every_method(runner: Runner) -> None:
    results = list(runner.run(only_sample(ScoreTask(), 600), [FULL, SPARSE]))
    assert [type(result) for result in results] == [Failure, Failure]
    assert "max_position_embeddings" in str(results[0].error)


def test_the_model_itself_stays_as_it_was(model: Any) -> None:
    with Runner(model, NumberTokenizer()) as runner:
        run_all(runner, only_sample(ScoreTask()), SPARSE)
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_is_not_supported_is_refused_by_name() -> None:
    model = tiny_model(head_dim=20)
    with pytest.raises(UsageError, match="--model: head_dim"):
        Runner(model, NumberTokenizer())


# ---- guards ------------------------------------------------------------------------------------------------


def test_a_step_that_was_not_sparse_stops_the_run(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = tinyserve_ops.PagedKVCache.begin
    monkeypatch.setattr(
        tinyserve_ops.PagedKVCache, "begin", lambda self, batch, **kw: begin(self, batch, dense=True)
    )
    results = runner.run(only_sample(ScoreTask()), [SPARSE])
    assert isinstance(next(results), Failure)
    with pytest.raises(GuardError, match=r"expected 24 sparse and 12 dense .* got 0 and 36"):
        next(results)


def test_a_covering_budget_that_differs_from_dense_stops_the_run(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparseConfig, "covers", lambda self, num_tokens: True)
    results = runner.run(only_sample(ScoreTask()), [FULL, SPARSE])
    assert isinstance(next(results), MethodRun)
    assert isinstance(next(results), Failure)
    with pytest.raises(GuardError, match="bit for bit"):
        next(results)


def test_a_full_cache_unlike_the_unpatched_model_stops_the_run(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = only_sample(ScoreTask())
    runner.check_dense(sample)
    feed = EvalBatch.feed
    monkeypatch.setattr(
        EvalBatch,
        "feed",
        lambda self, seq, ids, **more: feed(self, seq, [(token + 1) % VOCABULARY for token in ids], **more),
    )
    with pytest.raises(GuardError, match="against the unpatched model"):
        runner.check_dense(sample)


# ---- policies ----------------------------------------------------------------------------------------------


def by_enable(model: Any, sample: Sample, method: Method) -> list[list[float]]:
    """The first continuation by `enable` with the policy: the prompt whole and dense, then token by token."""
    twin, prompt = copy.deepcopy(model), sample.prompt_ids
    num_dense = sample.num_dense if method.eviction is None else len(prompt) - 1
    name, chosen = cache_argument(model), {"policy": method.policy, "plugins": method.plugins}
    with tinyserve_ops.enable(twin, method.config, **chosen) as handle, torch.no_grad():
        cache = handle.new_cache()
        twin(torch.tensor([prompt[:num_dense]]), **{name: cache}, use_cache=True)
        scored = []
        for token, following in itertools.pairwise((*prompt[num_dense:], *sample.continuations[0])):
            logits = twin(torch.tensor([[token]]), **{name: cache}, use_cache=True).logits[0, -1]
            scored.append(float(logits.log_softmax(-1)[following]))
    return [scored[len(prompt) - num_dense - 1 :]]


def long_question(task: Any, num_tokens: int, num_dense: int) -> Sample:
    """The sample of a task with another dense part, so that a question of some tokens is left."""
    return Sample(**{**vars(only_sample(task, num_tokens)), "num_dense": num_dense})


@pytest.mark.parametrize("method", EVERY_POLICY, ids=policies.names())
@pytest.mark.parametrize(("num_tokens", "num_dense"), [(120, 100), (120, 60), (300, 270), (40, 12)])
def test_every_policy_gives_what_enable_gives(
    model: Any, runner: Runner, method: Method, num_tokens: int, num_dense: int
) -> None:
    sample = long_question(ScoreTask(), num_tokens, num_dense)
    expected = by_enable(model, sample, method)
    for methods in ((method,), (FULL, *EVERY_POLICY)):
        run = run_all(runner, sample, *methods)[method]
        assert_near(run.output.logprobs[:1], expected, 2e-4)
    if num_tokens > 100:
        assert run.engaged == (method.policy.name not in READING_ALL)


@pytest.mark.parametrize("method", EVERY_POLICY, ids=policies.names())
def test_every_policy_is_dense_when_the_budget_covers_everything(runner: Runner, method: Method) -> None:
    has_threshold = method.policy.name in ("soft_prune", "entropy_stop")
    policy = policies.get(method.policy.name, threshold=0.0) if has_threshold else method.policy
    covering = Method(policy=policy, config=LOW_RANK.replace(token_budget=1024))
    sample = long_question(ScoreTask(), 120, 90)
    runs = run_all(runner, sample, FULL, covering)
    assert_near(runs[covering].output.logprobs, runs[FULL].output.logprobs, 1e-3)
    assert not runs[covering].engaged


def test_policies_that_evict_know_the_question_and_hold_fewer_bytes(runner: Runner) -> None:
    sample = long_question(ScoreTask(), 300, 260)
    runs = run_all(runner, sample, *EVERY_POLICY)
    for method, run in runs.items():
        evicts = isinstance(method.policy, EvictionPolicy)
        assert run.num_dense == (299 if evicts else 260)
        # One dense layer of three keeps everything.
        assert (run.kv_bytes_held < 0.6 * runs[EVERY_POLICY[0]].kv_bytes_held) == evicts


WITH_PLUGINS = {
    "early_exit": (plugins.get("early_exit", threshold=4.4, min_layers=1, every=1),),
    "approximate_attention": (plugins.get("approximate_attention", top_p=0.8),),
    "token_pruning": (plugins.get("token_pruning", threshold=0.95, every=4, num_last=8),),
    "all": (
        plugins.get("approximate_attention"),
        plugins.get("token_pruning", threshold=0.95, every=4, num_last=8),
        plugins.get("early_exit", threshold=4.4, min_layers=1, every=1),
    ),
}


@pytest.mark.parametrize("name", WITH_PLUGINS)
def test_plugins_do_what_they_do_with_enable_and_say_so(model: Any, runner: Runner, name: str) -> None:
    method = Method(config=LOW_RANK, plugins=WITH_PLUGINS[name])
    sample = long_question(ScoreTask(), 120, 90)
    expected = by_enable(model, sample, method)
    run = run_all(runner, sample, FULL, method, SPARSE)[method]
    assert_near(run.output.logprobs[:1], expected, 2e-4)
    assert set(run.plugin_reports) == {plugin.name for plugin in method.plugins}
    assert run.sparse_share == 1.0
    if "early_exit" in run.plugin_reports:
        assert run.plugin_reports["early_exit"]["exits"] > 0
    if "token_pruning" in run.plugin_reports:
        assert run.plugin_reports["token_pruning"]["tokens_dropped"] > 0
    if name != "all":  # beside an early exit, evictions can't be measured
        recalls = [step.recall for step in run.steps if step.recall is not None]  # none where all were left
        assert recalls
        assert all(0 < recall <= 1 + 1e-4 for recall in recalls)


def test_a_plugin_that_is_off_changes_nothing(runner: Runner) -> None:
    off = tuple(plugins.get(name, enabled=False) for name in plugins.names())
    method = Method(config=LOW_RANK, plugins=off)
    plain = Method(config=LOW_RANK)
    runs = run_all(runner, long_question(ScoreTask(), 120, 90), plain, method)
    assert runs[method].output == runs[plain].output
    assert runs[method].plugin_reports == {}


def test_early_exit_of_a_model_that_tokens_can_not_leave_fails_by_name() -> None:
    method = Method(policy=policies.get("entropy_stop"), config=SMALL)
    with Runner(tiny_opt(), NumberTokenizer()) as runner:
        full, failed = runner.run(only_sample(ScoreTask()), [FULL, method])
    assert isinstance(full, MethodRun)
    assert isinstance(failed, Failure)
    assert "with early exit" in str(failed.error)


def test_a_policy_that_does_not_evict_stops_the_run(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyserve_ops.policies.SnapKV.budget", lambda *arguments: 10_000)
    method = Method(policy=policies.get("snapkv"), config=SMALL)
    results = runner.run(only_sample(ScoreTask()), [method])
    assert isinstance(next(results), Failure)
    with pytest.raises(GuardError, match="expected evictions from a prompt of 119 tokens, got none"):
        next(results)
