"""One forward: ragged batches, which rows are sparse, what is selected, what the stats say about it."""

from __future__ import annotations

import pytest
import torch
from dense_mirror import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, SM_SCALE, DenseMirror, new_cache, oracle
from op_calls import OpCalls

from tinyserve_ops import SparseConfig
from tinyserve_ops.scorers import summary_bytes

SMALL = SparseConfig(page_size=4, token_budget=16, dense_layers=1, record_selection=True)


def mixed_batch(order: str) -> tuple[DenseMirror, list[tuple[int, int]]]:
    """Sequences of several lengths and a batch in which `d` decodes, `p` prefills and `0` does nothing."""
    mirror = DenseMirror(new_cache(config=SparseConfig(page_size=4)))
    lengths = [0, 5, 16, 33, 3, 12]
    batch = [(mirror.new(lengths[i]), {"d": 1, "p": 6, "0": 0}[kind]) for i, kind in enumerate(order)]
    return mirror, batch


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("order", ["dd", "pp", "dp", "pd", "dpd", "pdpd", "d0p", "0d", "p0", "00"])
def test_a_mixed_batch_equals_full_attention_row_by_row(order, window):
    mirror, batch = mixed_batch(order)
    for _ in range(2):
        mirror.step(batch, window=window)
    for seq, _ in batch:
        mirror.assert_contents(seq)


