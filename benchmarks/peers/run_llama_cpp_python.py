"""llama.cpp through llama-cpp-python, with flash attention and without."""

from __future__ import annotations

import time

import llama_cpp
from arguments import parse, report


def main() -> None:
    arguments = parse()
    tokens = arguments.token_ids()
    for flash_attention in (True, False):
        engine = llama_cpp.Llama(
            arguments.model,
            n_ctx=len(tokens) + 64,
            n_batch=512,
            n_ubatch=512,
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            flash_attn=flash_attention,
            verbose=False,
        )
        start = time.perf_counter()
        engine.eval(tokens[: arguments.depth])
        prefill = time.perf_counter() - start
        steps = []
        for token in tokens[arguments.depth :]:
            start = time.perf_counter()
            engine.eval([token])
            steps.append(time.perf_counter() - start)
        report(
            arguments,
            engine="llama-cpp-python",
            version=llama_cpp.__version__,
            variant=f"flash attention {'on' if flash_attention else 'off'}",
            kv="f16",
            prefill_seconds=prefill,
            step_seconds=steps,
        )
        engine.close()


main()
