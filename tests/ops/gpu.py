"""What the tests that need a GPU share: the mark that skips them without one, and batches that lie there."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tinyserve_ops import ops
from tinyserve_ops.testing import Batch, make_batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a torch with CUDA")


def sealed_batch(*args: Any, **kwargs: Any) -> Batch:
    """On the CPU, every full page sealed."""
    batch = make_batch(*args, **kwargs)
    batch.seal(ops.seal_pages)
    return batch


def on_gpu(batch: Batch, device: torch.device | str = "cuda") -> Batch:
    """Copies of all tensors of a batch but of the plain tokens behind it."""
    moved = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.to(device)
    return replace(batch, **moved)
