"""Sequences in the paged cache: lengths, sharing, cropping, exhaustion. Budgets here cover everything."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from dense_mirror import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, DenseMirror, new_cache

from tinyserve_ops import OutOfPagesError, PagePool, SparseConfig

GROUPS = [None, [[0, 2], [1]]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.int8])


def used_pages(cache) -> list[int]:
    return [group.allocator.num_used for group in cache.pool.groups]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("page_size", [1, 7, 16])
@DTYPES
def test_prefill_and_decode_equal_full_attention(dtype, page_size, groups):
    config = SparseConfig(page_size=page_size, scorer="bounds")
    mirror = DenseMirror(new_cache(config=config, dtype=dtype, layer_groups=groups))
    seq = mirror.new(33)
    for _ in range(page_size + 2):
        mirror.step([(seq, 1)])
    mirror.assert_contents(seq)
    mirror.cache.check()


def test_lengths_do_not_move_before_the_commit():
    cache = new_cache()
    seq = cache.new_sequence()
    forward = cache.begin([(seq, 5)])
    assert (cache.length(seq), cache.next_position(seq), forward.lengths) == (0, 0, (0,))
    tensors = [torch.zeros(5, heads, HEAD_DIM) for heads in (4, 2, 2)]
    for layer in range(NUM_LAYERS):
        forward.attend(layer, *tensors, 1.0)
        assert cache.length(seq) == 0
    forward.commit()
    assert (cache.length(seq), cache.next_position(seq)) == (5, 5)


@pytest.mark.parametrize("failing_layer", [0, 1, 2])
def test_a_forward_that_fails_leaves_the_committed_length_and_the_next_one_works(failing_layer):
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seq = mirror.new(20)
    before = used_pages(cache)
    forward = cache.begin([(seq, 40)])
    for layer in range(failing_layer):
        forward.attend(layer, mirror.random(40, 4), mirror.random(40, 2), mirror.random(40, 2), 1.0)
    with pytest.raises(ValueError, match="q, k, v"):
        forward.attend(failing_layer, mirror.random(3, 4), mirror.random(3, 2), mirror.random(3, 2), 1.0)
    assert cache.length(seq) == 20
    mirror.step([(seq, 1)])
    assert not forward.is_open
    assert used_pages(cache) == before
    with pytest.raises(RuntimeError, match="committed or abandoned"):
        forward.attend(0, mirror.random(40, 4), mirror.random(40, 2), mirror.random(40, 2), 1.0)
    mirror.assert_contents(seq)


def test_a_commit_without_all_layers_is_refused_and_names_them():
    cache = new_cache()
    seq = cache.new_sequence()
    forward = cache.begin([(seq, 2)])
    forward.attend(
        1, torch.zeros(2, 4, HEAD_DIM), torch.zeros(2, 2, HEAD_DIM), torch.zeros(2, 2, HEAD_DIM), 1.0
    )
    with pytest.raises(RuntimeError, match=r"layers \[0, 2\]"):
        forward.commit()
    assert cache.length(seq) == 0
    forward.commit(allow_missing_layers=True)
    assert cache.length(seq) == 2


@pytest.mark.parametrize("kept", [0, 15, 16, 17, 33])
@pytest.mark.parametrize("groups", GROUPS)
@DTYPES
def test_a_cropped_sequence_goes_on_as_if_the_rest_had_never_been(dtype, kept, groups):
    config = SparseConfig(token_budget=64, dense_layers=0)
    mirror = DenseMirror(new_cache(config=config, dtype=dtype, layer_groups=groups))
    cache = mirror.cache
    seq = mirror.new(33)
    mirror.crop(seq, kept)
    assert (cache.length(seq), cache.next_position(seq)) == (kept, kept)
    assert used_pages(cache) == [-(-kept // 16)] * len(cache.pool.groups)
    for _ in range(20):
        mirror.step([(seq, 1)])
    mirror.assert_contents(seq)
    # A page that filled up again has the summary of a page filled for the first time.
    fresh = DenseMirror(new_cache(config=config, dtype=dtype, layer_groups=groups))
    other = fresh.cache.new_sequence()
    length = cache.length(seq)
    forward = fresh.cache.begin([(other, length)])
    for layer in range(NUM_LAYERS):
        forward.attend(layer, torch.zeros(length, 4, HEAD_DIM), *mirror.tokens[seq][layer], 1.0)
    forward.commit()
    assert fresh.cache.export([other]) == cache.export([seq])


@pytest.mark.parametrize("length", [-1, 34, 1.0, True])
def test_a_crop_outside_the_sequence_is_refused(length):
    mirror = DenseMirror(new_cache())
    seq = mirror.new(33)
    with pytest.raises(ValueError, match=r"length: expected 0 to 33"):
        mirror.cache.crop(seq, length)
    mirror.assert_contents(seq)


def test_reset_empties_the_sequences_and_the_stats():
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seq = mirror.new(6)
    mirror.step([(seq, 1)])
    cache.pin(seq)
    cache.reset()
    assert (cache.length(seq), cache.next_position(seq), used_pages(cache)) == (0, 0, [0])
    assert (cache.stats().prefill_tokens, cache.stats().sparse_steps) == (0, 0)
    mirror.crop(seq, 0)
    mirror.step([(seq, 3)])
    assert cache.length(seq) == 3
    mirror.assert_contents(seq)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("copier", [copy.deepcopy, None])
@DTYPES
def test_copies_share_pages_and_diverge_on_the_first_write(dtype, copier, groups):
    mirror = DenseMirror(new_cache(dtype=dtype, layer_groups=groups))
    cache = mirror.cache
    seq = mirror.new(20)
    cache.set_next_position(seq, 25)
    baseline = used_pages(cache)
    if copier is None:
        other_cache, other_seq = cache, mirror.fork(seq)
        other = mirror
    else:
        with torch.no_grad():
            other_cache, other_seq = copier(cache), seq
        other = DenseMirror(other_cache, seed=7, tokens={seq: list(mirror.tokens[seq])})
    assert used_pages(cache) == baseline
    assert other_cache.next_position(other_seq) == 25
    for step in range(8):
        with torch.inference_mode(step % 2 == 0):
            mirror.step([(seq, 1)])
            other.step([(other_seq, 1)])
    mirror.assert_contents(seq)
    other.assert_contents(other_seq)
    assert used_pages(cache) == [n + 1 for n in baseline]  # the half-full page, once
    cache.check()
    other_cache.free(other_seq)
    assert used_pages(cache) == baseline
    cache.free(seq)
    assert used_pages(cache) == [0] * len(baseline)


def test_a_collected_cache_gives_its_pages_back_to_the_shared_pool():
    mirror = DenseMirror(new_cache())
    mirror.new(40)
    other = copy.deepcopy(mirror.cache)
    other.begin([(0, 1)])
    pool = mirror.cache.pool
    assert pool.groups[0].allocator.num_used == 4
    del mirror
    gc.collect()
    assert pool.groups[0].allocator.num_used == 3
    del other
    gc.collect()
    assert pool.groups[0].allocator.num_used == 0
    pool.check()


@DTYPES
def test_reordering_moves_beams_and_gives_pages_back(dtype):
    mirror = DenseMirror(new_cache(dtype=dtype))
    cache = mirror.cache
    beams = [mirror.new(20), mirror.new(18), mirror.new(17)]
    expected = [mirror.tokens[beams[i]] for i in (2, 0, 2)]
    moved = cache.reorder(beams, [2, 0, 2])
    for seq, tokens in zip(moved, expected, strict=True):
        mirror.tokens[seq] = list(tokens)
    assert moved[:2] == [beams[2], beams[0]]
    assert set(cache.sequences) == set(moved)
    for seq in moved:
        mirror.assert_contents(seq)
    mirror.step([(seq, 1) for seq in moved])
    for seq in moved:
        mirror.assert_contents(seq)
    with pytest.raises(ValueError, match="indices"):
        cache.reorder(moved, [0, 3])
    for seq in moved:
        cache.free(seq)
    assert used_pages(cache) == [0]


def test_reordering_there_and_back_leaves_the_same_bytes():
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seqs = [mirror.new(n) for n in (5, 17, 30)]
    before = cache.export(seqs)
    there = cache.reorder(seqs, [1, 2, 0])
    assert cache.export(there) != before
    assert cache.export(cache.reorder(there, [2, 0, 1])) == before


def test_a_full_pool_raises_without_any_effect():
    bytes_per_page = new_cache(max_tokens=16).pool.bytes_reserved
    mirror = DenseMirror(new_cache(max_tokens=16, config=SparseConfig(max_kv_bytes=4 * bytes_per_page)))
    cache = mirror.cache
    seq = mirror.new(30)
    other = cache.fork(seq)
    mirror.tokens[other] = list(mirror.tokens[seq])
    state = (used_pages(cache), cache.pool.groups[0].allocator.num_pages)
    with pytest.raises(OutOfPagesError, match="max_kv_bytes"):
        cache.begin([(seq, 1), (other, 40)])
    assert (used_pages(cache), cache.pool.groups[0].allocator.num_pages) == state
    assert cache.open_forward is None
    mirror.step([(seq, 1), (other, 5)])
    with pytest.raises(OutOfPagesError):
        cache.begin([(seq, 40)])
    mirror.assert_contents(seq)
    mirror.assert_contents(other)
    cache.check()


@DTYPES
def test_a_pool_grows_by_doubling_and_keeps_what_it_holds(dtype):
    mirror = DenseMirror(new_cache(dtype=dtype, max_tokens=16))
    cache = mirror.cache
    seq = mirror.new(10)
    other = mirror.new(90)
    mirror.step([(seq, 1), (other, 1)])
    assert cache.pool.groups[0].allocator.num_pages == 8
    assert cache.stats().pool_growths == 1
    mirror.assert_contents(seq)
    mirror.assert_contents(other)
    cache.check()


def test_growing_within_a_forward_keeps_the_layers_already_written():
    pool_options = {"config": SparseConfig(), "dtype": torch.float32, "max_tokens": 32}
    pool = PagePool(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, **pool_options)
    one, two = DenseMirror(new_cache(pool=pool)), DenseMirror(new_cache(pool=pool), seed=1)
    seq, other = one.new(20), two.new(0)
    forward = one.cache.begin([(seq, 1)])
    tensors = [[one.random(1, heads) for heads in (4, 2, 2)] for _ in range(NUM_LAYERS)]
    forward.attend(0, *tensors[0], 1.0)
    two.step([(other, 50)])
    for layer in (1, 2):
        forward.attend(layer, *tensors[layer], 1.0)
    forward.commit()
    one.tokens[seq] = [
        (torch.cat([k, new[1]]), torch.cat([v, new[2]]))
        for (k, v), new in zip(one.tokens[seq], tensors, strict=True)
    ]
    one.assert_contents(seq)
    two.assert_contents(other)


def test_a_pool_does_not_grow_under_a_forward_of_another_thread():
    pool = PagePool(
        NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, config=SparseConfig(), dtype=torch.float32, max_tokens=32
    )
    one, two = DenseMirror(new_cache(pool=pool)), DenseMirror(new_cache(pool=pool))
    seq, other = one.new(20), two.new(0)
    thread = threading.Thread(target=lambda: one.cache.begin([(seq, 1)]))
    thread.start()
    thread.join()
    with pytest.raises(OutOfPagesError, match="another thread"):
        two.cache.begin([(other, 50)])
    one.cache.open_forward.abandon()
    two.step([(other, 50)])


def test_a_shared_pool_of_another_shape_is_refused_by_name():
    pool = PagePool(
        NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, config=SparseConfig(), dtype=torch.float32, max_tokens=32
    )
    with pytest.raises(ValueError, match="page_size"):
        new_cache(pool=pool, config=SparseConfig(page_size=8))
    with pytest.raises(ValueError, match="dtype"):
        new_cache(pool=pool, dtype=torch.float16)
    with pytest.raises(ValueError, match="layer_groups"):
        new_cache(pool=pool, layer_groups=[[0, 1], [2]])


def test_pinned_pages_outlive_a_crop():
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seq = mirror.new(40)
    cache.pin(seq)
    mirror.crop(seq, 3)
    assert used_pages(cache) == [3]
    mirror.step([(seq, 20)])
    cache.unpin(seq)
    assert used_pages(cache) == [2]
    with pytest.raises(RuntimeError, match="pinned"):
        cache.unpin(seq)
    cache.check()


def test_a_registered_page_is_attached_to_another_sequence():
    mirror = DenseMirror(new_cache(layer_groups=[[0, 2], [1]]))
    cache = mirror.cache
    seq = mirror.new(33)
    tokens = list(range(16))
    assert cache.register_page(seq, 0, b"first", tokens)
    expected = [(k[:16], v[:16]) for k, v in mirror.tokens[seq]]
    cache.free(seq)
    assert [g.allocator.num_cached for g in cache.pool.groups] == [1, 1]
    other = mirror.new()
    assert not cache.attach_cached(other, b"first", [9] * 16)
    assert cache.attach_cached(other, b"first", tokens)
    assert (cache.length(other), cache.next_position(other)) == (16, 16)
    mirror.tokens[other] = expected
    mirror.step([(other, 1)])
    mirror.assert_contents(other)
    cache.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_pages_may_be_narrower_than_the_model(dtype):
    config = SparseConfig(kv_dtype=str(dtype).removeprefix("torch."))
    mirror = DenseMirror(new_cache(config=config))
    seq = mirror.new(20)
    mirror.step([(seq, 1)], tolerance=3e-2)
    assert mirror.cache.dtype == dtype
    mirror.assert_contents(seq)


@DTYPES
def test_one_cache_works_under_all_grad_modes_in_turn(dtype):
    with torch.inference_mode():
        mirror = DenseMirror(new_cache(dtype=dtype, max_tokens=16))
        seq = mirror.new(20)
    for step in range(40):
        mode = [torch.inference_mode, torch.no_grad, torch.enable_grad][step % 3]
        with mode():
            mirror.step([(seq, 1)])
    mirror.assert_contents(seq)


def test_the_stats_count_the_scales_of_int8_pages():
    mirror = DenseMirror(new_cache(config=SparseConfig(dense_layers=NUM_LAYERS, kv_dtype="int8")))
    seq = mirror.new(20)
    mirror.step([(seq, 1)])
    stats, layer = mirror.cache.stats(), mirror.cache.pool.layers[0]
    assert layer.kv_bytes_per_token == 2 * (HEAD_DIM + 4)
    assert layer.bytes_per_page == sum(part[0].numel() * part.element_size() for part in layer.parts)
    assert stats.kv_bytes_read == stats.tokens_attended * 2 * (HEAD_DIM + 4)
    assert stats.kv_bytes_held == 2 * NUM_LAYERS * layer.bytes_per_page


def test_a_decode_step_writes_only_new_page_table_entries(monkeypatch):
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seq = mirror.new(40)
    for _ in range(9):
        mirror.step([(seq, 1)])
    table = cache.begin([(seq, 1)]).page_table()
    assert table[0, 4] == -1
    poison = table[0, 0].item()
    table[0, 0] = 99  # a rewrite of the row would repair it
    for _ in range(2):
        assert cache.begin([(seq, 1)]).page_table() is table
    assert table[0, 0] == 99
    table[0, 0] = poison
    cache.crop(seq, 47)
    assert cache.begin([(seq, 1)]).page_table()[0, :3].tolist() == cache.page_ids(seq).tolist()
    cache.check()


@DTYPES
def test_random_work_keeps_contents_and_accounting_right(dtype):
    config = SparseConfig(page_size=4)
    mirror = DenseMirror(
        new_cache(max_tokens=64, config=config, dtype=dtype, layer_groups=[[0], [1, 2]]), seed=3
    )
    cache = mirror.cache
    random = torch.Generator().manual_seed(5)
    live = [mirror.new(9)]
    for _ in range(60):
        action = int(torch.randint(6, (), generator=random))
        seq = live[int(torch.randint(len(live), (), generator=random))]
        if action == 0 and len(live) < 5:
            live.append(mirror.fork(seq))
        elif action == 1 and len(live) > 1:
            live.remove(seq)
            cache.free(seq)
        elif action == 2:
            mirror.crop(seq, int(torch.randint(cache.length(seq) + 1, (), generator=random)))
        elif action == 3:
            cache.begin([(seq, 7)])  # left open: a failed forward
        else:
            mirror.step([(s, int(torch.randint(4, (), generator=random))) for s in live])
        cache.check()
    for seq in live:
        mirror.assert_contents(seq)
        cache.free(seq)
    assert used_pages(cache) == [0, 0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"layer_groups": [[0], [1]]}, "layer_groups"),
        ({"layer_groups": [[0, 1], [1, 2]]}, "layer_groups"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"dtype": torch.int32}, "dtype"),
        ({"dtype": torch.int8, "config": SparseConfig(scorer="bounds_full")}, "scorer: expected 'bounds'"),
        ({"device": "cuda"}, "device: expected cpu .*got cuda"),
        ({"config": SparseConfig(max_kv_bytes=10)}, "max_kv_bytes"),
    ],
)
def test_a_bad_argument_is_refused_by_name(options, name):
    with pytest.raises(ValueError, match=name):
        new_cache(**options)


def test_wrong_rows_are_refused():
    cache = new_cache()
    seq = cache.new_sequence()
    with pytest.raises(ValueError, match="seq"):
        cache.begin([(seq + 1, 1)])
    with pytest.raises(ValueError, match="num_new"):
        cache.begin([(seq, -1)])
    with pytest.raises(ValueError, match="each sequence once"):
        cache.begin([(seq, 1), (seq, 1)])
    cache.free(seq)
    with pytest.raises(ValueError, match="seq"):
        cache.length(seq)


def test_a_layer_group_that_does_not_exist_is_refused_by_name():
    cache = new_cache()
    seq = cache.new_sequence()
    for group in (-1, 1):
        with pytest.raises(ValueError, match="group: expected 0 to 0"):
            cache.page_ids(seq, group)


def test_a_cache_and_its_pool_go_with_the_last_reference_even_with_a_forward_open():
    gc.collect()
    gc.disable()
    try:
        cache = new_cache()
        pages = weakref.ref(cache.pool.layers[0].k_pages)
        forward = cache.begin([(cache.new_sequence(), 3)])
        del forward, cache
        assert pages() is None
    finally:
        gc.enable()


def test_a_forward_that_outlives_its_cache_raises_by_name():
    cache = new_cache()
    forward = cache.begin([(cache.new_sequence(), 1)])
    del cache
    assert not forward.is_open
    with pytest.raises(RuntimeError, match=r"attend: .*cache is gone"):
        forward.attend(0, *[torch.zeros(1, heads, HEAD_DIM) for heads in (4, 2, 2)], 1.0)
    forward.abandon()
    with pytest.raises(RuntimeError, match="commit: "):
        forward.commit()


def test_a_reset_that_meets_a_reserved_sequence_changes_nothing():
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seqs = [mirror.new(20), mirror.new(10)]
    cache.pin(seqs[0])
    with cache.reserve(seqs[1:], 20):
        with pytest.raises(RuntimeError, match="reserved"):
            cache.reset()
        assert [cache.length(seq) for seq in seqs] == [20, 10]
        cache.unpin(seqs[0])
    mirror.assert_contents(seqs[0])
    cache.reset()
    assert [cache.length(seq) for seq in seqs] == [0, 0]


def test_a_closed_cache_takes_no_sequences_and_no_forwards():
    cache = new_cache()
    seq = cache.new_sequence()
    data = cache.export([seq])
    cache.close()
    cache.close()
    for action in (
        cache.new_sequence,
        lambda: cache.begin([]),
        lambda: cache.begin([(seq, 1)]),
        lambda: cache.import_(data),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            action()
    assert used_pages(cache) == [0]


def test_pages_that_come_after_a_pin_are_not_pinned():
    mirror = DenseMirror(new_cache())
    cache = mirror.cache
    seq = mirror.new(20)
    cache.pin(seq)
    mirror.step([(seq, 30)])
    mirror.crop(seq, 0)
    assert used_pages(cache) == [2]
    cache.unpin(seq)
    assert used_pages(cache) == [0]


def test_threads_that_share_a_pool_open_forwards_while_it_grows():
    pool = PagePool(
        NUM_LAYERS,
        NUM_KV_HEADS,
        HEAD_DIM,
        config=SparseConfig(page_size=4),
        dtype=torch.float32,
        max_tokens=8,
    )
    errors = []

    def work(seed):
        mirror = DenseMirror(new_cache(pool=pool, config=SparseConfig(page_size=4)), seed=seed)
        seq = mirror.cache.new_sequence()
        for _ in range(60):
            try:
                mirror.cache.begin([(seq, 2)]).commit(allow_missing_layers=True)
            except OutOfPagesError as error:
                errors.append(error) if "another thread" not in str(error) else None
            except RuntimeError as error:
                errors.append(error)
        mirror.cache.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not pool._open_forwards
    pool.check()
