"""Ops on tensors of another device, for tests and cases whose tensors lie on the CPU.

Every tensor argument goes over with its storage, so that strides, offsets and what lies between the elements
are the same there; what an op writes comes back into the arguments, and results come back as CPU tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def ops_on_device(ops: ModuleType, device: torch.device | str) -> SimpleNamespace:
    """The ops of a module under their names, run on `device`."""
    return SimpleNamespace(**{name: _op_on_device(getattr(ops, name), device) for name in ops.__all__})


def _op_on_device(op: Callable[..., Any], device: torch.device | str) -> Callable[..., Any]:
    schema = getattr(torch.ops.tinyserve, op.__name__).default._schema
    written = {arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write}

    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        here = inspect.signature(op).bind(*args, **kwargs).arguments
        there = {name: _over(value, device) for name, value in here.items()}
        results = op(**there)
        for name in written:
            if isinstance(here.get(name), Tensor):
                here[name].copy_(there[name])
        if isinstance(results, tuple):
            return tuple(result.cpu() for result in results)
        return None if results is None else results.cpu()

    return run


def _over(value: Any, device: torch.device | str) -> Any:
    if not isinstance(value, Tensor) or not value.is_cpu:
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    moved = whole.to(device, copy=True).as_strided(value.size(), value.stride(), value.storage_offset())
    return moved.requires_grad_(value.requires_grad)
