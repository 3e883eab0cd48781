"""README.md and the documents beside it say what is true: snippets run, tables equal the code, links lead
to files.

The snippets run unchanged and in order, as in one notebook. The model they name is found in the working
folder under that very path: a tiny random Llama and a tokenizer of bytes, so nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinyserve_ops import SparseConfig, plugins, policies
from tinyserve_ops.scorers import SCORERS, summary_bytes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/design.md")


def python_snippets() -> list[tuple[int, str]]:
    """(line of the first statement, source) of each fenced block marked `python`."""
    found = re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def save_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["input_ids", "attention_mask"]  # older versions would add token types, which a Llama refuses
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def test_the_python_snippets_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    snippets = python_snippets()
    assert len(snippets) >= 4
    name = re.search(r'^name = "([^"]+)"', snippets[0][1], re.MULTILINE)
    assert name is not None
    save_tiny_model(tmp_path / name[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    namespace: dict[str, object] = {}
    try:
        for line, source in snippets:
            # Empty lines in front, so that a traceback names the line of the README.
            exec(compile("\n" * (line - 1) + source, "README.md", "exec"), namespace)
    finally:
        torch.set_num_threads(before)
    stats = namespace["stats"]
    assert stats.selection_engaged  # type: ignore[attr-defined]
    assert not namespace["handle"].enabled  # type: ignore[attr-defined]


def rows_of_table(header: str) -> list[list[str]]:
    """Cells of the table of README.md whose header line begins with `header`."""
    lines = README.split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith(header)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_the_options_table_names_every_option_with_its_default() -> None:
    default = SparseConfig()
    options = {field.name for field in dataclasses.fields(SparseConfig) if field.init}
    rows = rows_of_table("| option | default |")
    assert {row[0] for row in rows} == options
    for option, shown, *_ in rows:
        value = getattr(default, option)
        assert shown == (f'"{value}"' if isinstance(value, str) else str(value)), option


def test_the_scorer_table_names_every_scorer_with_its_bytes() -> None:
    rows = {row[0]: row[2] for row in rows_of_table("| scorer | keeps of a page |")}
    assert set(rows) == set(SCORERS)
    for scorer, shown in rows.items():
        expected = [summary_bytes(scorer, 64, 16, dtype) for dtype in (torch.bfloat16, torch.float32)]
        if expected[0] == expected[1]:
            assert shown == str(expected[0]), scorer
        else:
            assert shown == f"{expected[0]} in 16 bits, {expected[1]} in fp32", scorer


def test_the_policy_table_names_every_policy_with_its_parameters() -> None:
    rows = {row[0]: row[2] for row in rows_of_table("| policy | a step reads |")}
    assert set(rows) == set(policies.names())
    for name, shown in rows.items():
        fields = {field.name: field.default for field in dataclasses.fields(policies.get(name))}
        expected = [f"{key}={value!r}" for key, value in fields.items() if key != "token_budget"]
        assert shown.replace("`", "") == ", ".join(expected), name


def test_the_plugin_table_names_every_plugin_with_its_parameters() -> None:
    rows = {row[0]: row[2] for row in rows_of_table("| plugin | does |")}
    assert set(rows) == set(plugins.names())
    for name, shown in rows.items():
        fields = {field.name: field.default for field in dataclasses.fields(plugins.get(name))}
        expected = [f"{key}={value!r}" for key, value in fields.items() if key != "enabled"]
        assert shown.replace("`", "") == ", ".join(expected), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    top = "csrc|tests|tinyserve_ops|python|benchmarks|examples|requirements|docs|tools"
    for path in set(re.findall(rf"`((?:{top})/[\w./-]*)`", text)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE))
    assert named <= targets


def test_the_module_reports_what_it_is_built_of() -> None:
    command = [sys.executable, "-m", "tinyserve_ops"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("CPU target", "CUDA", "_ops.so", "torch", "transformers"):
        assert part in done.stdout
