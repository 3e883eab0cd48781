"""What a published number needs beside it: the machine, the commit, the versions."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Commit, machine, CPU target of the kernels, threads and versions of this process."""
    import torch
    import transformers

    import tinyserve_ops
    from tinyserve_ops import _runtime

    return {
        "commit": commit(),
        "machine": machine(),
        "cpu_target": _runtime.cpu_target(),
        "threads": torch.get_num_threads(),
        "tinyserve_ops": tinyserve_ops.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine() -> str:
    """Name of the CPU and number of its logical cores."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return f"{cpu}, {os.cpu_count()} logical cores"


def commit() -> str:
    """The commit that this package's files are of, "-dirty" when they differ from it; "unknown" outside a
    repository.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        found = ""
    return found or "unknown"
