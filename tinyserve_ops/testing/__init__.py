"""What tests and benchmarks of the ops share: inputs, an independent oracle, comparison, implementations.

Nothing here computes with the ops or with `reference`; inputs are hostile by default (shuffled page ids, NaN
in every slot that no token fills), so that reading one slot too many shows.
"""

from __future__ import annotations

from tinyserve_ops.testing.batches import DTYPE_PAIRS, LAYOUTS, Batch, make_batch, make_pools, make_scales
from tinyserve_ops.testing.compare import assert_close, assert_refused, assert_same_bits, tolerance
from tinyserve_ops.testing.implementations import (
    IMPLEMENTATION_NAMES,
    Implementation,
    emulated_implementation,
    get_implementation,
)
from tinyserve_ops.testing.int8_rows import as_stored, expected_rows
from tinyserve_ops.testing.oracle import (
    attention_oracle,
    attention_tolerance,
    read_low_rank,
    read_summary,
    score_oracle,
    score_tolerance,
)
from tinyserve_ops.testing.views import fused_views, strided_views

__all__ = [
    "DTYPE_PAIRS",
    "IMPLEMENTATION_NAMES",
    "LAYOUTS",
    "Batch",
    "Implementation",
    "as_stored",
    "assert_close",
    "assert_refused",
    "assert_same_bits",
    "attention_oracle",
    "attention_tolerance",
    "emulated_implementation",
    "expected_rows",
    "fused_views",
    "get_implementation",
    "make_batch",
    "make_pools",
    "make_scales",
    "read_low_rank",
    "read_summary",
    "score_oracle",
    "score_tolerance",
    "strided_views",
    "tolerance",
]
