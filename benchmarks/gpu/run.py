"""The setups of a run on a GPU, their records and their table: `python -m benchmarks.ops --device cuda`."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import append_records, environment
from benchmarks.gpu import variants as variants_of
from benchmarks.gpu.layers import Layers, Setup
from benchmarks.gpu.timing import copy_gbps, time_variants

_32K, _128K = 32768, 131072
LLAMA = (32, 8, 128)
SETUPS = (
    Setup(*LLAMA, _32K, batch=1),
    Setup(*LLAMA, _128K, batch=1),
    Setup(*LLAMA, _32K, batch=32),
    Setup(*LLAMA, _32K, batch=64),
    Setup(*LLAMA, _32K, batch=32, dtype="int8"),
    Setup(9, 3, 64, _32K, batch=1),
    Setup(9, 3, 64, _32K, batch=64),
)
QUICK = SETUPS[:1]
SCORERS = ("bounds", "mean_std", "low_rank")
BUDGET_TOKENS = 2048
_L2_FACTOR = 4
_LARGEST_SHARE = 0.4  # of the device's memory, for the pools of a setup; its peers' copies take as much again
FIELDS = (
    "setup", "variant", "median_us", "min_us", "bytes", "gbps", "of_copy", "byte_ratio", "speed_up", "phi",
)  # fmt: skip


def measure_setup(
    setup: Setup,
    device: str,
    copy_rate: float,
    *,
    l2_bytes: int,
    memory_bytes: int,
    repetitions: int = 30,
    peers: tuple[str, ...] = variants_of.PEERS,
) -> list[dict[str, Any]]:
    """Records of one setup: our dense kernel first, which the rest is compared with."""
    scorers = tuple(scorer for scorer in SCORERS if _can_seal(scorer, setup, device))
    budget = min(BUDGET_TOKENS, setup.length // 4)
    ratio = int(0.3 * setup.length)
    smallest = setup.kv_bytes(budget // setup.page_size)
    all_bytes = setup.kv_bytes(setup.pages_per_sequence) + sum(map(setup.summary_bytes, scorers))
    wanted = -(-_L2_FACTOR * l2_bytes // smallest)
    num_layers = max(1, min(wanted, int(_LARGEST_SHARE * memory_bytes) // all_bytes))
    layers = Layers(setup, num_layers, scorers, device)
    found = [variants_of.dense(layers)]
    found += [variants_of.sparse(layers, scorer, budget) for scorer in scorers]
    found += [
        variants_of.sparse(layers, "bounds", ratio),
        variants_of.sparse(layers, "bounds", budget, append=True),
    ]
    found += variants_of.peers(layers, peers)
    timings = time_variants(found, num_layers, device, repetitions)
    records = []
    for variant in found:
        if variant.name not in timings:
            continue
        timing, reference = timings[variant.name], timings[found[0].name]
        byte_ratio, speed_up = found[0].num_bytes / variant.num_bytes, reference.median_us / timing.median_us
        gbps = variant.num_bytes / timing.median_us / 1e3
        records.append(
            {
                "benchmark": "gpu",
                "setup": _label(setup),
                **asdict(setup),
                "variant": variant.name,
                **variant.facts,
                "median_us": round(timing.median_us, 3),
                "min_us": round(timing.min_us, 3),
                "repetitions": repetitions,
                "layers": num_layers,
                "bytes": variant.num_bytes,
                "l2_bytes": l2_bytes,
                "cold": num_layers * variant.num_bytes >= _L2_FACTOR * l2_bytes,
                "gbps": round(gbps, 2),
                "copy_gbps": round(copy_rate, 2),
                "of_copy": round(gbps / copy_rate, 4),
                "byte_ratio": round(byte_ratio, 4),
                "speed_up": round(speed_up, 4),
                "phi": round(speed_up / byte_ratio, 4),
            }
        )
    return records


def run(output: Path, *, quick: bool, repetitions: int | None = None) -> int:
    """Measures on the current GPU; writes gpu.jsonl and gpu.md into the folder `output`."""
    if not torch.cuda.is_available():
        print("benchmarks: --device cuda needs a GPU and a torch with CUDA; there is none here")
        return 2
    device = torch.cuda.get_device_properties(0)
    output.mkdir(parents=True, exist_ok=True)
    (output / "gpu.jsonl").unlink(missing_ok=True)
    shared = environment() | {"gpu": device.name, "torch_cuda": torch.version.cuda}
    rate = copy_gbps("cuda")
    lines = [f"# {device.name}", "", f"copy: {rate:.0f} GB/s read and written", ""]
    for setup in QUICK if quick else SETUPS:
        print(f"\n## {_label(setup)}\n", flush=True)
        with torch.inference_mode():
            records = measure_setup(
                setup,
                "cuda",
                rate,
                repetitions=repetitions or 30,
                l2_bytes=device.L2_cache_size,
                memory_bytes=device.total_memory,
            )
        torch.cuda.empty_cache()
        records = [shared | record | {"sm_clock": _sm_clock()} for record in records]
        append_records(records, output / "gpu.jsonl")
        text = table(records)
        print(text, flush=True)
        lines += [f"## {_label(setup)}", "", text, ""]
        (output / "gpu.md").write_text("\n".join(lines))
    return 0


def table(records: list[dict[str, Any]]) -> str:
    """phi is the share of the speed-up over our dense kernel that the bytes saved would give."""
    titles = FIELDS[1:]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "--:|" * (len(titles) - 1)]
    lines += ["| " + " | ".join(str(record[title]) for title in titles) + " |" for record in records]
    return "\n".join(lines)


def _label(setup: Setup) -> str:
    shape = f"{setup.num_heads}/{setup.num_kv_heads}/{setup.head_dim}"
    return f"{shape} {setup.dtype} {setup.length // 1024}K x{setup.batch}"


def _can_seal(scorer: str, setup: Setup, device: str) -> bool:
    tiny = Setup(setup.num_kv_heads, setup.num_kv_heads, setup.head_dim, setup.page_size, 1, setup.dtype)
    try:
        Layers(tiny, 1, (scorer,), device)
    except ValueError as error:
        print(f"left out: {scorer}: {error}", flush=True)
        return False
    return True


def _sm_clock() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
