"""Streams, devices, and very many launches: the ops run on torch's current stream of the tensors' device."""

from __future__ import annotations

import pytest
import torch
from gpu import needs_gpu, on_gpu, sealed_batch

from tinyserve_ops import ops
from tinyserve_ops.testing import Batch, assert_same_bits

pytestmark = needs_gpu

NUM_LAUNCHES = 100_000


def decode(batch: Batch) -> tuple[torch.Tensor, ...]:
    return tuple(batch.run(ops.sparse_decode))


def assert_all_same_bits(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert_same_bits(got.cpu(), want.cpu())


def test_launches_go_to_the_current_stream() -> None:
    batch = on_gpu(sealed_batch([4000, 700]))
    expected = decode(batch)
    q = batch.q.clone()
    batch.q.fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # work on another stream would see the NaN
        batch.q.copy_(q)
        actual = decode(batch)
    side.synchronize()
    assert_all_same_bits(actual, expected)


def test_two_streams_do_not_disturb_each_other() -> None:
    batches = [on_gpu(sealed_batch([3000, 40, 900], seed=seed, page_budget=40)) for seed in (1, 2)]
    expected = [decode(batch) for batch in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    results: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(300):
        for batch, stream, kept in zip(batches, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(decode(batch))
    torch.cuda.synchronize()
    for kept, want in zip(results, expected, strict=True):
        for actual in kept:
            assert_all_same_bits(actual, want)


def test_two_graphs_replay_at_the_same_time() -> None:
    batches = [on_gpu(sealed_batch([3000, 900], seed=seed, page_budget=40)) for seed in (3, 4)]
    expected = [decode(batch) for batch in batches]
    graphs, results = [], []
    for batch in batches:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(decode(batch))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(300):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for actual, want in zip(results, expected, strict=True):
        assert_all_same_bits(actual, want)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("op", ["attend_pages", "sparse_decode"])
def test_a_hundred_thousand_launches_give_the_same_bits(op: str) -> None:
    # Several chunks: the last block of a row joins those of the others and resets its counter.
    batch = on_gpu(sealed_batch([1500, 300, 20], num_heads=9, num_kv_heads=3, page_budget=64))
    function = getattr(ops, op)
    expected = batch.run(function)[:2]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for launch in range(NUM_LAUNCHES):
        actual = batch.run(function)[:2]
        if launch % 100 == 99:
            for got, want in zip(actual, expected, strict=True):
                wrong += (got != want).sum()
    assert int(wrong) == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one_is_used() -> None:
    batch = sealed_batch([4000, 700])
    expected = decode(on_gpu(batch, "cuda:0"))
    with torch.cuda.device(0):
        actual = decode(on_gpu(batch, "cuda:1"))
    assert all(result.device == torch.device("cuda:1") for result in actual)
    assert_all_same_bits(actual, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_two_devices_are_refused_by_name() -> None:
    batch = on_gpu(sealed_batch([40]))
    with pytest.raises(ValueError, match="seq_lens: expected a tensor on cuda:0"):
        batch.run(ops.sparse_decode, seq_lens=batch.seq_lens.to("cuda:1"))


def test_a_length_on_the_cpu_is_refused_by_name() -> None:
    batch = on_gpu(sealed_batch([40]))
    with pytest.raises(ValueError, match="seq_lens: expected a tensor on cuda:0"):
        batch.run(ops.sparse_decode, seq_lens=batch.seq_lens.cpu())
