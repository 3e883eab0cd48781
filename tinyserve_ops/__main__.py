"""`python -m tinyserve_ops`: what a bug report needs. A missing part is a line of output, not a crash."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

_LIBRARIES = ("libtinyserve_core.so", "_ops.so", "_ops_cuda.so", "_runtime")


def main() -> int:
    """Prints the report; exit status 0 when the compiled ops can be used, else 1."""
    folder = Path(__file__).parent
    usable, ops_state = _ops_state()
    lines = [
        ("tinyserve_ops", f"{_version('tinyserve_ops')} in {folder}"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", _version("torch")),
        ("transformers", _version("transformers")),
        ("compiled ops", ops_state),
        ("CPU target", _guard(_cpu_target)),
        ("CUDA", _guard(_cuda)),
    ]
    lines += [(name, _library_file(folder, name)) for name in _LIBRARIES]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")
    return 0 if usable else 1


def _guard(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception as error:  # whatever is broken is what the report is for
        message = (str(error).splitlines() or ["no message"])[0]
        return f"not available ({type(error).__name__}: {message})"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec(package) is None:
        return "not installed"
    module = sys.modules.get(package)
    return f"{getattr(module, '__version__', 'unknown version')} (not installed as a package)"


def _ops_state() -> tuple[bool, str]:
    state = _guard(_load_ops)
    return state == "loaded", state


def _load_ops() -> str:
    importlib.import_module("tinyserve_ops._library").load()
    torch = importlib.import_module("torch")
    assert callable(torch.ops.tinyserve.sparse_decode)  # AttributeError if it was not registered
    return "loaded"


def _cpu_target() -> str:
    runtime = importlib.import_module("tinyserve_ops._runtime")
    return f"{runtime.cpu_target()} (available: {', '.join(runtime.available_cpu_targets())})"


def _cuda() -> str:
    torch = importlib.import_module("torch")
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch is built for CUDA {torch.version.cuda}, no usable device"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _library_file(folder: Path, name: str) -> str:
    found = sorted(folder.glob(name if name.endswith(".so") else f"{name}*.so"))
    if not found:
        return "not built"
    return ", ".join(f"{path.name} ({path.stat().st_size / 1024:.0f} KiB)" for path in found)


if __name__ == "__main__":
    sys.exit(main())
