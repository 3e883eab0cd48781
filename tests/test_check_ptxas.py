"""tools/check_ptxas.py on reports as ptxas writes them, and its table against the kernels there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYMBOL = "_ZN9tinyserve4cuda16append_kv_kernelI13__nv_bfloat16EEvNS_4core19AppendKvBatchParamsENS3_6ScorerE"


def entry(registers: int, stack: int = 0, spilled: int = 0, symbol: str = SYMBOL, arch: str = "sm_80") -> str:
    return f"""ptxas info    : Compiling entry function '{symbol}' for '{arch}'
ptxas info    : Function properties for {symbol}
    {stack} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used {registers} registers, used 0 barriers, 760 bytes cmem[0]
ptxas info    : Compile time = 22.273 ms
"""


def check(tmp_path: Path, log: str, budget: str = "append_kv_kernel 64 16  # why\n") -> tuple[int, str]:
    (tmp_path / "budget").write_text(budget)
    (tmp_path / "log").write_text(log)
    command = [
        sys.executable,
        str(ROOT / "tools/check_ptxas.py"),
        str(tmp_path / "budget"),
        str(tmp_path / "log"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_kernels_within_their_budget_pass_and_are_listed(tmp_path: Path) -> None:
    code, text = check(tmp_path, "[1/2] Building\n" + entry(64) + entry(60, stack=16, arch="sm_90"))
    assert code == 0, text
    assert len(re.findall(r"append_kv_kernel +sm_[89]0 +1 instances, (6[40]) to \1 registers", text)) == 2


def test_what_goes_over_the_budget_is_named(tmp_path: Path) -> None:
    for log, message in [
        (entry(64) + entry(65, arch="sm_90"), "sm_90 .*at most 64 registers, got 65"),
        (entry(64, stack=24), "at most 16 bytes of stack, got 24"),
        (entry(64, stack=16, spilled=8), "expected no spills, got 16 bytes"),
        (entry(64) + entry(8, symbol="_Z5otherPf"), "other for sm_80 .*expected a line in the table"),
        ("[1/2] Building\n", "append_kv_kernel: has a budget, but was not compiled"),
    ]:
        code, text = check(tmp_path, log)
        assert code == 1
        assert re.search(message, text), text


def test_every_kernel_has_a_budget() -> None:
    lines = (ROOT / "tools/ptxas_budget.txt").read_text().splitlines()
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").glob("*.cuh")))
    kernels = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", sources)
    assert kernels
    assert sorted(line.split()[0] for line in lines if line and line[0] != "#") == sorted(kernels)
