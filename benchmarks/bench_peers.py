"""SmolLM2-135M (the 4-bit GGUF) in other engines on this machine: milliseconds per token at a depth.

    python benchmarks/bench_peers.py [--python .venv-peers/bin/python] [--depth 8000] [--output FILE.jsonl]

Each engine runs in a process of its own, with the Python of an environment that holds the engines; one that
is not installed there is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from benchmarks.common import append_records, environment, load_average  # noqa: E402
from tinyserve.errors import SetupError  # noqa: E402
from tinyserve.models import smollm2_gguf  # noqa: E402

# Module to import -> package to install.
ENGINES = {
    "openvino_genai": "openvino-genai",
    "ik_llama_cpp": "ik-llama-cpp-python",
    "llama_cpp": "llama-cpp-python",
}


def is_installed(python: Path, module: str) -> bool:
    """Whether that interpreter can import the engine."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def run_engine(package: str, gguf: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of one engine's variants; an engine that fails says so and gives none."""
    script = ROOT / "benchmarks" / "peers" / f"run_{package.replace('-', '_')}.py"
    command = [str(options.python), str(script), str(gguf)]
    for name in ("depth", "steps", "warmup", "threads", "seed"):
        command += [f"--{name}", str(getattr(options, name))]
    variables = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"bench_peers: {package} failed with status {done.returncode}: {last}", file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [record_of(json.loads(line), options) for line in lines]


def record_of(result: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The form of the other benchmarks' records."""
    seconds = result.pop("step_seconds")
    if len(seconds) != options.steps:
        raise RuntimeError(f"{result['engine']}: expected {options.steps} decoded tokens, got {len(seconds)}")
    median, minimum = statistics.median(seconds), min(seconds)
    return {
        "benchmark": "peers",
        **result,
        "model": "SmolLM2-135M-Instruct.Q4_1",
        "context": options.depth,
        "batch": 1,
        "median_ms": round(1e3 * median, 3),
        "minimum_ms": round(1e3 * minimum, 3),
        "tokens_per_second": round(1 / median, 2),
        "steps": options.steps,
        "seed": options.seed,
        "load_average": load_average(),
        **environment(),
        "threads": options.threads,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| engine | variant | KV | median ms | minimum ms | tokens/s | prefill s |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for record in records:
        cells = [record["engine"], record["variant"], record["kv_dtype"], f"{record['median_ms']:.1f}"]
        cells += [
            f"{record['minimum_ms']:.1f}",
            f"{record['tokens_per_second']:.1f}",
            f"{record['prefill_seconds']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(".venv-peers/bin/python"), help="of the engines")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES.values()), choices=ENGINES.values())
    parser.add_argument("--depth", type=int, default=8000, help="tokens cached before the measured ones")
    parser.add_argument("--steps", type=int, default=20, help="measured tokens")
    parser.add_argument("--warmup", type=int, default=3, help="tokens before them, not measured")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0, help="picks the tokens")
    parser.add_argument("--output", type=Path, default=None, help="append the JSON lines to this file too")
    options = parser.parse_args()
    if not options.python.exists():
        print(f"bench_peers: no {options.python}; `make bench-peers` makes it", file=sys.stderr)
        return 1
    try:
        gguf = smollm2_gguf()
    except SetupError as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 1
    records = []
    for module, package in ENGINES.items():
        if package not in options.engines:
            continue
        if not is_installed(options.python, module):
            print(
                f"bench_peers: {package} skipped, not installed: {options.python} -m pip install {package}",
                file=sys.stderr,
            )
            continue
        found = run_engine(package, gguf, options)
        for record in found:
            print(json.dumps(record), flush=True)
        if options.output is not None:
            append_records(found, options.output)
        records += found
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
