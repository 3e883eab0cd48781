"""Entry point of `python -m tinyserve`."""

from __future__ import annotations

import sys

from tinyserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
