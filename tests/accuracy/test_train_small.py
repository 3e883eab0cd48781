"""`python -m tinyserve.eval.train_small`: a few steps on made-up text, and the folder that comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_up_texts import text
from transformers import PreTrainedTokenizerBase

import tinyserve_ops
from tinyserve.cli import main as tinyserve
from tinyserve.eval.corpora import load
from tinyserve.eval.lessons import Lessons
from tinyserve.eval.results import read_records
from tinyserve.eval.train_small import POSITIONS, main
from tinyserve.models import load_model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for idx, num_paragraphs in enumerate((60, 40, 6, 6)):
        (folder / f"book{idx}.txt").write_text(text(idx, num_paragraphs))
    return folder


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def folder(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / str(request.param)
    assert train(str(request.param), path, corpus) == 0
    return path


def train(architecture: str, folder: Path, corpus: Path, steps: int = 4) -> int:
    given = [architecture, "--output", str(folder), "--text", str(corpus), "--steps", str(steps)]
    return main([*given, "--threads", "1"])


def test_the_loss_falls_and_the_folder_says_how_it_was_made(folder: Path) -> None:
    facts = json.loads((folder / "training.json").read_text())
    assert facts["last_loss"] < facts["first_loss"]
    assert 0 < facts["held_out_loss"] < 10
    assert (facts["architecture"], facts["steps"], facts["seed"]) == (folder.name, 4, 42)
    assert facts["parameters"] < 6e6


def test_held_out_documents_are_those_that_were_not_learnt(folder: Path, corpus: Path) -> None:
    documents = load(corpus)
    assert [document.text for document in load(folder / "held_out.jsonl")] == [
        document.text for document in documents[-2:]
    ]


def test_the_library_takes_the_model_and_a_full_budget_gives_its_own_tokens(folder: Path) -> None:
    model, tokenizer = load_model(folder, torch.float32)
    ids = torch.tensor([tokenizer.encode("bada ligo 12345 " * 40)])
    expected = generate(model, ids)
    with tinyserve_ops.enable(model, token_budget=POSITIONS):
        assert torch.equal(generate(model, ids), expected)


def generate(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    assert isinstance(output, torch.Tensor)
    return output


def test_the_model_goes_through_tasks(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    command = ["eval", f"perplexity_books:text={folder / 'held_out.jsonl'},num_scored=16", "passkey"]
    command += ["--model", str(folder), "--tokens", "256", "--samples", "1", "--budget", "64"]
    assert tinyserve([*command, "--threads", "1", "--output", str(output)]) == 0
    records = read_records(output)
    assert len(records) == 4
    assert not any("error" in record for record in records)


def test_the_same_seed_gives_the_same_model(folder: Path, corpus: Path, tmp_path: Path) -> None:
    assert train(folder.name, tmp_path / "again", corpus) == 0
    first, second = (load_model(path, torch.float32)[0].state_dict() for path in (folder, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_folder_that_exists_is_left_alone(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("gpt2", tmp_path, corpus) == 2
    assert "expected a new folder" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_text_that_is_too_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short"
    short.mkdir()
    for idx in range(3):
        (short / f"{idx}.txt").write_text("bada ligo\n")
    assert train("gpt2", tmp_path / "model", short) == 2
    assert "--text: expected at least" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_digits_are_tokens_of_their_own(folder: Path) -> None:
    _, tokenizer = load_model(folder, torch.float32)
    assert len(tokenizer.encode(" 48213")) == 6
    assert tokenizer.decode(tokenizer.encode("bada 48213.\n\n")) == "bada 48213.\n\n"


@pytest.mark.parametrize("num_tokens", [256, POSITIONS])
def test_lessons_have_the_length_asked_for_and_depend_on_the_seed(
    folder: Path, corpus: Path, num_tokens: int
) -> None:
    _, tokenizer = load_model(folder, torch.float32)
    first, again, other = (lessons(tokenizer, corpus, seed).batch(12, num_tokens) for seed in (0, 0, 1))
    assert first.shape == (12, num_tokens)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    texts = [tokenizer.decode(row) for row in first]
    assert any("What is the pass key of the" in text for text in texts)


def lessons(tokenizer: PreTrainedTokenizerBase, corpus: Path, seed: int) -> Lessons:
    return Lessons(tokenizer, load(corpus), seed=seed)
