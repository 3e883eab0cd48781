"""Methods of leaving keys and values out, on the same pages, ops and forwards.

`PagedKVCache(..., policy=)`, `TinyServeCache(..., policy=)` and `enable(model, ..., policy=)` take one of
these, or its name. None is the query-aware selection of the config.
"""

from __future__ import annotations

from tinyserve_ops.policies.base import Policy, SelectionPolicy, TokenRows
from tinyserve_ops.policies.full_cache import FullCache
from tinyserve_ops.policies.oracle import Oracle
from tinyserve_ops.policies.query_aware import QueryAware
from tinyserve_ops.policies.registry import from_dict, get, names, register, resolve
from tinyserve_ops.policies.streaming_llm import StreamingLLM

__all__ = [
    "FullCache",
    "Oracle",
    "Policy",
    "QueryAware",
    "SelectionPolicy",
    "StreamingLLM",
    "TokenRows",
    "from_dict",
    "get",
    "names",
    "register",
    "resolve",
]

for _policy_class in (FullCache, Oracle, QueryAware, StreamingLLM):
    register(_policy_class)
