"""Reserved decoding: the same tokens as ordinary decoding, from a step that torch.compile takes whole."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch._dynamo.testing
from dense_mirror import HEAD_DIM, NUM_LAYERS, SM_SCALE, DenseMirror, new_cache
from op_calls import OpCalls

from tinyserve_ops import OutOfPagesError, SparseConfig

BUDGETS = {
    "tokens": SparseConfig(page_size=4, token_budget=16, dense_layers=1),
    "ratio": SparseConfig(page_size=4, keep_ratio=0.3, dense_layers=1),
}


def make_step(reserved, window=-1):
    def step(qkv: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        positions = reserved.next_positions.clone()
        outs = [reserved.attend(layer, *qkv[layer], SM_SCALE, window) for layer in range(NUM_LAYERS)]
        reserved.advance()
        return outs, positions

    return step


def inputs(mirror: DenseMirror, batch: int) -> list[list[torch.Tensor]]:
    return [[mirror.random(batch, heads) for heads in (4, 2, 2)] for _ in range(NUM_LAYERS)]


def ordinary_step(cache, seqs, qkv, window=-1):
    forward = cache.begin([(seq, 1) for seq in seqs])
    outs = [forward.attend(layer, *qkv[layer], SM_SCALE, window) for layer in range(NUM_LAYERS)]
    positions = forward.positions()
    forward.commit()
    return outs, positions


def two_caches(config, **options):
    mirror = DenseMirror(new_cache(config=config, **options))
    seqs = [mirror.new(14), mirror.new(3)]
    mirror.cache.set_next_position(seqs[1], 20)
    return mirror, copy.deepcopy(mirror.cache), seqs


@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("groups", [None, [[0, 2], [1]]])
@pytest.mark.parametrize("budget", list(BUDGETS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_reserved_steps_equal_ordinary_ones_bit_for_bit(dtype, budget, groups, window):
    mirror, other, seqs = two_caches(BUDGETS[budget], dtype=dtype, layer_groups=groups)
    cache = mirror.cache
    cache.reset_stats()
    reserved = cache.reserve(seqs, 40)
    step = make_step(reserved, window)
    for _ in range(12):
        qkv = inputs(mirror, 2)
        reserved.check_room()
        outs, positions = step(qkv)
        expected, expected_positions = ordinary_step(other, seqs, qkv, window)
        assert torch.equal(positions, expected_positions)
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert [cache.length(seq) for seq in seqs] == [14, 3]
    reserved.release()
    assert [cache.length(seq) for seq in seqs] == [26, 15]
    assert [cache.next_position(seq) for seq in seqs] == [26, 32]
    assert cache.export(seqs) == other.export(seqs)
    ours, theirs = cache.stats().to_dict(), other.stats().to_dict()
    counted = [
        "sparse_steps",
        "dense_steps",
        "pages_visible",
        "pages_scanned",
        "pages_read",
        "selection_engaged",
        "tokens_attended",
        "kv_bytes_read",
        "summary_bytes_read",
    ]
    assert {name: ours[name] for name in counted} == {name: theirs[name] for name in counted}
    cache.check()


@pytest.mark.parametrize(
    ("mode", "window", "dtype"),
    [
        (torch.no_grad, -1, torch.float32),
        (torch.inference_mode, 6, torch.float32),
        (torch.no_grad, -1, torch.int8),
    ],
)
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_a_step_compiles_without_graph_break_and_once(budget, mode, window, dtype):
    mirror, other, seqs = two_caches(BUDGETS[budget], dtype=dtype)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with mirror.cache.reserve(seqs, 40) as reserved, mode():
        compiled = torch.compile(make_step(reserved, window), backend=counter, fullgraph=True)
        for _ in range(6):
            qkv = inputs(mirror, 2)
            reserved.check_room()
            outs, positions = compiled(qkv)
            expected, expected_positions = ordinary_step(other, seqs, qkv, window)
            assert torch.equal(positions, expected_positions)
            assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert counter.frame_count == 1
    assert mirror.cache.export(seqs) == other.export(seqs)


def test_a_step_compiles_with_inductor():
    mirror, other, seqs = two_caches(BUDGETS["tokens"])
    torch._dynamo.reset()
    with mirror.cache.reserve(seqs, 40) as reserved, torch.no_grad():
        compiled = torch.compile(make_step(reserved), fullgraph=True)
        for _ in range(3):
            qkv = inputs(mirror, 2)
            reserved.check_room()
            outs, _ = compiled(qkv)
            expected, _ = ordinary_step(other, seqs, qkv)
            assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert mirror.cache.export(seqs) == other.export(seqs)


def test_decoding_goes_on_in_pages_after_the_reservation():
    mirror, _, seqs = two_caches(SparseConfig(page_size=4))
    cache = mirror.cache
    with cache.reserve(seqs, 60) as reserved:
        for _ in range(5):
            qkv = inputs(mirror, 2)
            reserved.check_room()
            make_step(reserved)(qkv)
            for layer in range(NUM_LAYERS):
                for row, seq in enumerate(seqs):
                    k, v = mirror.tokens[seq][layer]
                    new = [t[row : row + 1] for t in qkv[layer][1:]]
                    mirror.tokens[seq][layer] = (torch.cat([k, new[0]]), torch.cat([v, new[1]]))
    mirror.step([(seqs[0], 1), (seqs[1], 3)])
    for seq in seqs:
        mirror.assert_contents(seq)
    cache.check()


def test_a_reservation_runs_out_before_the_step_and_not_within():
    mirror, _, seqs = two_caches(SparseConfig(page_size=4))
    reserved = mirror.cache.reserve(seqs, 16)
    reserved.check_room(2)
    step = make_step(reserved)
    step(inputs(mirror, 2))
    step(inputs(mirror, 2))
    with pytest.raises(OutOfPagesError, match="max_tokens"):
        reserved.check_room()
    reserved.sync()
    assert [mirror.cache.length(seq) for seq in seqs] == [16, 5]
    with pytest.raises(OutOfPagesError):
        reserved.check_room()
    reserved.release()
    reserved.release()
    with pytest.raises(RuntimeError, match="released"):
        reserved.sync()


def test_a_step_that_failed_is_not_counted():
    mirror, _, seqs = two_caches(SparseConfig(page_size=4))
    reserved = mirror.cache.reserve(seqs, 20)
    reserved.check_room()
    with pytest.raises(ValueError, match="softcap"):
        reserved.attend(0, *inputs(mirror, 2)[0], SM_SCALE, softcap=1.0)
    reserved.release()
    for seq in seqs:
        mirror.assert_contents(seq)


def test_reserved_sequences_are_left_alone():
    mirror, other, seqs = two_caches(SparseConfig(page_size=4))
    cache = mirror.cache
    third = mirror.new(6)
    reserved = cache.reserve(seqs, 20)
    for action in (
        lambda: cache.begin([(seqs[0], 1)]),
        lambda: cache.crop(seqs[0], 1),
        lambda: cache.fork(seqs[0]),
        lambda: cache.free(seqs[0]),
        lambda: cache.reset(),
        lambda: cache.reserve(seqs, 20),
        lambda: copy.deepcopy(cache),
    ):
        with pytest.raises(RuntimeError, match="reserved"):
            action()
    mirror.step([(third, 1)])
    with pytest.raises(OutOfPagesError, match="compiled step"):
        cache.begin([(third, 10_000)])
    reserved.release()
    mirror.step([(seqs[0], 1)])
    for seq in seqs[:1]:
        mirror.assert_contents(seq)
    other.close()


def test_a_reservation_that_does_not_fit_changes_nothing():
    bytes_per_page = new_cache(max_tokens=16).pool.bytes_reserved
    mirror = DenseMirror(new_cache(max_tokens=16, config=SparseConfig(max_kv_bytes=4 * bytes_per_page)))
    seq = mirror.new(20)
    with pytest.raises(OutOfPagesError):
        mirror.cache.reserve([seq], 100)
    with pytest.raises(ValueError, match="max_tokens"):
        mirror.cache.reserve([seq], 19)
    mirror.step([(seq, 1)])
    mirror.assert_contents(seq)
    recording = new_cache(config=SparseConfig(record_selection=True))
    seq = recording.new_sequence()
    with pytest.raises(ValueError, match="record_selection"):
        recording.reserve([seq], 8)


def test_empty_sequences_can_be_reserved():
    cache = new_cache()
    seqs = [cache.new_sequence(), cache.new_sequence()]
    with cache.reserve(seqs, 8) as reserved:
        for layer in range(NUM_LAYERS):
            reserved.attend(layer, torch.zeros(2, 4, HEAD_DIM), *[torch.ones(2, 2, HEAD_DIM)] * 2, 1.0)
        reserved.advance()
    assert [cache.length(seq) for seq in seqs] == [1, 1]


@pytest.mark.parametrize("compile_step", [False, True])
def test_a_released_step_raises_and_writes_nothing(compile_step):
    mirror, _, seqs = two_caches(BUDGETS["tokens"])
    cache = mirror.cache
    reserved = cache.reserve(seqs, 40)
    step = make_step(reserved)
    if compile_step:
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        reserved.check_room()
        step(inputs(mirror, 2))
        reserved.release()
        cache.free(seqs[0])
        other = mirror.new(37)  # lives in pages that were reserved
        before = cache.export([other, seqs[1]])
        with pytest.raises(RuntimeError, match="released"):
            step(inputs(mirror, 2))
    with pytest.raises(RuntimeError, match=r"advance: .*released"):
        reserved.advance()
    assert cache.export([other, seqs[1]]) == before


def overrun(mirror, seqs, max_tokens, num_steps):
    reserved = mirror.cache.reserve(seqs, max_tokens)
    for _ in range(num_steps):
        make_step(reserved)(inputs(mirror, 2))
    return reserved


def test_steps_beyond_the_reserved_tokens_are_dropped_in_every_row_and_release_always_ends():
    mirror, _, seqs = two_caches(BUDGETS["ratio"])
    cache = mirror.cache
    reserved = overrun(mirror, seqs, 17, 6)  # 14 + 6 tokens fill the last page
    reserved.release()
    assert [cache.length(seq) for seq in seqs] == [17, 6]
    assert [cache.next_position(seq) for seq in seqs] == [17, 23]
    cache.check()
    mirror.step([(seq, 1) for seq in seqs], check=False)
    cache.reset()
    cache.free(seqs[0])
    cache.check()


def test_a_sync_complains_of_an_overrun_once_and_the_reservation_goes_on():
    mirror, _, seqs = two_caches(BUDGETS["ratio"])
    cache = mirror.cache
    reserved = overrun(mirror, seqs, 17, 5)
    with pytest.raises(RuntimeError, match=r"sync: expected at most 17 .*\[19, 8\].*check_room"):
        reserved.sync()
    assert reserved.seq_lens.tolist() == [17, 6]
    assert reserved.next_positions.tolist() == [17, 23]
    reserved.sync()
    with pytest.raises(OutOfPagesError):
        reserved.check_room()
    reserved.release()
    assert [cache.length(seq) for seq in seqs] == [17, 6]
    cache.check()


def test_closing_a_cache_ends_its_reservations():
    mirror, other, seqs = two_caches(SparseConfig(page_size=4))
    reserved = mirror.cache.reserve(seqs, 20)
    mirror.cache.close()
    with pytest.raises(RuntimeError, match="released"):
        reserved.attend(0, *inputs(mirror, 2)[0], SM_SCALE)
    reserved.release()
    DenseMirror(other, tokens={seq: list(mirror.tokens[seq]) for seq in seqs}).assert_contents(seqs[0])
    other.begin([(seqs[0], 10_000)]).abandon()  # the pool may grow again
    other.check()


def test_page_lists_of_a_reserved_step_are_no_wider_than_the_reserved_pages():
    mirror, _, seqs = two_caches(SparseConfig(page_size=4, token_budget=2**40, dense_layers=1))
    with mirror.cache.reserve(seqs, 40) as reserved, OpCalls() as ops_called:
        make_step(reserved)(inputs(mirror, 2))
    assert [given["max_page_budget"] for _, given in ops_called.of("sparse_decode")] == [10, 10]


def test_a_pool_taken_for_a_reservation_does_not_grow_before_it_is_registered(monkeypatch):
    mirror, other, seqs = two_caches(SparseConfig(page_size=4), max_tokens=64)
    pool = mirror.cache.pool
    seen = []

    def grow_elsewhere():
        try:
            other.begin([(seqs[1], 10_000)])
        except OutOfPagesError as error:
            seen.append(str(error))

    thread = threading.Thread(target=grow_elsewhere)
    reservation_opened = pool.reservation_opened

    def opened(cache_id):
        thread.start()
        thread.join(0.2)  # waits for the lock
        assert not seen
        reservation_opened(cache_id)

    monkeypatch.setattr(pool, "reservation_opened", opened)
    reserved = mirror.cache.reserve(seqs, 20)
    thread.join()
    assert "compiled step" in seen[0]
    reserved.release()
