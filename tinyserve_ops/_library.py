"""Loads the compiled operators, once, at import. The only module that knows the library files by name.

Environment (read by the C++ side at first use): `TINYSERVE_CPU_TARGET` forces a CPU target for tests.
"""

from __future__ import annotations

from pathlib import Path

import torch

FOLDER = Path(__file__).parent
OPS_FILE = FOLDER / "_ops.so"
CUDA_OPS_FILE = FOLDER / "_ops_cuda.so"


def load() -> None:
    """Registers the ops with torch; the CUDA kernels only where torch itself was built for CUDA.

    Asking whether torch was built for CUDA, not whether a device is there, keeps the import free of driver
    calls and safe to fork after.

    Raises:
        ImportError: the extension was not built.
    """
    if not OPS_FILE.exists():
        raise ImportError(
            f"tinyserve_ops is not built: expected {OPS_FILE.name} beside {Path(__file__).name}. "
            "Run `pip install -e . --no-build-isolation` in the source folder, or install a wheel."
        )
    torch.ops.load_library(str(OPS_FILE))
    if torch.backends.cuda.is_built() and CUDA_OPS_FILE.exists():
        torch.ops.load_library(str(CUDA_OPS_FILE))
