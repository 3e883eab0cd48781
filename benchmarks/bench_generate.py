"""Milliseconds per token on SmolLM2: unpatched sdpa with its default and static cache, ours dense and sparse.

All variants of one context length and dtype hold the same K and V and take turns, token by token, in one
process: a busy machine slows all of them, and only ratios within a run mean anything. After each run counters
and caches are checked; a path that was not the one asked for aborts the benchmark.

    python benchmarks/bench_generate.py [--context 4096 8128] [--dtype float32 bfloat16] [--output FILE.jsonl]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Runs from a checkout as well as from an installed package.
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "python")]

import torch  # noqa: E402
from transformers import DynamicCache, PreTrainedModel, StaticCache  # noqa: E402

import tinyserve_ops  # noqa: E402
from benchmarks.common import WrongPath, append_records, environment, expect, load_average  # noqa: E402
from benchmarks.overhead import overhead_us_per_layer  # noqa: E402
from tinyserve.decode import Decoder, share_weights  # noqa: E402
from tinyserve.models import load_model, smollm2_folder  # noqa: E402
from tinyserve.needles import build_prompt, make_needle  # noqa: E402
from tinyserve.progress import bar  # noqa: E402
from tinyserve.texts import load_play  # noqa: E402
from tinyserve_ops.hf import TinyServeCache  # noqa: E402

OVERHEAD_STEPS = 8  # further tokens, after the timed ones
KV_SOURCE = "one dense chunked prefill of the unpatched model, copied into every variant's cache"


@dataclass
class Variant:
    """A model with its attention over a cache that holds the context, and how to check what it did."""

    name: str
    decoder: Decoder
    check: Callable[[int], dict[str, Any]]


def unpatched(model: PreTrainedModel, name: str, cache: Any, context: int) -> Variant:
    cache_type = type(cache)

    def check(num_steps: int) -> dict[str, Any]:
        expect(f"{name}: attention", "sdpa", model.config._attn_implementation)
        expect(f"{name}: cache", cache_type, type(cache))
        expect(f"{name}: cached tokens", context + num_steps, int(cache.get_seq_length()))
        return {}

    return Variant(name, Decoder(model, cache), check)


def dynamic_variant(model: PreTrainedModel, prefilled: DynamicCache, context: int) -> Variant:
    return unpatched(model, "sdpa, DynamicCache (default)", copy.deepcopy(prefilled), context)


def static_variant(model: PreTrainedModel, prefilled: DynamicCache, context: int, room: int) -> Variant:
    cache = StaticCache(config=model.config, max_cache_len=context + room)
    for layer_idx, layer in enumerate(prefilled.layers):
        cache.update(layer.keys, layer.values, layer_idx)
    return unpatched(model, "sdpa, StaticCache", cache, context)


def our_variant(
    model: PreTrainedModel,
    name: str,
    prefilled: DynamicCache,
    context: int,
    config: tinyserve_ops.SparseConfig,
) -> Variant:
    """Fills the paged cache while the model still uses sdpa (`update` then stores at once), then enables."""
    model = share_weights(model)
    cache = TinyServeCache(model.config, config)
    for layer_idx, layer in enumerate(prefilled.layers):
        cache.update(layer.keys, layer.values, layer_idx)
    handle = tinyserve_ops.enable(model, config)  # stays enabled as long as the variant lives
    cache.kv.reset_stats()

    def check(num_steps: int) -> dict[str, Any]:
        stats, layers = cache.stats(), model.config.num_hidden_layers
        sparse_layers = layers - config.dense_layers
        expect(f"{name}: enabled", True, handle.enabled)
        expect(f"{name}: sparse steps", num_steps * sparse_layers, stats.sparse_steps)
        expect(f"{name}: dense steps", num_steps * config.dense_layers, stats.dense_steps)
        expect(f"{name}: pages left out", not config.covers(context + num_steps), stats.selection_engaged)
        pages = [-(-(context + 1 + step) // config.page_size) for step in range(num_steps)]
        budgets = (min(config.page_budget(visible), visible) for visible in pages)
        heads = model.config.num_key_value_heads
        expect(f"{name}: pages read", sum(budgets) * sparse_layers * heads, stats.pages_read)
        read = {"kv_bytes_per_token": stats.kv_bytes_read // num_steps}
        read |= {"summary_bytes_per_token": stats.summary_bytes_read // num_steps}
        num_timed = len(decoder.step_seconds)
        overhead = overhead_us_per_layer(decoder.step, layers, OVERHEAD_STEPS)
        del decoder.step_seconds[num_timed:]  # the clocks cost time of their own
        return read | overhead

    decoder = Decoder(model, cache)
    return Variant(name, decoder, check)


def run_point(
    model: PreTrainedModel, token_ids: list[int], budgets: Sequence[int], num_steps: int, num_warmup: int
) -> list[tuple[Variant, dict[str, Any]]]:
    """One dtype and context: builds the variants, interleaves their steps, checks them."""
    context, room = len(token_ids), num_steps + num_warmup
    prefilled = DynamicCache(config=model.config)
    source = Decoder(model, prefilled)
    source.prefill(token_ids, f"{context} tokens, {model.dtype}: prefill")
    next_id = source.next_id
    everything = tinyserve_ops.SparseConfig(token_budget=64 * (-(-(context + room) // 64)))
    variants = [
        dynamic_variant(model, prefilled, context),
        static_variant(model, prefilled, context, room),
        our_variant(model, "ours, budget covers everything", prefilled, context, everything),
    ]
    for budget in budgets:
        config = tinyserve_ops.SparseConfig(token_budget=budget)
        variants.append(our_variant(model, f"ours, budget {budget} tokens", prefilled, context, config))
    del prefilled, source
    for step in bar("decode, all variants in turn", total=room, unit=" tokens", items=range(room)):
        # The default variant chooses the token for all, so all do the same work; the order rotates.
        order = variants[step % len(variants) :] + variants[: step % len(variants)]
        for variant in order:
            variant.decoder.next_id = next_id
            variant.decoder.step()
        next_id = variants[0].decoder.next_id
    results = [(variant, variant.check(room)) for variant in variants]
    for variant in variants:
        del variant.decoder.step_seconds[:num_warmup]
    return results


def shapes(model: PreTrainedModel) -> dict[str, int]:
    config = model.config
    return {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "batch": 1,
    }


def markdown(records: list[dict[str, Any]]) -> str:
    """One table per context and dtype, compared with the two unpatched caches of the same run."""
    lines = []
    for point in dict.fromkeys((record["context"], record["dtype"]) for record in records):
        rows = [record for record in records if (record["context"], record["dtype"]) == point]
        lines += [
            f"\n{point[0]} tokens, {point[1]}, ms per token over {rows[0]['steps']} interleaved steps\n"
        ]
        lines += ["| attention and cache | median | minimum | default / this | static / this | KV MB read |"]
        lines += ["|---|--:|--:|--:|--:|--:|"]
        for row in rows:
            ratios = " | ".join(f"{rows[idx]['median_ms'] / row['median_ms']:.2f}x" for idx in (0, 1))
            read = f"{row['kv_bytes_per_token'] / 1e6:.1f}" if "kv_bytes_per_token" in row else ""
            lines += [
                f"| {row['variant']} | {row['median_ms']:.1f} | {row['minimum_ms']:.1f} | {ratios} | {read} |"
            ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # 8128 and the decoded tokens fit into the model's 8192 positions.
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 8128])
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--budget", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--steps", type=int, default=24, help="measured tokens per variant")
    parser.add_argument("--warmup", type=int, default=3, help="tokens before them, not measured")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0, help="picks the excerpt of the text")
    parser.add_argument("--model", type=Path, default=None, help="another Llama-like model folder")
    parser.add_argument("--output", type=Path, default=None, help="append the JSON lines to this file too")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder, text, needle = options.model or smollm2_folder(), load_play(), make_needle("48213", options.seed)
    records: list[dict[str, Any]] = []
    for dtype in options.dtype:
        model, tokenizer = load_model(folder, getattr(torch, dtype))
        for context in options.context:
            prompt = build_prompt(tokenizer, text, needle, num_tokens=context, depth=0.2, seed=options.seed)
            try:
                with torch.inference_mode():
                    results = run_point(
                        model, prompt.token_ids, options.budget, options.steps, options.warmup
                    )
            except WrongPath as error:
                print(f"bench_generate: wrong path measured: {error}", file=sys.stderr)
                return 1
            for variant, read in results:
                record = {
                    "benchmark": "generate",
                    "variant": variant.name,
                    "context": context,
                    "dtype": dtype,
                    "median_ms": round(1e3 * statistics.median(variant.decoder.step_seconds), 3),
                    "minimum_ms": round(1e3 * min(variant.decoder.step_seconds), 3),
                    "steps": options.steps,
                    "seed": options.seed,
                    **read,
                    "shapes": shapes(model),
                    "kv_source": KV_SOURCE,
                    "load_average": load_average(),
                    **environment(),
                }
                records.append(record)
                print(json.dumps(record), flush=True)
                if options.output is not None:
                    append_records([record], options.output)
            del results
    print(markdown(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
