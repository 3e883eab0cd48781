"""Peak resident memory of this process, per phase where the system allows it.

Linux lets a process reset its own high-water mark, so each phase gets its own peak; elsewhere the peak is
that of the whole run so far, and `reset_peak` says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): "reset the peak resident set size"


def reset_peak() -> bool:
    """Starts a new phase; False where the peak cannot be reset."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Most resident memory since the last successful `reset_peak` (or since the start), in bytes; 0 if
    unknown."""
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), flags=re.MULTILINE)
        if match is not None:
            return int(match.group(1)) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
