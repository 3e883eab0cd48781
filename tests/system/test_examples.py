"""The notebooks under `examples/` run top to bottom in a kernel of their own, offline: the first on a tiny
random model, those about accuracy on SmolLM2 with few tokens and samples.

What a notebook prints about itself (tokens equal to full attention) is looked at, too. In the repository they
lie without outputs: a diff then shows code, and nobody reads numbers of another machine.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import tinyserve
import tinyserve_ops
from tinyserve.models import PACKAGE as MODEL_PACKAGE

pytest.importorskip("transformers")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_lies_in_the_repository_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Executes a notebook in `folder`; returns what it printed. A cell that raises fails the test."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    # The kernel imports the very library that the tests do.
    for package in (tinyserve_ops, tinyserve):
        folder_of_package = Path(str(package.__file__)).resolve().parents[1]
        monkeypatch.setenv("PYTHONPATH", str(folder_of_package), prepend=os.pathsep)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny tensors are slower on a thread pool
    monkeypatch.delenv("TINYSERVE_EXAMPLE_MODEL", raising=False)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def test_the_drop_in_notebook_runs_and_a_full_budget_gives_the_tokens_of_full_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run(EXAMPLES / "01_drop_in.ipynb", tmp_path, monkeypatch)
    assert "equal tokens with full budget: 24 of 24" in printed
    assert "pages were left out        True" in printed
    assert "refused: token_budget: expected at least 48" in printed
    assert "attention is sdpa again" in printed


@pytest.fixture
def _small_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the notebooks that evaluate."""
    if importlib.util.find_spec(MODEL_PACKAGE) is None:
        pytest.skip(f"{MODEL_PACKAGE} is not installed (requirements/models.txt)")
    monkeypatch.setenv("TINYSERVE_EXAMPLE_TOKENS", "384")
    monkeypatch.setenv("TINYSERVE_EXAMPLE_SAMPLES", "1")


@pytest.mark.usefixtures("_small_settings")
def test_the_sweep_notebook_finds_the_key_with_full_attention_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run(EXAMPLES / "02_accuracy_sweep.ipynb", tmp_path, monkeypatch)
    assert "full attention finds 100% of 1" in printed
    assert "0 failed" in printed
    assert "budget_passkey_384_score.png" in printed


@pytest.mark.usefixtures("_small_settings")
def test_the_policy_notebook_runs_a_policy_written_on_the_spot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run(EXAMPLES / "03_write_a_policy.ipynb", tmp_path, monkeypatch)
    assert "equal tokens with full budget: 8 of 8" in printed
    assert "good_neighbours low_rank 128, page 16, distance 4.0" in printed
