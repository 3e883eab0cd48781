"""ik_llama.cpp through its wheel (AVX2 code); flash attention is off on CPUs without AVX-VNNI."""

from __future__ import annotations

import time

import ik_llama_cpp
from arguments import parse, report
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp.llama import make_batch_range, make_batch_single

CHUNK = 512


def main() -> None:
    arguments = parse()
    tokens = arguments.token_ids()
    engine = ik_llama_cpp.IkLlama(
        arguments.model, n_ctx=len(tokens) + 64, n_threads=arguments.threads, verbose=False
    )
    context = engine._context

    def decode(batch: object) -> float:
        start = time.perf_counter()
        code = context.decode(batch)
        seconds = time.perf_counter() - start
        api.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode: expected 0, got {code}")
        return seconds

    prefill = 0.0
    for start in range(0, arguments.depth, CHUNK):
        chunk = tokens[start : min(start + CHUNK, arguments.depth)]
        prefill += decode(
            make_batch_range(chunk, pos_start=start, logits_last=start + CHUNK >= arguments.depth)
        )
    steps = [decode(make_batch_single(tokens[i], i)) for i in range(arguments.depth, len(tokens))]
    report(
        arguments,
        engine="ik-llama-cpp-python",
        version=ik_llama_cpp.__version__,
        variant="flash attention on" if engine._has_vnni else "flash attention off (no AVX-VNNI)",
        kv="f16",
        prefill_seconds=prefill,
        step_seconds=steps,
    )


main()
