"""Errors the command line turns into one readable line; everything else is a bug and keeps its traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """An option that cannot be honoured (exit code 2)."""


class SetupError(RuntimeError):
    """Something outside the options is missing or damaged: a package, a file, the built library (exit code
    1)."""
