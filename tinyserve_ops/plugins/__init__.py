"""Changes at the stages of the pipeline, on top of whatever policy there is; they stack.

`PagedKVCache(..., plugins=)`, `TinyServeCache(..., plugins=)` and `enable(model, ..., plugins=)` take a list
of these, their names or dicts. None, an empty list and plugins that are not enabled are the same.
"""

from __future__ import annotations

from tinyserve_ops.plugins.approximate_attention import ApproximateAttention
from tinyserve_ops.plugins.base import (
    STAGES,
    LayerLogits,
    PageEvicted,
    Plugin,
    PluginRun,
    PrefillDone,
    Selection,
    StepRows,
)
from tinyserve_ops.plugins.early_exit import EarlyExit
from tinyserve_ops.plugins.registry import PluginLike, from_dict, get, names, register, resolve
from tinyserve_ops.plugins.stack import PluginStack
from tinyserve_ops.plugins.token_pruning import TokenPruning

__all__ = [
    "STAGES",
    "ApproximateAttention",
    "EarlyExit",
    "LayerLogits",
    "PageEvicted",
    "Plugin",
    "PluginLike",
    "PluginRun",
    "PluginStack",
    "PrefillDone",
    "Selection",
    "StepRows",
    "TokenPruning",
    "from_dict",
    "get",
    "names",
    "register",
    "resolve",
]

for _plugin_class in (ApproximateAttention, EarlyExit, TokenPruning):
    register(_plugin_class)
