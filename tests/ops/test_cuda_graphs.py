"""CUDA graphs over a step of decoding: captured once, replayed with other lengths, tables and batches.

What makes that possible is tested on its own: no op waits for the device, and none keeps memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu import needs_gpu, on_gpu, sealed_batch

from tinyserve_ops import ops
from tinyserve_ops.testing import Batch, assert_same_bits

pytestmark = needs_gpu

# Around the ends of pages and of the chunks of attention; the last sequence begins with a padding slot.
LENGTHS = [0, 15, 16, 127, 128, 255, 700, -1]
LATER = [
    [1, 16, 17, 128, 129, 256, 701, 0],
    [40, 31, 500, 300, 8, 1, 640, 15],
    [700, 0, 2, 3, 690, 127, 9, 700],
]


def wide_batch(scorer: str, kv_dtype: torch.dtype) -> Batch:
    """Every sequence has pages for 720 tokens, filled and sealed, whatever its length now is."""
    batch = sealed_batch([719] * len(LENGTHS), num_heads=6, kv_dtype=kv_dtype, scorer=scorer, page_budget=6)
    return replace(batch, seq_lens=torch.tensor(LENGTHS, dtype=torch.int32))


def step(batch: Batch) -> tuple[torch.Tensor, ...]:
    batch.run(ops.append_kv)
    out, lse, selected_pages, num_selected = batch.run(ops.sparse_decode)
    dense_out, dense_lse, _ = batch.run(ops.attend_pages)
    return out, lse, selected_pages, num_selected, dense_out, dense_lse


def assert_same_step(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert_same_bits(got.cpu(), want.cpu())


def captured(batch: Batch) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(batch)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(batch)
    return graph, results


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("scorer", ["bounds", "mean_std", "low_rank"])
def test_a_replay_follows_lengths_tables_budgets_and_tokens(scorer: str, kv_dtype: torch.dtype) -> None:
    batch = wide_batch(scorer, kv_dtype)
    static, eager = on_gpu(batch), on_gpu(batch)
    graph, results = captured(static)
    step(eager)  # what the first run of `captured` wrote
    generator = torch.Generator().manual_seed(1)
    for lengths in LATER:
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        batch.page_table.copy_(batch.page_table[torch.randperm(len(LENGTHS), generator=generator)])
        batch.page_budget.copy_(torch.randint(3, 7, (len(LENGTHS),), generator=generator))
        for tensor in (batch.q, batch.k, batch.v):
            tensor.normal_(generator=generator)
        for there in (static, eager):
            for name in ("seq_lens", "page_table", "page_budget", "q", "k", "v"):
                getattr(there, name).copy_(getattr(batch, name))
        graph.replay()
        assert_same_step(results, step(eager))


@pytest.mark.parametrize("num_sequences", [1, 3, 8])
def test_a_smaller_batch_runs_in_the_graph_of_a_larger_one(num_sequences: int) -> None:
    batch = wide_batch("bounds", torch.bfloat16)
    static, eager = on_gpu(batch), on_gpu(batch)
    graph, results = captured(static)
    step(eager)
    static.cu_query_lens[num_sequences + 1 :] = num_sequences  # the rest are padding
    for result in results:
        if result.is_floating_point():
            result.fill_(torch.nan)
    graph.replay()
    expected = step(eager)  # a row's result does not depend on its batch
    first = slice(num_sequences)
    assert_same_step(tuple(result[first] for result in results), tuple(want[first] for want in expected))
    out, lse, _, num_selected, *_ = results
    assert not out[num_sequences:].any()
    assert (lse[num_sequences:] == -torch.inf).all()
    assert not num_selected[num_sequences:].any()


def test_replays_are_bit_for_bit_what_the_ops_give() -> None:
    there = on_gpu(wide_batch("bounds_mean", torch.float16))
    graph, results = captured(there)
    expected = step(there)
    for _ in range(20):
        graph.replay()
        for got, want in zip(results, expected, strict=True):
            assert_same_bits(got.cpu(), want.cpu())


@pytest.mark.parametrize(
    "op", ["append_kv", "score_pages", "attend_pages", "sparse_decode", "prefill_attention", "gather_pages"]
)
def test_no_op_waits_for_the_device(op: str) -> None:
    batch = on_gpu(wide_batch("bounds", torch.bfloat16))
    function = getattr(ops, op)
    extra = (
        {"page_ids": torch.tensor([3, 0], dtype=torch.int32, device="cuda")} if op == "gather_pages" else {}
    )
    batch.run(function, **extra)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.run(function, **extra)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_keeps_no_memory() -> None:
    batch = on_gpu(wide_batch("bounds", torch.bfloat16))
    step(batch)
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        step(batch)
    assert torch.cuda.memory_allocated() == before
