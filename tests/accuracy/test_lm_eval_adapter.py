"""The lm-eval model against lm-eval's own Hugging Face model, and a task from end to end. Needs `lm_eval`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import tiny_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements/lm-eval.txt)")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tinyserve.eval.lm_eval_adapter import TinyServeLM

SMALL = {"page_size": 8, "token_budget": 48, "dense_layers": 1}
WORDS = [f"w{index}" for index in range(94)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "?", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="?"
    )


def text(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist())


def ours(policy: str = "full_cache", **changes: Any) -> TinyServeLM:
    return TinyServeLM(tiny_model(), tokenizer=tokenizer(), policy=policy, **{**SMALL, **changes})


def theirs(**changes: Any) -> HFLM:
    return HFLM(pretrained=tiny_model(), tokenizer=tokenizer(), batch_size=1, max_length=512, **changes)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=index) for index, args in enumerate(arguments)
    ]


PAIRS = [
    (text(120, 1), f" {text(5, 2)}"),
    (text(120, 1), f" {text(1, 3)}"),
    (text(1, 4), f" {text(3, 5)}"),
    ("", text(9, 6)),
    (text(600, 7), f" {text(30, 8)}"),  # longer than the model
]


def test_the_full_cache_scores_what_lm_evals_own_model_scores() -> None:
    got, expected = (lm.loglikelihood(requests("loglikelihood", PAIRS)) for lm in (ours(), theirs()))
    for (value, greedy), (wanted, wanted_greedy) in zip(got, expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-3)
        assert greedy == wanted_greedy


def test_a_sparse_policy_scores_something_else_and_feeds_token_by_token() -> None:
    lm = ours("query_aware")
    sparse = lm.loglikelihood(requests("loglikelihood", PAIRS[:2]))
    dense = ours().loglikelihood(requests("loglikelihood", PAIRS[:2]))
    assert abs(sparse[0][0] - dense[0][0]) > 1e-2
    assert lm.scored_tokens == 1 + 4  # the last token of the context once; all but the last of a continuation


def test_rolling_loglikelihood_agrees_over_several_windows() -> None:
    texts = [(text(100, 9),), (text(150, 10),)]
    got = ours(max_length=64).loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    reference = HFLM(pretrained=tiny_model(), tokenizer=tokenizer(), batch_size=1, max_length=64)
    expected = reference.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    assert got == pytest.approx(expected, abs=5e-3)


def test_generation_agrees_and_stops_at_a_stop_sequence() -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    asked = [(text(80, seed), settings) for seed in range(3)]
    got = ours().generate_until(requests("generate_until", asked))
    assert got == theirs().generate_until(requests("generate_until", asked))
    stop = got[0].split()[4]
    lm = ours()
    stopped = lm.generate_until(requests("generate_until", [(text(80, 0), {**settings, "until": [stop]})]))
    assert stopped == [got[0].split(stop)[0]]
    assert lm.scored_tokens <= 1 + 5


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_size: expected 1"):
        ours(batch_size=8)
    settings = {"until": [], "do_sample": True, "temperature": 0.7}
    with pytest.raises(ValueError, match="do_sample: expected greedy"):
        ours().generate_until(requests("generate_until", [("w1", settings)]))


TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 1
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    docs = [{"question": text(90, s), "choices": [text(2, s + 50), text(3, s + 90)]} for s in range(6)]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "tiny_choice.yaml").write_text(TASK.format(data=data))
    return tmp_path


def test_a_task_of_lm_eval_runs_with_a_policy(task_folder: Path) -> None:
    assert get_model("tinyserve") is TinyServeLM
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    results = {}
    for name, lm in (("ours", ours()), ("theirs", theirs()), ("sparse", ours("query_aware"))):
        found = lm_eval.simple_evaluate(
            model=lm, tasks=["tiny_choice"], task_manager=manager, bootstrap_iters=0
        )
        results[name] = found["results"]["tiny_choice"]["acc,none"]
    assert results["ours"] == results["theirs"]
    assert 0.0 <= results["sparse"] <= 1.0


def test_the_module_is_lm_evals_command_line_with_the_model_in_it(task_folder: Path) -> None:
    folder = task_folder / "model"
    tiny_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    arguments = ["--model", "tinyserve", "--tasks", "tiny_choice", "--include_path", str(task_folder)]
    arguments += ["--model_args", f"pretrained={folder},policy=query_aware,token_budget=64", "--limit", "2"]
    command = [sys.executable, "-m", "tinyserve.eval.lm_eval_adapter", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tiny_choice" in done.stdout
