"""Texts, question sets and tokenizers made on the spot: nothing is downloaded, no package is needed."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_CHAT = (
    "{% for message in messages %}<user>{{ message['content'] }}</user>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def words() -> list[str]:
    """400 different words of four to six letters that are no English function words."""
    rng = random.Random(0)
    made: dict[str, None] = {}
    while len(made) < 400:
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3)))]
        made["".join(syllables)] = None
    return list(made)


def text(seed: int, num_paragraphs: int) -> str:
    """Paragraphs of eight sentences of eight to fourteen words."""
    rng = random.Random(seed)
    paragraphs = []
    for _ in range(num_paragraphs):
        sentences = [" ".join(rng.choice(words()) for _ in range(rng.randint(8, 14))) + "." for _ in range(8)]
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs) + "\n"


def write_corpus(folder: Path) -> Path:
    """A folder of three text files, the first much shorter than the others."""
    folder.mkdir(parents=True)
    for idx, num_paragraphs in enumerate((2, 40, 60)):
        (folder / f"book{idx}.txt").write_text(text(idx, num_paragraphs))
    return folder


def write_hotpotqa(path: Path, num_questions: int = 12) -> Path:
    rows = []
    for idx in range(num_questions):
        titles = [f"Title {idx} {place}" for place in range(10)]
        rows.append(
            {
                "_id": f"id{idx}",
                "question": f"Which {words()[idx]} is it?",
                "answer": words()[100 + idx],
                "supporting_facts": [[titles[2], 0], [titles[7], 0], [titles[7], 1]],
                "context": [[title, [f" Sentence one of {title}.", " Another."]] for title in titles],
            }
        )
    path.write_text(json.dumps(rows))
    return path


def write_squad(path: Path) -> Path:
    articles = []
    for article in range(4):
        paragraphs = []
        for place in range(5):
            questions = [
                {
                    "id": f"{article}-{place}",
                    "question": f"  What is {words()[place]}?",
                    "answers": [{"text": "one two"}, {"text": "two"}, {"text": "one two"}],
                },
                {"id": f"{article}-{place}-none", "question": "Is it?", "answers": []},
            ]
            paragraphs.append({"context": text(1000 + 10 * article + place, 1).strip(), "qas": questions})
        articles.append({"title": f"Article_{article}", "paragraphs": paragraphs})
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def write_mmlu(path: Path, num_questions: int = 40) -> Path:
    rows = [
        {
            "question": f"Question {idx} of {words()[idx]}?\n\nA. one\nB. two\nC. three\nD. four\nAnswer:",
            "answer": "ABCD"[idx % 4],
        }
        for idx in range(num_questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_longbench(folder: Path, name: str, num_items: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "_id": f"{name}{idx}",
            "input": f"What about {words()[idx]}?",
            # Every other context is much longer than the prompts of the tests.
            "context": text(2000 + idx, 40 if idx % 2 else 1),
            "answers": [f"{words()[idx]} {words()[idx + 1]}", words()[idx]],
            "length": 1,
            "dataset": name,
        }
        for idx in range(num_items)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@functools.cache
def tokenizer(kind: str) -> Any:
    """A byte-level BPE learnt from the made-up text, and from rare words that occur in none of it: "plain",
    "bos" (puts one first) or "chat" (has a template).
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1250,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rare = " ".join("qu" + word for word in words()[:60])
    bpe.train_from_iterator([*(text(seed, 30) for seed in range(3)), *[f" {rare}"] * 3], trainer)
    if kind == "bos":
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    if kind == "chat":
        made.chat_template = _CHAT
    return made
