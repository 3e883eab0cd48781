"""What a build says where something it needs is missing or too old, each case a real configure run of CMake.

The wrong Python, torch or compiler is a small stand-in made for the case: an environment without torch, one
with an old torch's metadata, one that reports an old version, and a compiler that reports an old number.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEARCH_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=SEARCH_PATH)

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")


def configure(build: Path, *options: str, **environment: str) -> str:
    """Runs the configure step, which must fail; returns its error text with the line breaks taken out."""
    names = {key: value for key, value in os.environ.items() if key not in ("CMAKE_ARGS", "CXX", "CUDACXX")}
    done = subprocess.run(
        [str(CMAKE), "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options],
        env={**names, "PATH": SEARCH_PATH, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    return " ".join(done.stderr.split())


def environment_without_torch(folder: Path) -> tuple[Path, Path]:
    """An empty virtual environment: its interpreter and its site-packages."""
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python", next(folder.glob("lib/python*/site-packages"))


def test_a_missing_torch_is_named_with_what_to_install(tmp_path: Path) -> None:
    python, _ = environment_without_torch(tmp_path / "venv")
    error = configure(tmp_path / "build", f"-DPython_EXECUTABLE={python}")
    assert "torch is not installed for" in error
    assert "--no-build-isolation" in error


def test_a_torch_before_2_11_is_refused_with_both_versions(tmp_path: Path) -> None:
    python, site = environment_without_torch(tmp_path / "venv")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    (site / "torch-2.9.1.dist-info").mkdir()
    (site / "torch-2.9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n"
    )
    error = configure(tmp_path / "build", f"-DPython_EXECUTABLE={python}")
    assert "needs torch 2.11 or newer; found 2.9.1" in error


def test_a_python_before_3_10_is_refused_with_both_versions(tmp_path: Path) -> None:
    python, site = environment_without_torch(tmp_path / "venv")
    # Not sitecustomize.py: distributions bring their own, which comes first.
    (site / "old.pth").write_text("import sys; sys.version_info = (3, 9, 2, 'final', 0)\n")
    error = configure(tmp_path / "build", f"-DPython_EXECUTABLE={python}")
    assert "needs Python 3.10 or newer; found 3.9.2" in error


def test_a_compiler_before_gcc_11_is_refused_with_both_versions(tmp_path: Path) -> None:
    old = tmp_path / "g++"
    old.write_text('#!/bin/sh\nexec g++ -w -U__GNUC__ -D__GNUC__=10 "$@"\n')
    old.chmod(0o755)
    error = configure(tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}", CXX=str(old))
    assert "needs a C++20 compiler: g++ 11 or newer; found g++ 10." in error


def test_cuda_asked_for_without_nvcc_is_an_error_not_a_cpu_build(tmp_path: Path) -> None:
    options = (f"-DPython_EXECUTABLE={sys.executable}", "-DTINYSERVE_CUDA=ON")
    error = configure(tmp_path / "build", *options, CUDACXX="/nowhere/nvcc")
    assert "TINYSERVE_CUDA=ON needs nvcc" in error


def test_an_unknown_cuda_setting_is_refused_by_name(tmp_path: Path) -> None:
    options = (f"-DPython_EXECUTABLE={sys.executable}", "-DTINYSERVE_CUDA=maybe")
    assert "TINYSERVE_CUDA must be AUTO, ON or OFF; got 'maybe'" in configure(tmp_path / "build", *options)
