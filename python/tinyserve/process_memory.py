"""Peak resident memory of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Most resident memory since the process started, in bytes; 0 where the system does not tell."""
    try:
        # Unlike ru_maxrss, this starts anew when a process is replaced by another program (exec).
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
