"""Methods of leaving keys and values out, on the same pages, ops and forwards.

`PagedKVCache(..., policy=)`, `TinyServeCache(..., policy=)` and `enable(model, ..., policy=)` take one of
these, or its name. None is the query-aware selection of the config.
"""

from __future__ import annotations

from tinyserve_ops.policies.base import Policy, SelectionPolicy, TokenRows
from tinyserve_ops.policies.entropy_stop import EntropyStop
from tinyserve_ops.policies.eviction import EvictionPolicy, Observed, SequenceTokens, keep_best
from tinyserve_ops.policies.full_cache import FullCache
from tinyserve_ops.policies.h2o import H2O
from tinyserve_ops.policies.oracle import Oracle
from tinyserve_ops.policies.plan import PolicyPlan
from tinyserve_ops.policies.pyramidkv import PyramidKV
from tinyserve_ops.policies.query_aware import QueryAware
from tinyserve_ops.policies.registry import from_dict, get, names, register, resolve
from tinyserve_ops.policies.snapkv import SnapKV
from tinyserve_ops.policies.soft_prune import SoftPrune
from tinyserve_ops.policies.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "EntropyStop",
    "EvictionPolicy",
    "FullCache",
    "Observed",
    "Oracle",
    "Policy",
    "PolicyPlan",
    "PyramidKV",
    "QueryAware",
    "SelectionPolicy",
    "SequenceTokens",
    "SnapKV",
    "SoftPrune",
    "StreamingLLM",
    "TokenRows",
    "from_dict",
    "get",
    "keep_best",
    "names",
    "register",
    "resolve",
]

for _policy_class in (
    EntropyStop,
    FullCache,
    H2O,
    Oracle,
    PyramidKV,
    QueryAware,
    SnapKV,
    SoftPrune,
    StreamingLLM,
):
    register(_policy_class)
