"""Every op of the library in plain fp32 PyTorch, one loop iteration per query row: the definition to read.

Same names, arguments and mutation as `tinyserve_ops.ops`. Slow on purpose: no vectorisation over rows, no
cleverness; the compiled ops are held to these functions (page summaries byte for byte), and these to float64
in the tests. Sources: Quest, arXiv 2406.10774 (page bounds and their score), TinyServe, arXiv 2509.12211
(the pipeline).
"""

from __future__ import annotations

from tinyserve_ops.reference.attention import attend_pages, merge_states, prefill_attention, sparse_decode
from tinyserve_ops.reference.pages import append_kv, copy_pages, gather_pages, scatter_pages, seal_pages
from tinyserve_ops.reference.scoring import score_pages
from tinyserve_ops.reference.selection import select_pages

__all__ = [
    "append_kv",
    "attend_pages",
    "copy_pages",
    "gather_pages",
    "merge_states",
    "prefill_attention",
    "scatter_pages",
    "score_pages",
    "seal_pages",
    "select_pages",
    "sparse_decode",
]
