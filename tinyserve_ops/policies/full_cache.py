"""Full attention: every step reads every page. What the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinyserve_ops.policies.base import Policy

__all__ = ["FullCache"]


@dataclass(frozen=True, kw_only=True)
class FullCache(Policy):
    """Nothing is left out; budgets of the config are not looked at."""

    name: ClassVar[str] = "full_cache"
    reads_all: ClassVar[bool] = True
    reservable: ClassVar[bool] = True