def test_an_empty_batch_gives_an_empty_output():
    cache = new_cache()
    forward = cache.begin([])
    tensors = [torch.empty(0, heads, HEAD_DIM, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    for layer in range(NUM_LAYERS):
        out = forward.attend(layer, *tensors, 1.0)
        assert (out.shape, out.dtype) == ((0, 4, HEAD_DIM), torch.bfloat16)
    forward.commit()


def test_a_row_of_a_batch_equals_the_row_alone_bit_for_bit():
    config = SparseConfig(page_size=4, token_budget=16, dense_layers=1)
    both = DenseMirror(new_cache(config=config))
    seqs = [both.new(n) for n in (30, 50, 7)]
    alone = DenseMirror(new_cache(config=config))
    imported = alone.cache.import_(both.cache.export(seqs))
    inputs = [[both.random(3, heads) for heads in (4, 2, 2)] for _ in range(NUM_LAYERS)]

    def run(cache, rows):
        forward = cache.begin([(seq, 1) for seq, _ in rows])
        index = [row for _, row in rows]
        outs = [
            forward.attend(layer, *(t[index] for t in inputs[layer]), SM_SCALE) for layer in range(NUM_LAYERS)
        ]
        forward.commit()
        return outs

    together = run(both.cache, [(seq, row) for row, seq in enumerate(seqs)])
    for row, seq in enumerate(imported):
        for layer, out in enumerate(run(alone.cache, [(seq, row)])):
            assert torch.equal(out[0], together[layer][row])


def test_strided_inputs_are_taken_as_they_come():
    cache = new_cache()
    seq = cache.new_sequence()
    forward = cache.begin([(seq, 9)])
    fused = torch.randn(9, (4 + 2 + 2) * HEAD_DIM).view(9, 8, HEAD_DIM)
    for layer in range(NUM_LAYERS):
        out = forward.attend(layer, fused[:, :4], fused[:, 4:6], fused[:, 6:], SM_SCALE)
    forward.commit()
    expected = oracle(fused[:, :4], fused[:, 4:6], fused[:, 6:])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_small_budget_attends_exactly_to_the_selected_pages():
    mirror = DenseMirror(new_cache(config=SMALL))
    seqs = [mirror.new(40), mirror.new(9)]
    forward = mirror.cache.begin([(seq, 1) for seq in seqs])
    outs, queries = [], []
    for layer in range(NUM_LAYERS):
        q, k, v = mirror.random(2, 4), mirror.random(2, 2), mirror.random(2, 2)
        outs.append(forward.attend(layer, q, k, v, SM_SCALE))
        queries.append(q)
        for row, seq in enumerate(seqs):
            old_k, old_v = mirror.tokens[seq][layer]
            mirror.tokens[seq][layer] = (
                torch.cat([old_k, k[row : row + 1]]),
                torch.cat([old_v, v[row : row + 1]]),
            )
    forward.commit()
    (step,) = mirror.cache.selection_history()
    assert (step.sequences, step.lengths) == (tuple(seqs), (40, 9))
    assert sorted(step.selected_pages) == [1, 2]  # layer 0 is dense
    for layer in range(NUM_LAYERS):
        for row, seq in enumerate(seqs):
            pages = step.selected_pages[layer][row] if layer else None
            k, v = mirror.tokens[seq][layer]
            expected = oracle(queries[layer][row : row + 1], k, v, pages=pages, page_size=4)
            torch.testing.assert_close(outs[layer][row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
    for head in range(NUM_KV_HEADS):
        long_list = step.selected_pages[2][0][head].tolist()
        assert long_list == sorted(long_list)
        assert {0, 9, 10} <= set(long_list)
        assert step.selected_pages[2][1][head].tolist() == [0, 1, 2, -1]


def test_only_single_token_rows_of_later_layers_are_sparse():
    mirror = DenseMirror(new_cache(config=SparseConfig(dense_layers=2)))
    with OpCalls() as ops_called:

        def calls():
            found = ops_called.of("sparse_decode", "attend_pages", "prefill_attention")
            return [(name, given["q"].size(0)) for name, given in found]

        seqs = [mirror.new(5), mirror.new(6)]
        assert calls() == [("prefill_attention", 5)] * 3 + [("prefill_attention", 6)] * 3
        mirror.step([(seqs[0], 1), (seqs[1], 4)])
        dense, sparse, prefill = ("attend_pages", 1), ("sparse_decode", 1), ("prefill_attention", 4)
        assert calls() == [dense, prefill, dense, prefill, sparse, prefill]
        forward = mirror.cache.begin([(seqs[0], 1)], dense=True)
        for layer in range(NUM_LAYERS):
            forward.attend(layer, mirror.random(1, 4), mirror.random(1, 2), mirror.random(1, 2), SM_SCALE)
        assert calls() == [dense] * 3


def test_a_keep_ratio_gives_each_row_its_own_budget():
    config = SparseConfig(page_size=4, keep_ratio=0.5, dense_layers=0, record_selection=True)
    mirror = DenseMirror(new_cache(config=config))
    seqs = [mirror.new(79), mirror.new(30)]
    mirror.step([(seq, 1) for seq in seqs], check=False)
    mirror.step([(seq, 1) for seq in seqs], check=False)
    for step, expected in zip(mirror.cache.selection_history(), [(10, 4), (11, 4)], strict=True):
        selected = step.selected_pages[0]
        assert tuple((selected[row] >= 0).sum(-1).unique().tolist()[0] for row in range(2)) == expected


def test_positions_follow_next_position_and_not_the_stored_length():
    mirror = DenseMirror(new_cache())
    seqs = [mirror.new(5), mirror.new(3)]
    mirror.cache.set_next_position(seqs[0], 100)
    forward = mirror.cache.begin([(seqs[0], 2), (seqs[1], 1)])
    assert forward.positions().tolist() == [100, 101, 3]
    assert forward.last_token_indices().tolist() == [1, 2]
    assert forward.seq_lens().tolist() == [5, 3]
    forward.abandon()
    mirror.step([(seqs[0], 2), (seqs[1], 1)])
    assert [mirror.cache.next_position(seq) for seq in seqs] == [102, 4]


@pytest.mark.parametrize("window", [-1, 10])
def test_stats_count_what_the_selected_pages_hold(window):
    mirror = DenseMirror(new_cache(config=SMALL))
    cache = mirror.cache
    seqs = [mirror.new(40), mirror.new(9)]
    assert cache.stats().reuse_rate is None
    assert not cache.stats().selection_engaged
    for _ in range(3):
        mirror.step([(seq, 1) for seq in seqs], window=window, check=False)
    read = tokens = visible = scanned = 0
    for step in cache.selection_history():
        for position, row in zip(step.lengths, range(2), strict=True):
            first = max(0, position - window + 1) if window > 0 else 0
            layers = NUM_KV_HEADS * 2
            visible += (position // 4 - first // 4 + 1) * layers
            scanned += max(0, (position + 1) // 4 - first // 4) * layers
            tokens += (position + 1 - first) * NUM_KV_HEADS  # layer 0, dense
            for selected in step.selected_pages.values():
                for head in selected[row]:
                    pages = [page for page in head.tolist() if page >= 0]
                    read += len(pages)
                    tokens += sum(first <= page * 4 + slot <= position for page in pages for slot in range(4))
    stats = cache.stats()
    assert (stats.sparse_steps, stats.dense_steps, stats.prefill_tokens) == (3 * 2 * 2, 3 * 2, 49)
    assert (stats.pages_visible, stats.pages_scanned, stats.pages_read) == (visible, scanned, read)
    assert stats.tokens_attended == tokens
    assert stats.kv_bytes_read == tokens * 2 * HEAD_DIM * 4
    assert stats.summary_bytes_read == scanned * summary_bytes("low_rank", HEAD_DIM, 4)
    assert stats.selection_engaged == (window < 0)
    assert 0.0 < stats.reuse_rate <= 1.0
    assert stats.kv_bytes_held == (11 + 3) * cache.pool.groups[0].bytes_per_page
    cache.reset_stats()
    assert cache.stats().pages_read == 0
    assert cache.selection_history() == []


def test_reuse_is_the_share_of_pages_that_the_step_before_had_read():
    mirror = DenseMirror(new_cache(config=SMALL))
    seq = mirror.new(40)
    mirror.step([(seq, 1)], check=False)
    mirror.step([(seq, 1)], check=False)
    before, last = mirror.cache.selection_history()
    shares = []
    for layer in (1, 2):
        pairs = [
            (
                set(last.selected_pages[layer][0][head].tolist()),
                set(before.selected_pages[layer][0][head].tolist()),
            )
            for head in range(NUM_KV_HEADS)
        ]
        shares.append(sum(len(now & old) for now, old in pairs) / sum(len(now) for now, _ in pairs))
    assert mirror.cache.stats().reuse_rate == pytest.approx(sum(shares) / 2)


def test_stats_do_not_depend_on_when_they_are_summed():
    counts = []
    for ask_often in (False, True):
        mirror = DenseMirror(new_cache(config=SMALL))
        seq = mirror.new(21)
        for _ in range(100):  # 300 calls: more than are kept before they are summed
            mirror.step([(seq, 1)], check=False)
            if ask_often:
                mirror.cache.stats()
        counts.append(mirror.cache.stats())
    assert counts[0] == counts[1]


def test_a_layer_that_does_not_exist_is_refused():
    cache = new_cache()
    forward = cache.begin([(cache.new_sequence(), 1)])
    with pytest.raises(ValueError, match="layer_idx: expected 0 to 2, got 3"):
        forward.attend(
            3, torch.zeros(1, 4, HEAD_DIM), torch.zeros(1, 2, HEAD_DIM), torch.zeros(1, 2, HEAD_DIM), 1.0
        )


def test_soft_capping_is_refused_by_name():
    cache = new_cache()
    forward = cache.begin([(cache.new_sequence(), 1)])
    with pytest.raises(ValueError, match="softcap"):
        forward.attend(
            0,
            torch.zeros(1, 4, HEAD_DIM),
            torch.zeros(1, 2, HEAD_DIM),
            torch.zeros(1, 2, HEAD_DIM),
            1.0,
            softcap=30.0,
        )


@pytest.mark.parametrize("token_budget", [2**20, 2**40])
def test_a_budget_beyond_the_sequence_costs_no_more_than_the_sequence(token_budget):
    config = SparseConfig(page_size=4, token_budget=token_budget, dense_layers=0, record_selection=True)
    mirror = DenseMirror(new_cache(config=config))
    seqs = [mirror.new(40), mirror.new(2)]
    mirror.step([(seq, 1) for seq in seqs])
    mirror.step([(seqs[1], 1)])
    mirror.step([(seqs[0], 1), (seqs[1], 3)])
    widths = [step.selected_pages[0].size(-1) for step in mirror.cache.selection_history()]
    assert widths == [11, 3, 11]  # pages of the longest row, or the forced ones


def test_reuse_of_lists_of_different_width_is_counted():
    config = SparseConfig(page_size=4, token_budget=2**40, dense_layers=0)
    mirror = DenseMirror(new_cache(config=config))
    seqs = [mirror.new(19), mirror.new(6)]
    for _ in range(2):
        mirror.step([(seq, 1) for seq in seqs])
    # The first row gains a page in the second step: 5 of its 6 were read before, and 2 of the other's 2.
    assert mirror.cache.stats().reuse_rate == pytest.approx(7 / 8)


def test_stats_keep_no_entry_per_step():
    mirror = DenseMirror(new_cache(config=SparseConfig(page_size=4, token_budget=16, dense_layers=0)))
    seq = mirror.new(5)
    for _ in range(200):
        mirror.step([(seq, 1)], window=7, check=False)
    recorder = mirror.cache.recorder
    assert len(recorder._sums) == 1
    assert len(recorder._pending) < 256
