"""The implementations of the ops that one and the same test runs on."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from tinyserve_ops.testing.compare import assert_close, assert_same_bits
from tinyserve_ops.testing.on_device import ops_on_device

IMPLEMENTATION_NAMES = ("reference", "cpu")

_MODULES = {"reference": "tinyserve_ops.reference", "cpu": "tinyserve_ops.ops", "cuda": "tinyserve_ops.ops"}


@dataclass(frozen=True)
class Implementation:
    """A module with the ops.

    `bitwise` says whether results that must not depend on batch, list or threads are promised bit for bit;
    `is_cuda` that it is the CUDA one, on a GPU or on the emulator: it cannot look at what lengths, page
    tables and lists hold, and wants summary rows at multiples of 16 bytes.
    """

    name: str
    ops: ModuleType | SimpleNamespace
    bitwise: bool
    is_cuda: bool = False

    def assert_same(self, actual: Tensor, expected: Tensor) -> None:
        """Raises AssertionError unless equal: bit for bit where promised, within tolerance elsewhere."""
        (assert_same_bits if self.bitwise else assert_close)(actual, expected)


def get_implementation(name: str) -> Implementation:
    """Returns one of `IMPLEMENTATION_NAMES`, or "cuda"; imports it on the first call.

    "cuda" takes CPU tensors like the others and runs on the current GPU.
    """
    if name not in _MODULES:
        raise ValueError(f"name: expected one of {', '.join(_MODULES)}, got {name!r}")
    module = importlib.import_module(_MODULES[name])
    if name == "cuda":
        return Implementation(name, ops_on_device(module, "cuda"), bitwise=True, is_cuda=True)
    return Implementation(name, module, bitwise=name != "reference")


def emulated_implementation(library: Path) -> Implementation:
    """The CUDA ops over the emulator, from the library file that the build with tests makes.

    They take CPU tensors, under their own namespace. The wrappers are those of `tinyserve_ops.ops`.
    """
    torch.ops.load_library(str(library))
    original = importlib.import_module("tinyserve_ops.ops")
    assert original.__file__ is not None
    spec = importlib.util.spec_from_file_location("tinyserve_ops.testing.emulated_ops", original.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["OPS"] = torch.ops.tinyserve_emulated
    return Implementation("emulated", module, bitwise=True, is_cuda=True)
