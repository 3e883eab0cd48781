"""The system on top of `tinyserve_ops`: today the demo application, later engine, server and evaluation.

Importing this package is cheap: torch, transformers and the library are imported by the modules that need
them.
"""

from __future__ import annotations
