"""The ablation "no fused op": the executor scores, selects and attends stage by stage, as for other policies.

`ops.sparse_decode` equals its three parts bit for bit, so only the time of a step can differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinyserve_ops.policies import QueryAware

__all__ = ["StagedQueryAware"]


@dataclass(frozen=True, kw_only=True)
class StagedQueryAware(QueryAware):
    """Query-aware selection that the executor may not fuse."""

    fused: ClassVar[bool] = False
