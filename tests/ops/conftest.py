"""Runs every test that asks for `impl` on each implementation of the ops, on one thread.

Tiny matrix products of the reference and the oracle are many times faster without a thread pool; tests about
threads set their own count.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinyserve_ops.testing import IMPLEMENTATION_NAMES, Implementation, get_implementation


@pytest.fixture(params=IMPLEMENTATION_NAMES)
def impl(request: pytest.FixtureRequest) -> Implementation:
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
