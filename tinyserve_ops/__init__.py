"""Query-aware sparse decode attention over a paged KV cache, for PyTorch.

`enable(model, ...)` swaps the attention of a Hugging Face model; `PagedKVCache` and `ops` are the parts to
build on. Importing loads the compiled operators and nothing else: no hook, no download, no CUDA
initialisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinyserve_ops import _library

_library.load()

from tinyserve_ops import fakes as _fakes  # noqa: E402, F401  (registers; needs the loaded ops)
from tinyserve_ops import ops, plugins, policies, reference  # noqa: E402
from tinyserve_ops.cache import PagedKVCache  # noqa: E402
from tinyserve_ops.config import SparseConfig  # noqa: E402
from tinyserve_ops.errors import OutOfPagesError  # noqa: E402
from tinyserve_ops.memory import MemoryEstimate, estimate_memory  # noqa: E402
from tinyserve_ops.pools import PagePool  # noqa: E402
from tinyserve_ops.stats import CacheStats  # noqa: E402

if TYPE_CHECKING:
    from tinyserve_ops.hf import disable, enable

__version__ = "0.1.0"

__all__ = [
    "CacheStats",
    "MemoryEstimate",
    "OutOfPagesError",
    "PagePool",
    "PagedKVCache",
    "SparseConfig",
    "disable",
    "enable",
    "estimate_memory",
    "ops",
    "plugins",
    "policies",
    "reference",
]


def __getattr__(name: str) -> Any:
    # transformers is imported with the first use of the drop-in, not with the library.
    if name in ("enable", "disable"):
        from tinyserve_ops import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
