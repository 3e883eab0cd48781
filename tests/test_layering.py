"""Who may include or import whom, checked by reading the text of the sources: nothing has to be built.

The tables below are the rule. A new folder needs a row here before anything in it can be used.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# folder of csrc -> (folders of csrc it may include, prefixes of foreign headers it may include)
CPP_MAY_INCLUDE: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "core": ({"core"}, ()),
    "cpu": ({"core", "cpu"}, ("immintrin.h",)),
    "cuda": ({"core", "cuda"}, ("cuda", "cub/", "cooperative_groups", "mma.h")),
    "runtime": ({"core", "runtime"}, ()),
    "torch": (
        {"core", "cpu", "cuda", "torch"},
        ("torch/csrc/stable/", "torch/csrc/inductor/", "torch/headeronly/", "cuda"),
    ),
    "pybind": ({"core", "runtime", "pybind"}, ("pybind11/",)),
}
# Whom a part may not import; every part may import what is not named. The key is a module prefix.
PYTHON_MUST_NOT_IMPORT: dict[str, tuple[str, ...]] = {
    "tinyserve_ops": ("tinyserve",),
    "tinyserve_ops.config": tuple(f"tinyserve_ops.{part}" for part in ("policies", "plugins", "hf", "cache")),
    "tinyserve_ops.policies": ("tinyserve_ops.hf",),
    "tinyserve_ops.plugins": ("tinyserve_ops.hf",),
    "tinyserve": ("tinyserve.eval", "tinyserve.training", "tinyserve.adapters"),
    "tinyserve.engine": ("tinyserve.server",),
}
# The command line hands over to what stands on top, one module for each.
PYTHON_MAY_IMPORT: dict[str, tuple[str, ...]] = {"tinyserve.cli": ("tinyserve.eval.commands",)}
# The one file of csrc that may look beyond it: it hands kernels to the emulator of the tests.
ARCH = Path("csrc/cuda/arch.cuh")
PACKAGES = {"tinyserve_ops": ROOT, "tinyserve": ROOT / "python"}


def is_in(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def imports_of(module: str, path: Path) -> Iterator[str]:
    """Absolute names of every module that a file imports, also inside functions."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def python_files() -> Iterator[tuple[str, Path]]:
    for package, root in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@pytest.mark.parametrize("folder", sorted(p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()))
def test_a_folder_of_csrc_includes_only_what_lies_below_it(folder: str) -> None:
    assert folder in CPP_MAY_INCLUDE, f"csrc/{folder} has no row in CPP_MAY_INCLUDE"
    own, foreign = CPP_MAY_INCLUDE[folder]
    for path in sorted((ROOT / "csrc" / folder).rglob("*.*")):
        for line in path.read_text().splitlines():
            found = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if found is None:
                continue
            quote, header = found.groups()
            where = f"{path.relative_to(ROOT)} includes {header}"
            if path == ROOT / ARCH and header == "cuda_emulator/device_functions.h":
                continue
            if quote == '"':
                assert header.split("/")[0] in own, where
            else:  # a standard header has no folder and no suffix
                assert re.fullmatch(r"[a-z_0-9]+", header) or header.startswith(foreign), where


def test_only_arch_cuh_knows_which_compiler_reads_a_kernel() -> None:
    for path in sorted((ROOT / "csrc/cuda").iterdir()):
        if path == ROOT / ARCH:
            continue
        for word in ("asm", "__CUDA_ARCH__", "__CUDACC__", "__shared__", "TINYSERVE_CUDA_EMULATOR", "<<<"):
            assert word not in path.read_text(), f"{path.relative_to(ROOT)}: {word} belongs into {ARCH}"


def test_python_parts_import_only_downwards() -> None:
    for module, path in python_files():
        for part, forbidden in PYTHON_MUST_NOT_IMPORT.items():
            if not is_in(module, part):
                continue
            for name in imports_of(module, path):
                if any(is_in(name, allowed) for allowed in PYTHON_MAY_IMPORT.get(module, ())):
                    continue
                for other in forbidden:
                    # A part may import itself: `tinyserve.eval` is forbidden to the rest of tinyserve only.
                    assert is_in(module, other) or not is_in(name, other), f"{module} imports {name}"


def test_the_library_needs_only_torch_numpy_and_the_standard_library() -> None:
    for module, path in python_files():
        if not is_in(module, "tinyserve_ops"):
            continue
        allowed = {*sys.stdlib_module_names, "torch", "numpy", "tinyserve_ops"}
        if is_in(module, "tinyserve_ops.hf"):
            allowed.add("transformers")
        for name in imports_of(module, path):
            assert name.split(".")[0] in allowed, f"{module} imports {name}"


def test_cmake_lists_every_source_file() -> None:
    listed = set(
        re.findall(r"(?:csrc|tests/cpp)/[\w/]+\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text())
    )
    there = [path for folder in ("csrc", "tests/cpp") for path in (ROOT / folder).rglob("*.c*")]
    assert {str(path.relative_to(ROOT)) for path in there if path.suffix in (".cpp", ".cu")} == listed
