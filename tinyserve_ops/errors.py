"""Exceptions of the library that callers are expected to catch by type.

Everything else is a plain `ValueError` (wrong value), `TypeError` (wrong type) or `RuntimeError` (wrong order
of calls).
"""

from __future__ import annotations

__all__ = ["OutOfPagesError"]


class OutOfPagesError(RuntimeError):
    """The page pool can't hold the tokens asked for. The call that raised it changed nothing.

    A scheduler catches it and preempts or waits; everyone else raises `max_tokens` or `max_kv_bytes`.

    Attributes:
        num_pages_needed: pages the call had to add at least.
        num_pages_free: pages it could have had (free or evictable) at the time.
        num_pages_total: capacity of the pool, in pages.
    """

    def __init__(
        self, message: str, *, num_pages_needed: int = 0, num_pages_free: int = 0, num_pages_total: int = 0
    ):
        super().__init__(message)
        self.num_pages_needed = num_pages_needed
        self.num_pages_free = num_pages_free
        self.num_pages_total = num_pages_total
