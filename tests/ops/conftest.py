"""Runs every test that asks for `impl` on each implementation of the ops, on one thread.

Tiny matrix products of the reference and the oracle are many times faster without a thread pool; tests about
threads set their own count.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulation import find_library

from tinyserve_ops.testing import (
    IMPLEMENTATION_NAMES,
    Implementation,
    emulated_implementation,
    get_implementation,
)

NAMES = [*IMPLEMENTATION_NAMES, "emulated", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session")
def emulated() -> Implementation:
    library = find_library()
    if library is None:
        pytest.skip(
            "the CUDA ops over the emulator were not built (TINYSERVE_BUILD_TESTS, CUDA toolkit headers)"
        )
    return emulated_implementation(library)


@pytest.fixture(params=NAMES)
def impl(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "emulated":
        found: Implementation = request.getfixturevalue("emulated")
        return found
    return get_implementation(request.param)


@pytest.fixture
def cpu() -> Implementation:
    return get_implementation("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
