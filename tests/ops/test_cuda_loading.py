"""When the CUDA ops are loaded, and what stands in for kernels that do not run on a GPU; without a GPU.

Registrations are global, so each case has a process of its own, in which torch says that there is a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import torch

from tinyserve_ops import _library, reference
from tinyserve_ops.testing import assert_same_bits, make_batch

PRETENDED = """
import warnings
import torch

loaded = []
real_load = torch.ops.load_library
def load_library(path):
    loaded.append(path.rpartition("/")[2])
    if loaded[-1] != "_ops_cuda.so":
        real_load(path)
torch.ops.load_library = load_library
torch.backends.cuda.is_built = lambda: True
torch.cuda.get_device_capability = lambda device=None: CAPABILITY

import tinyserve_ops
from tinyserve_ops import _library, pools, reference
import pathlib
_library.CUDA_OPS_FILE = pathlib.Path(_library.OPS_FILE).with_name("_ops_cuda.so")
pathlib.Path.exists = lambda path: True

def registered():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in reference.__all__ if has(f"tinyserve::{name}", "CUDA")}

def load_twice():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            _library.load_cuda(torch.device("cuda", 0))
    return [str(warning.message) for warning in found]
"""


def run(code: str, capability: tuple[int, int] = (9, 0)) -> None:
    program = PRETENDED.replace("CAPABILITY", repr(capability)) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_import_loads_nothing_for_cuda() -> None:
    run("""
        assert loaded == ["_ops.so"], loaded
        assert not torch.cuda.is_initialized()
    """)


def test_kernels_are_loaded_once_and_with_a_pool_on_the_gpu() -> None:
    run("""
        launched = []
        _library._launch_a_kernel = launched.append
        try:
            pools._device_with_kernels("cuda:0")
        except ValueError as error:
            assert "no cuda kernels in this build" in str(error)  # the pretended file registers none
        assert load_twice() == []
        assert loaded == ["_ops.so", "_ops_cuda.so"], loaded
        assert launched == [torch.device("cuda", 0)]
    """)


def test_a_gpu_before_sm_80_gets_the_reference_and_one_warning() -> None:
    run(
        """
        [warning] = load_twice()
        assert "sm_75" in warning and "sm_80 or newer" in warning, warning
        assert loaded == ["_ops.so"], loaded
        assert registered() == set(reference.__all__)
        assert pools._device_with_kernels("cuda") == torch.device("cuda")
        """,
        capability=(7, 5),
    )


def test_a_gpu_without_code_gets_the_reference_and_one_warning() -> None:
    run("""
        def launch(device):
            raise RuntimeError("merge_states: no kernel image is available for execution on the device")
        _library._launch_a_kernel = launch
        [warning] = load_twice()
        assert "no code for sm_90" in warning, warning
        assert registered() == set(reference.__all__)
    """)


def test_another_error_of_the_gpu_is_not_hidden() -> None:
    run("""
        def launch(device):
            raise RuntimeError("merge_states: an illegal memory access was encountered")
        _library._launch_a_kernel = launch
        try:
            load_twice()
        except RuntimeError as error:
            assert "illegal memory access" in str(error)
        else:
            raise AssertionError("no error")
        assert registered() == set()
    """)


def test_without_cuda_in_torch_nothing_is_loaded() -> None:
    run("""
        torch.backends.cuda.is_built = lambda: False
        assert load_twice() == []
        assert loaded == ["_ops.so"], loaded
    """)


def test_the_reference_runs_on_the_device_of_its_arguments() -> None:
    batch = make_batch([40, 7], scorer="bounds")
    batch.seal(reference.seal_pages)
    expected = batch.run(reference.sparse_decode)
    for device in ("cpu", "meta"):  # whatever the default is
        with torch.device(device):
            arguments = batch.arguments(reference.sparse_decode)
            actual = _library.on_device_of_arguments(reference.sparse_decode)(**arguments)
        for got, want in zip(actual, expected, strict=True):
            assert_same_bits(got, want)
