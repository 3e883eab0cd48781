"""Hands the C++ build to CMake: configure, build, install, in a kept build folder so that it is incremental.

The rest of the package is described in pyproject.toml; CMakeLists.txt is the only list of C++ sources.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Runs CMake once for all native files (honours TINYSERVE_BUILD_DIR and CMAKE_ARGS)."""

    def run(self) -> None:  # not build_extension: setuptools clears self.inplace around that
        prefix = ROOT if self.inplace else Path(self.build_lib).resolve()
        tag = str(sys.implementation.cache_tag)
        build = os.environ.get("TINYSERVE_BUILD_DIR", str(ROOT / "build" / tag))
        configure = ["cmake", "-S", str(ROOT), "-B", build, "-G", "Ninja"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        subprocess.check_call(configure)
        subprocess.check_call(["cmake", "--build", build])
        subprocess.check_call(["cmake", "--install", build, "--prefix", str(prefix)])

    def get_outputs(self) -> list[str]:
        return []


# The extension has no sources: it marks the wheel as binary and runs the command above.
setup(ext_modules=[Extension("tinyserve_ops._runtime", sources=[])], cmdclass={"build_ext": CMakeBuild})
