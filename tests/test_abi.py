"""What the native files ask of the outside, read from their symbol tables with nm.

The operators keep to the LibTorch stable ABI of torch 2.11, so that one build loads in every later torch; the
core knows neither torch nor Python; no CPU kernel has a symbol that the linker could share between targets.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where CMake works; only a build from source has one, so the tests of object files need it.
BUILD_DIR = Path(os.environ.get("TINYSERVE_BUILD_DIR", ROOT / "build" / str(sys.implementation.cache_tag)))
# C functions of torch's stable layer that came after 2.11.
NEWER_SHIMS = re.compile(
    r"torch_new_stable_ivalue|torch_stream_native_handle|torch_exception_get_what|torch_library_def_with_tags"
)


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind letter, demangled name) of each symbol."""
    text = subprocess.run(
        ["nm", "-C", *options, str(path)], check=True, capture_output=True, text=True
    ).stdout
    found = (re.match(r"(?:[0-9a-f]+)?\s+([A-Za-z]) (.+)", line) for line in text.splitlines())
    return [(match[1], match[2]) for match in found if match]


def undefined(path: Path) -> list[str]:
    return [name for _, name in symbols(path, "-D", "--undefined-only")]


def built(name: str) -> Path:
    """The file of that name in the build folder or, where there is none, in the package."""
    found = [path for folder in (BUILD_DIR, ROOT / "tinyserve_ops") for path in folder.glob(name)]
    if not found:
        raise FileNotFoundError(f"{name} lies neither in tinyserve_ops nor in {BUILD_DIR}; run `make build`")
    return found[0]


def ops_files() -> list[str]:
    """The CUDA half exists only where it was built."""
    cuda = [folder for folder in (ROOT / "tinyserve_ops", BUILD_DIR) if (folder / "_ops_cuda.so").exists()]
    return ["_ops.so", "_ops_cuda.so"] if cuda else ["_ops.so"]


def kernel_objects(target: str) -> list[Path]:
    return sorted(BUILD_DIR.glob(f"CMakeFiles/tinyserve_cpu_{target}.dir/**/*.o"))


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="binutils' nm is not installed")


@needs_nm
@pytest.mark.parametrize("name", ops_files())
def test_the_operators_use_only_the_stable_abi_of_torch_2_11(name: str) -> None:
    asked = undefined(built(name))
    assert any(symbol.startswith(("aoti_torch_", "torch_")) for symbol in asked), (
        "nm read no torch symbol at all"
    )
    assert [symbol for symbol in asked if re.search(r"\b(at|c10|torch)::", symbol)] == []
    assert [symbol for symbol in asked if NEWER_SHIMS.search(symbol)] == []


@needs_nm
@pytest.mark.parametrize("name", [*ops_files(), "libtinyserve_core.so"])
def test_a_file_without_bindings_holds_no_python_symbol(name: str) -> None:
    assert [symbol for symbol in undefined(built(name)) if symbol.startswith(("Py", "_Py"))] == []


@needs_nm
@pytest.mark.parametrize("name", ["libtinyserve_core.so", "_runtime.*.so"])
def test_the_core_and_the_bindings_know_no_torch(name: str) -> None:
    assert [symbol for symbol in undefined(built(name)) if re.search("torch|c10", symbol)] == []


@needs_nm
def test_kernels_of_one_cpu_target_share_no_symbol_with_another() -> None:
    targets = ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16")
    objects = [(target, path) for target in targets for path in kernel_objects(target)]
    assert objects, f"no kernel objects under {BUILD_DIR}"
    for target, path in objects:
        for kind, name in symbols(path, "--defined-only"):
            where = f"{path.relative_to(BUILD_DIR)}: {kind} {name}"
            # Weak and unique symbols are what a linker merges across objects.
            assert kind not in "WVu", where
            if kind.isupper():
                assert f"tinyserve::cpu::{target}::" in name, where
