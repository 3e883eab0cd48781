"""Holds the CUDA kernels to their budget of registers and stack, and to no spills, for every architecture.

Usage: check_ptxas.py BUDGET LOG. LOG is what ptxas printed while the kernels were built (nvcc -Xptxas -v).
BUDGET has a line for each kernel: its name, the most registers, the most bytes of stack. A kernel without a
line is an error, so is a line without a kernel. All instantiations of a kernel share its line.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    kernel: str
    symbol: str
    arch: str
    registers: int
    stack_bytes: int
    spilled_bytes: int


def kernel_name(symbol: str) -> str:
    """The function's own name: the last of the length-prefixed parts that a mangled name begins with."""
    rest = re.sub(r"^_ZN?", "", symbol)
    name = symbol
    while found := re.match(r"(\d+)", rest):
        length = int(found[1])
        name = rest[found.end() : found.end() + length]
        rest = rest[found.end() + length :]
    return name


def read_report(text: str) -> list[Compiled]:
    pattern = re.compile(
        r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'"
        r".*?(?P<stack>\d+) bytes stack frame"
        r", (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        Compiled(
            kernel=kernel_name(found["symbol"]),
            symbol=found["symbol"],
            arch=found["arch"],
            registers=int(found["registers"]),
            stack_bytes=int(found["stack"]),
            spilled_bytes=int(found["stores"]) + int(found["loads"]),
        )
        for found in pattern.finditer(text)
    ]


def read_budgets(text: str) -> dict[str, tuple[int, int]]:
    budgets = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            name, registers, stack_bytes = words
            budgets[name] = (int(registers), int(stack_bytes))
    return budgets


def complaints(report: list[Compiled], budgets: dict[str, tuple[int, int]]) -> list[str]:
    found = []
    for one in report:
        where = f"{one.kernel} for {one.arch} ({one.symbol})"
        if one.kernel not in budgets:
            found.append(f"{where}: expected a line in the table of budgets, got none")
            continue
        registers, stack_bytes = budgets[one.kernel]
        if one.registers > registers:
            found.append(f"{where}: expected at most {registers} registers, got {one.registers}")
        if one.stack_bytes > stack_bytes:
            found.append(f"{where}: expected at most {stack_bytes} bytes of stack, got {one.stack_bytes}")
        if one.spilled_bytes > 0:
            found.append(f"{where}: expected no spills, got {one.spilled_bytes} bytes")
    compiled = {one.kernel for one in report}
    found += [f"{name}: has a budget, but was not compiled" for name in budgets if name not in compiled]
    return found


def main(budget_file: str, log_file: str) -> None:
    report = read_report(Path(log_file).read_text())
    for kernel, arch in sorted({(one.kernel, one.arch) for one in report}):
        instances = [one for one in report if (one.kernel, one.arch) == (kernel, arch)]
        registers = [one.registers for one in instances]
        print(
            f"{kernel:24} {arch} {len(instances):3} instances, {min(registers)} to {max(registers)} registers"
        )
    if found := complaints(report, read_budgets(Path(budget_file).read_text())):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
