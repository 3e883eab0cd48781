"""Recall, hit rate and reuse against attention probabilities that transformers itself computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab import NUM_LAYERS, SMALL, NumberTokenizer, ScoreTask, only_sample, tiny_mistral, tiny_model

import tinyserve_ops
from tinyserve.eval.measures import StepMeasures, mass_of_best, mean_measures
from tinyserve.eval.methods import Method
from tinyserve.eval.runner import MethodRun, Runner
from tinyserve_ops import policies
from tinyserve_ops.hf.support import cache_argument
from tinyserve_ops.scorers import summary_bytes

PAGE = SMALL.page_size
# Only the last layer selects, so its first query is the one of dense attention.
LAST_LAYER = Method(config=SMALL.replace(dense_layers=NUM_LAYERS - 1))
NUM_TOKENS = 120


def run_of(method: Method, measured_steps: int = 64) -> MethodRun:
    with Runner(tiny_model(), NumberTokenizer(), measured_steps=measured_steps) as runner:
        (run,) = runner.run(only_sample(ScoreTask(), NUM_TOKENS), [method])
    assert isinstance(run, MethodRun)
    return run


def true_token_mass() -> np.ndarray:
    """Attention to every token of the first step's token in the last layer, [num_kv_heads, tokens]."""
    model = tiny_model(attn_implementation="eager")
    ids = only_sample(ScoreTask(), NUM_TOKENS).prompt_ids
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions[-1]
    return attentions[0, :, -1].double().unflatten(0, (2, 2)).mean(1).numpy()


def true_page_mass() -> np.ndarray:
    """The same of every page, [num_kv_heads, pages]."""
    return true_token_mass().reshape(2, -1, PAGE).sum(2)


def test_recall_and_hit_rate_agree_with_the_attention_of_the_unpatched_model() -> None:
    run = run_of(LAST_LAYER)
    mass = true_page_mass()
    recall, ceiling, hits = [], [], []
    for head, pages in enumerate(run.selections[0][NUM_LAYERS - 1][0].tolist()):
        selected = {page for page in pages if page >= 0}
        best = set(np.argsort(-mass[head])[: len(selected)].tolist())
        recall.append(sum(mass[head][page] for page in selected))
        ceiling.append(sum(mass[head][page] for page in best))
        hits.append(len(best & selected) / len(selected))
    assert run.steps[0].recall == pytest.approx(np.mean(recall), abs=1e-5)
    assert run.steps[0].oracle_recall == pytest.approx(np.mean(ceiling), abs=1e-5)
    assert run.steps[0].hit_rate == pytest.approx(np.mean(hits))
    assert 0.1 < np.mean(recall) < np.mean(ceiling) < 0.999


def test_reuse_compares_with_the_step_before_of_the_same_text() -> None:
    run = run_of(LAST_LAYER)
    lists = [step[NUM_LAYERS - 1][0].tolist() for step in run.selections]
    assert run.steps[0].reuse_rate is None
    for before, now, measured in zip(lists, lists[1:], run.steps[1:], strict=False):
        shares = [len(set(a) & set(b) - {-1}) / len(set(b) - {-1}) for a, b in zip(before, now, strict=True)]
        assert measured.reuse_rate == pytest.approx(np.mean(shares))


