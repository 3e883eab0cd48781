"""What every benchmark needs: the machine it ran on, a stop when another path was measured, JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tinyserve_ops
from tinyserve.environment import commit, machine
from tinyserve_ops import _runtime


class WrongPath(RuntimeError):
    """What was measured is not what was asked for."""


def expect(what: str, expected: object, got: object) -> None:
    """Stops the run unless `got` equals `expected`."""
    if expected != got:
        raise WrongPath(f"{what}: expected {expected}, got {got}")


def environment() -> dict[str, Any]:
    """What a published number needs beside it."""
    return {
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "tinyserve_ops": tinyserve_ops.__version__,
        "cpu_target": _runtime.cpu_target(),
        "threads": torch.get_num_threads(),
    } | _transformers()


def _transformers() -> dict[str, str]:
    try:
        return {"transformers": metadata.version("transformers")}
    except metadata.PackageNotFoundError:
        return {}


def load_average() -> float | None:
    """Runnable processes over the last minute: above the number of threads, a run was disturbed."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def append_records(records: Iterable[dict[str, Any]], output: Path) -> None:
    """Appends records to a file of JSON lines."""
    with output.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of such a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
