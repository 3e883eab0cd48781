"""Where the CUDA ops over the emulator lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def find_library() -> Path | None:
    """The library file in CMake's folder; None where the C++ tests, or their emulator, were not built."""
    default = ROOT / "build" / str(sys.implementation.cache_tag)
    file = Path(os.environ.get("TINYSERVE_BUILD_DIR", default)) / "_ops_emulated.so"
    return file if file.exists() else None