def test_bytes_and_tokens_are_those_of_the_pages_that_were_read() -> None:
    run = run_of(LAST_LAYER)
    for step, (measured, selection) in enumerate(zip(run.steps, run.selections, strict=True)):
        length = NUM_TOKENS + step  # the newest token included
        missing = -length % PAGE
        selected = [
            len(set(pages) - {-1}) * PAGE - missing for pages in selection[NUM_LAYERS - 1][0].tolist()
        ]
        tokens = 2 * (NUM_LAYERS - 1) * length + sum(selected)
        assert measured.tokens_attended == pytest.approx(tokens / (2 * NUM_LAYERS))
        assert measured.kv_bytes == tokens * 2 * 16 * 4
        assert measured.summary_bytes == 2 * (length // PAGE) * summary_bytes("low_rank", 16, PAGE)


def test_only_the_first_steps_are_measured_and_measuring_changes_no_output() -> None:
    none, few, all_steps = (run_of(LAST_LAYER, measured_steps=steps) for steps in (0, 3, 64))
    assert (len(none.steps), len(few.steps), len(all_steps.steps)) == (0, 3, all_steps.scored_tokens)
    assert none.output == few.output == all_steps.output
    assert few.steps == all_steps.steps[:3]
    assert none.selections == []


def test_no_selection_keeps_more_mass_than_the_best_pages() -> None:
    for budget in (24, 48, 96):
        for config in (SMALL, SMALL.replace(scorer="mean"), SMALL.replace(scorer="low_rank")):
            run = run_of(Method(config=config.replace(token_budget=budget)))
            for step in run.steps:
                assert step.recall is not None
                assert step.oracle_recall is not None
                assert step.recall <= step.oracle_recall + 1e-6
                assert step.oracle_recall <= 1 + 1e-5


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "h2o"])
def test_recall_of_an_eviction_is_the_mass_of_the_tokens_that_stayed(name: str) -> None:
    method = Method(policy=policies.get(name), config=LAST_LAYER.config)
    run = run_of(method)
    ids = only_sample(ScoreTask(), NUM_TOKENS).prompt_ids
    model = tiny_model()
    with tinyserve_ops.enable(model, method.config, policy=method.policy) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            model(torch.tensor([ids[:-1]]), **{cache_argument(model): cache}, use_cache=True)
        kept = cache.kv.kept_tokens(NUM_LAYERS - 1, cache.sequences[0])
    recall = []
    for head, tokens in enumerate(kept.tolist()):
        assert len(tokens) < NUM_TOKENS - 20
        recall.append(true_token_mass()[head][[*tokens, NUM_TOKENS - 1]].sum())
    assert run.steps[0].recall == pytest.approx(np.mean(recall), abs=1e-4)
    best_pages = -np.sort(-true_page_mass(), axis=1)[:, : -(-(kept.size(1) + 1) // PAGE)]
    assert run.steps[0].oracle_recall == pytest.approx(best_pages.sum(1).mean(), abs=1e-4)
    assert (run.steps[0].hit_rate, run.steps[1].reuse_rate) == (None, None)
    assert len(run.steps) == run.scored_tokens
    assert all(step.recall is not None and 0 < step.recall < 1 for step in run.steps)


def test_the_oracle_misses_at_most_what_its_forced_pages_push_out() -> None:
    config = LAST_LAYER.config.replace(num_sink_pages=0, num_recent_pages=1)
    for step in run_of(Method(policy=policies.get("oracle"), config=config)).steps:
        assert step.hit_rate is not None
        assert step.hit_rate > 0.83  # of 48 tokens in pages of 8, one page is forced
        assert step.summary_bytes == 0


def test_no_scorer_beats_the_oracle_at_the_same_query() -> None:
    oracle = run_of(Method(policy=policies.get("oracle"), config=LAST_LAYER.config)).steps[0].recall
    assert oracle is not None
    for scorer in ("bounds", "mean", "low_rank"):
        recall = run_of(Method(config=LAST_LAYER.config.replace(scorer=scorer))).steps[0].recall
        assert recall is not None
        assert recall <= oracle + 1e-6


@pytest.mark.parametrize("window", [40, 64, 100])
def test_a_sliding_window_hides_the_pages_before_it(window: int) -> None:
    model = tiny_mistral(window)
    sample = only_sample(ScoreTask(), NUM_TOKENS)
    config = SMALL.replace(token_budget=24, dense_layers=0)
    wide = config.replace(token_budget=512)
    with Runner(model, NumberTokenizer()) as runner:
        for run in runner.run(sample, [Method(config=config), Method(config=wide)]):
            assert isinstance(run, MethodRun), run.error
            for step in run.steps:
                assert step.recall is not None
                assert step.oracle_recall is not None
                assert step.recall <= step.oracle_recall + 1e-5
                if run.method.config == wide:
                    assert step.recall == pytest.approx(1.0, abs=1e-4)


@given(
    st.integers(1, 6).flatmap(
        lambda pages: st.tuples(
            st.lists(st.floats(0, 1, width=32), min_size=pages, max_size=pages), st.integers(1, pages)
        )
    )
)
def test_the_best_pages_hold_at_least_the_mass_of_any_others(case: tuple[list[float], int]) -> None:
    values, count = case
    mass = torch.tensor([values])
    most, is_best = mass_of_best(mass, torch.tensor([count]))
    expected = max(sum(chosen) for chosen in itertools.combinations(values, count))
    assert float(most) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert int(is_best.sum()) == count
    assert float((mass * is_best).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_means_leave_out_steps_without_a_value() -> None:
    first = StepMeasures(0.5, 0.8, 0.25, None, 10.0, 100, 7)
    second = StepMeasures(0.7, 1.0, 0.75, 0.5, 20.0, 300, 9)
    means = mean_measures([first, second])
    assert means["recall"] == pytest.approx(0.6)
    assert means["reuse_rate"] == 0.5
    assert means["kv_bytes"] == 200
    assert means["recall_of_oracle"] == pytest.approx(0.6 / 0.9)
    assert set(mean_measures([]).values()) == {None}
