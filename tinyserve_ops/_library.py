"""Loads the compiled operators: those of the CPU at import, those of CUDA when a GPU is first used.

The only module that knows the library files by name.

Environment (read by the C++ side at first use): `TINYSERVE_CPU_TARGET` forces a CPU target for tests.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
OPS_FILE = FOLDER / "_ops.so"
CUDA_OPS_FILE = FOLDER / "_ops_cuda.so"

# The kernels copy asynchronously into shared memory (cp.async), which began with sm_80.
_MIN_CAPABILITY = (8, 0)
# What CUDA says of a GPU for which the library holds no code.
_NO_CODE = ("no kernel image", "unsupported toolchain")

_cuda_is_ready = False
_fallback: torch.library.Library | None = None  # its registrations live as long as it


def load() -> None:
    """Registers the ops with torch, for the CPU.

    Raises:
        ImportError: the extension was not built.
    """
    if not OPS_FILE.exists():
        raise ImportError(
            f"tinyserve_ops is not built: expected {OPS_FILE.name} beside {Path(__file__).name}. "
            "Run `pip install -e . --no-build-isolation` in the source folder, or install a wheel."
        )
    torch.ops.load_library(str(OPS_FILE))


def load_cuda(device: torch.device) -> None:
    """Registers the ops for CUDA, once in a process: the kernels or, where they do not run on `device`, the
    reference with a warning. Nothing where torch or this build has no CUDA.

    Not part of the import, which so makes no call to the driver and is safe to fork after.
    """
    global _cuda_is_ready
    if _cuda_is_ready or not torch.backends.cuda.is_built() or not CUDA_OPS_FILE.exists():
        return
    reason = _why_kernels_do_not_run(device)
    if reason is not None:
        warnings.warn(
            f"tinyserve_ops has no CUDA kernels for {device} ({reason}); its ops run as plain PyTorch there, "
            "which is right and very slow",
            RuntimeWarning,
            stacklevel=2,
        )
        _register_reference()
    _cuda_is_ready = True


def _why_kernels_do_not_run(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"expected sm_80 or newer, got sm_{capability[0]}{capability[1]}"
    torch.ops.load_library(str(CUDA_OPS_FILE))
    try:
        _launch_a_kernel(device)
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_CODE):
            raise
        return f"this build holds no code for sm_{capability[0]}{capability[1]}"
    return None


def _launch_a_kernel(device: torch.device) -> None:
    torch.ops.tinyserve.merge_states(
        torch.zeros(1, 1, 1, 8, device=device), torch.zeros(1, 1, 1, device=device)
    )


def _register_reference() -> None:
    global _fallback
    reference = importlib.import_module("tinyserve_ops.reference")
    _fallback = torch.library.Library("tinyserve", "IMPL")
    with warnings.catch_warnings():
        # Kernels without code for this GPU may be registered already; replacing them is the point.
        warnings.simplefilter("ignore")
        for name in reference.__all__:
            _fallback.impl(
                name, on_device_of_arguments(getattr(reference, name)), "CUDA", allow_override=True
            )


def on_device_of_arguments(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op of the reference, which makes tensors on torch's default device, for tensors of any device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = (arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
        with next(tensors).device:
            return op(*args, **kwargs)

    return run
