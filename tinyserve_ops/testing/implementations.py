"""The implementations of the ops that one and the same test runs on."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from tinyserve_ops.testing.compare import assert_close, assert_same_bits

IMPLEMENTATION_NAMES = ("reference", "cpu")

_MODULES = {"reference": "tinyserve_ops.reference", "cpu": "tinyserve_ops.ops"}


@dataclass(frozen=True)
class Implementation:
    """A module with the ops.

    `bitwise` says whether results that must not depend on batch, list or threads are promised bit for bit.
    """

    name: str
    ops: ModuleType
    bitwise: bool

    def assert_same(self, actual: Tensor, expected: Tensor) -> None:
        """Raises AssertionError unless equal: bit for bit where promised, within tolerance elsewhere."""
        (assert_same_bits if self.bitwise else assert_close)(actual, expected)


def get_implementation(name: str) -> Implementation:
    """Returns one of `IMPLEMENTATION_NAMES`; imports it on the first call."""
    if name not in _MODULES:
        raise ValueError(f"name: expected one of {', '.join(IMPLEMENTATION_NAMES)}, got {name!r}")
    return Implementation(name, importlib.import_module(_MODULES[name]), bitwise=name != "reference")
