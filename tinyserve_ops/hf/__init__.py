"""The drop-in for Hugging Face transformers: `enable(model)`, then `model.generate(...)` as before.

The only package of the library that imports transformers (4.57 or newer, below 6). Importing it registers an
attention name and changes nothing else; see `handle.py` for what `enable` changes and how it is undone.
"""

from __future__ import annotations

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "tinyserve_ops.hf: expected transformers >= 4.57, < 6 to be installed (pip install transformers)"
    ) from error

if tuple(int(part) for part in _transformers.__version__.split(".")[:2]) < (4, 57):
    raise ImportError(
        f"tinyserve_ops.hf: expected transformers >= 4.57, < 6, got {_transformers.__version__}"
    )

from tinyserve_ops.hf.attention import register
from tinyserve_ops.hf.cache import TinyServeCache
from tinyserve_ops.hf.handle import Handle, disable, enable
from tinyserve_ops.hf.packed import PackedBatch, new_paged_cache

__all__ = ["Handle", "PackedBatch", "TinyServeCache", "disable", "enable", "new_paged_cache"]

register()
