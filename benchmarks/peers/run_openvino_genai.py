"""OpenVINO GenAI on a GGUF file: paged attention with u8 KV (its default), f32 KV, and u8 with eviction."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai as genai
from arguments import parse, report

EVICTED_TO = 1024  # tokens; what the sparse variants of ours keep, too, but those choose anew for each query


def scheduler(tokens: int | None) -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.cache_size = 4  # GB
    config.enable_prefix_caching = False
    if tokens is not None:
        config.use_cache_eviction = True
        config.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=32,
            recent_size=128,
            max_cache_size=tokens,
            aggregation_mode=genai.AggregationMode.NORM_SUM,
        )
    return config


def main() -> None:
    arguments = parse()
    prompt = openvino.Tensor(np.array([arguments.token_ids()[: arguments.depth]], dtype=np.int64))
    generation = genai.GenerationConfig()
    generation.max_new_tokens = 1 + arguments.warmup + arguments.steps
    generation.ignore_eos = True
    variants = (
        ("PagedAttention", "u8", None),
        ("PagedAttention", "f32", None),
        (f"PagedAttention, eviction to {EVICTED_TO}", "u8", EVICTED_TO),
    )
    for variant, kv, tokens in variants:
        pipeline = genai.LLMPipeline(
            arguments.model,
            "CPU",
            scheduler_config=scheduler(tokens),
            INFERENCE_NUM_THREADS=arguments.threads,
            KV_CACHE_PRECISION=kv,
        )
        metrics = pipeline.generate(prompt, generation).perf_metrics.raw_metrics
        # Microseconds of each token after the first; that one is the prefill.
        steps = [duration * 1e-6 for duration in metrics.m_durations][-(generation.max_new_tokens - 1) :]
        report(
            arguments,
            engine="openvino-genai",
            version=genai.get_version(),
            variant=variant,
            kv=kv,
            prefill_seconds=metrics.m_times_to_first_token[0] * 1e-6,
            step_seconds=steps,
        )
        del pipeline


main()
