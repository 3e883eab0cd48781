"""attend_pages against a dense float64 softmax over the plain tokens, and the invariances it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinyserve_ops import testing
from tinyserve_ops.testing import Batch, Implementation, assert_close, make_batch

BOUNDARY_LENS = (1, 15, 16, 17, 31, 33, 255, 257)


DTYPES = pytest.mark.parametrize(("dtype", "kv_dtype"), testing.DTYPE_PAIRS)
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])


def assert_matches_oracle(impl: Implementation, batch: Batch) -> None:
    out, lse, _ = batch.run(impl.ops.attend_pages)
    expected_out, expected_lse = testing.attention_oracle(batch, selected_pages=batch.selected_pages)
    assert out.dtype == batch.q.dtype
    assert lse.dtype == torch.float32
    out_rounding, lse_rounding = testing.attention_tolerance(batch)
    assert_close(out, expected_out, atol=testing.tolerance(out.dtype) + out_rounding)
    assert_close(lse, expected_lse, atol=2e-5 + lse_rounding, rtol=2e-6)


def listed(batch: Batch, width: int, step: int) -> Batch:
    """Each row attends to its last page and every `step`-th before it, each kv head to its own."""
    shape = (len(batch.q), batch.num_kv_heads)
    pages = torch.full((*shape, width), -1, dtype=torch.int32)
    counts = torch.zeros(shape, dtype=torch.int32)
    for b, stored_len in enumerate(batch.seq_lens.tolist()):
        tokens = batch.new_tokens(b)
        for token in range(tokens.start, tokens.stop):
            position = stored_len + token - tokens.start
            if position < 0:
                continue
            last = position // batch.page_size
            for head in range(batch.num_kv_heads):
                chosen = sorted({*range(head % step, last, step), last})[-width:]
                pages[token, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
                counts[token, head] = len(chosen)
    return replace(batch, selected_pages=pages, num_selected=counts)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@DTYPES
def test_ragged_batch_equals_float64(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype, layout: str
) -> None:
    lengths = [n - 1 for n in BOUNDARY_LENS]
    assert_matches_oracle(impl, make_batch(lengths, dtype=dtype, kv_dtype=kv_dtype, layout=layout, seed=1))


@KV_DTYPES
@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 7, 8, 9, 16, 24, 64])
def test_every_page_size_equals_float64(
    impl: Implementation, page_size: int, layout: str, kv_dtype: torch.dtype
) -> None:
    lengths = [0, 6, 7, 63, 64, 130]
    batch = make_batch(lengths, page_size=page_size, kv_dtype=kv_dtype, layout=layout, seed=2)
    assert_matches_oracle(impl, batch)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 112, 128, 160, 192, 256])
def test_every_head_dim_equals_float64(impl: Implementation, head_dim: int) -> None:
    for layout, dtype in zip(testing.LAYOUTS, (torch.float32, torch.bfloat16, torch.float16), strict=True):
        for kv_dtype in (dtype, torch.int8):
            batch = make_batch(
                [0, 16, 40], head_dim=head_dim, layout=layout, dtype=dtype, kv_dtype=kv_dtype, seed=3
            )
            assert_matches_oracle(impl, batch)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_lengths_over_several_chunks_equal_float64(
    impl: Implementation, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([511, 512, 1024], head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, seed=8)
    assert_matches_oracle(impl, batch)


@pytest.mark.parametrize("head_dim", [1, 12, 320])
def test_other_head_dims_are_refused(impl: Implementation, head_dim: int) -> None:
    batch = make_batch([20])
    k_pages, v_pages = testing.make_pools(8, 2, 16, head_dim, torch.float32, "token_major")
    q = torch.zeros(1, 4, head_dim)
    arguments = batch.arguments(impl.ops.attend_pages, q=q, k_pages=k_pages, v_pages=v_pages)
    testing.assert_refused(impl.ops.attend_pages, arguments, "head_dim")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (6, 2), (4, 4), (8, 1), (28, 4)])
def test_query_heads_share_kv_heads_in_blocks(
    impl: Implementation, num_heads: int, num_kv_heads: int
) -> None:
    batch = make_batch([16], num_heads=num_heads, num_kv_heads=num_kv_heads)
    for head in range(num_kv_heads):
        batch.values[0][:, head] = head
    batch.store()
    out, _, _ = batch.run(impl.ops.attend_pages)
    expected = torch.arange(num_heads) // (num_heads // num_kv_heads)
    assert_close(out, expected[None, :, None].expand_as(out).float(), atol=1e-6)


@pytest.mark.parametrize("group_size", [1, 3, 5, 6, 7, 9, 16])
@pytest.mark.parametrize("layout", ["token_major", "channel_major"])
@KV_DTYPES
def test_every_group_size_equals_float64(
    impl: Implementation, group_size: int, layout: str, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [17, 70], num_heads=2 * group_size, num_kv_heads=2, kv_dtype=kv_dtype, layout=layout, seed=4
    )
    assert_matches_oracle(impl, batch)
    assert_matches_oracle(impl, listed(batch, 3, 2))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_a_zero_query_gives_the_mean_of_the_values(impl: Implementation, page_size: int) -> None:
    batch = make_batch([n - 1 for n in BOUNDARY_LENS], page_size=page_size, seed=5)
    batch.q.zero_()
    out, lse, _ = batch.run(impl.ops.attend_pages)
    for b, length in enumerate(BOUNDARY_LENS):
        mean = batch.values[b].double().mean(0).repeat_interleave(2, 0)
        assert_close(out[b], mean, atol=1e-6, rtol=1e-6)
        assert_close(lse[b], torch.full((4,), float(length)).log(), atol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
@pytest.mark.parametrize("page_size", [7, 16])
@KV_DTYPES
def test_a_window_hides_what_lies_before_it(
    impl: Implementation, window: int, page_size: int, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [0, 15, 16, 50, 100], [1, 3, 1, 2, 1], page_size=page_size, kv_dtype=kv_dtype, window=window, seed=6
    )
    assert_matches_oracle(impl, batch)
    assert_matches_oracle(impl, listed(batch, 20, 1))


def test_several_new_tokens_see_their_predecessors_only(impl: Implementation) -> None:
    assert_matches_oracle(impl, make_batch([0, 14, 31], [5, 20, 1], seed=7))


@KV_DTYPES
def test_a_page_list_restricts_each_kv_head_to_its_own_pages(
    impl: Implementation, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [5, 100, 300, 700], [1, 2, 1, 1], num_heads=6, num_kv_heads=3, kv_dtype=kv_dtype, seed=8
    )
    assert_matches_oracle(impl, listed(batch, 30, 2))


@DTYPES
def test_rows_that_see_nothing_give_zeros_and_leave_the_others_alone(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([-1, 5, -4, 15, -2], [1, 1, 2, 1, 4], dtype=dtype, kv_dtype=kv_dtype, seed=9)
    out, lse, page_lse = batch.run(impl.ops.attend_pages, return_page_lse=True)
    empty = torch.tensor([0, 2, 3, 5, 6])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    assert (page_lse[empty] == -torch.inf).all()
    assert_matches_oracle(impl, batch)
    for b, token in ((1, 1), (3, 4)):
        solo_out, solo_lse, _ = batch.take([b]).run(impl.ops.attend_pages)
        impl.assert_same(out[token : token + 1], solo_out)
        impl.assert_same(lse[token : token + 1], solo_lse)


def test_a_list_without_pages_gives_zeros(impl: Implementation) -> None:
    batch = make_batch([20, 40])
    batch.selected_pages = torch.full((2, 2, 3), -1, dtype=torch.int32)
    batch.selected_pages[1, :, 0] = 2
    batch.num_selected = torch.tensor([[0, 0], [1, 1]], dtype=torch.int32)
    out, lse, _ = batch.run(impl.ops.attend_pages)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    assert_matches_oracle(impl, batch)


@pytest.mark.parametrize("seq_lens", [[], [20, 3]])
def test_a_batch_without_new_tokens_gives_empty_results(impl: Implementation, seq_lens: list[int]) -> None:
    batch = make_batch(seq_lens, [0] * len(seq_lens), dtype=torch.float16)
    out, lse, page_lse = batch.run(impl.ops.attend_pages, return_page_lse=True)
    assert out.shape == (0, 4, 16)
    assert out.dtype == torch.float16
    assert lse.shape == (0, 4)
    assert page_lse.shape == (0, 4, batch.page_table.shape[1])


@KV_DTYPES
def test_the_lse_of_pages_adds_up_to_the_lse_of_the_row(impl: Implementation, kv_dtype: torch.dtype) -> None:
    batch = make_batch([-3, 0, 15, 60, 400], [1, 1, 1, 3, 1], kv_dtype=kv_dtype, seed=10)
    for case in (batch, listed(batch, 9, 3), replace(batch, window=37)):
        _, lse, page_lse = case.run(impl.ops.attend_pages, return_page_lse=True)
        assert_close(page_lse.logsumexp(2), lse)
        for row in range(len(lse)):
            count = int((page_lse[row] > -torch.inf).sum(1).max())
            assert (page_lse[row, :, count:] == -torch.inf).all()


@KV_DTYPES
def test_the_lse_of_a_page_is_that_of_attention_to_it_alone(
    impl: Implementation, kv_dtype: torch.dtype
) -> None:
    batch = listed(make_batch([100], kv_dtype=kv_dtype, seed=11), 4, 2)
    assert batch.selected_pages is not None
    _, _, page_lse = batch.run(impl.ops.attend_pages, return_page_lse=True)
    for entry in range(4):
        only = batch.selected_pages[:, :, entry : entry + 1]
        _, lse = testing.attention_oracle(batch, selected_pages=only)
        assert_close(page_lse[:, :, entry], lse)


def test_page_lse_is_empty_unless_asked_for(impl: Implementation) -> None:
    _, _, page_lse = make_batch([20]).run(impl.ops.attend_pages)
    assert page_lse.shape == (0,)
    assert page_lse.dtype == torch.float32


@pytest.mark.parametrize("window", [-1, 300])
@pytest.mark.parametrize("layout", testing.LAYOUTS)
@KV_DTYPES
def test_all_pages_in_a_list_equal_no_list(
    impl: Implementation, layout: str, window: int, kv_dtype: torch.dtype
) -> None:
    batch = make_batch([0, 15, 255, 700], kv_dtype=kv_dtype, layout=layout, window=window, seed=12)
    dense = batch.run(impl.ops.attend_pages, return_page_lse=True)
    full = listed(batch, batch.page_table.shape[1], 1)
    if window > 0:  # list visible pages only: a hidden page would shift the chunks
        assert full.selected_pages is not None
        assert full.num_selected is not None
        for row, stored_len in enumerate(batch.seq_lens.tolist()):
            first = max(0, stored_len - window + 1) // batch.page_size
            full.selected_pages[row] = full.selected_pages[row].roll(-first, -1)
            full.num_selected[row] -= first
    for actual, expected in zip(full.run(impl.ops.attend_pages, return_page_lse=True), dense, strict=True):
        impl.assert_same(actual, expected)


@pytest.mark.parametrize("layout", ["token_major", "channel_major"])
@KV_DTYPES
def test_a_sequence_alone_equals_the_same_sequence_in_a_batch(
    impl: Implementation, layout: str, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [0, 300, 15, 600, 40], [1, 2, 1, 1, 3], num_heads=6, kv_dtype=kv_dtype, layout=layout, seed=13
    )
    for case in (batch, listed(batch, 20, 2)):
        out, lse, _ = case.run(impl.ops.attend_pages)
        for b in range(5):
            solo_out, solo_lse, _ = case.take([b]).run(impl.ops.attend_pages)
            impl.assert_same(solo_out, out[case.new_tokens(b)])
            impl.assert_same(solo_lse, lse[case.new_tokens(b)])


def test_permuting_the_batch_permutes_the_result(impl: Implementation) -> None:
    batch = make_batch([0, 300, -2, 600, 40], seed=14)
    order = [3, 0, 4, 2, 1]
    for name, expected in zip(("out", "lse"), batch.run(impl.ops.attend_pages), strict=False):
        actual = dict(zip(("out", "lse"), batch.take(order).run(impl.ops.attend_pages), strict=False))[name]
        impl.assert_same(actual, expected[torch.tensor(order)])


@KV_DTYPES
def test_the_number_of_threads_changes_nothing(impl: Implementation, kv_dtype: torch.dtype) -> None:
    batch = make_batch(
        [1000, 3, 500], num_heads=9, num_kv_heads=3, kv_dtype=kv_dtype, layout="channel_major", seed=15
    )
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(batch.run(impl.ops.attend_pages, return_page_lse=True))
    for one, two in zip(*results, strict=True):
        impl.assert_same(one, two)


@KV_DTYPES
def test_pool_layouts_agree(impl: Implementation, kv_dtype: torch.dtype) -> None:
    outs = [
        make_batch([40, 200], kv_dtype=kv_dtype, layout=name, seed=16).run(impl.ops.attend_pages)[0]
        for name in testing.LAYOUTS
    ]
    for out in outs[1:]:
        assert_close(out, outs[0])


def test_a_strided_query_equals_its_contiguous_copy(impl: Implementation) -> None:
    batch = make_batch([40, 200, 7], num_heads=4, seed=17)
    expected, _, _ = batch.run(impl.ops.attend_pages)
    fused, _, _ = testing.fused_views(batch.q, batch.k, batch.v)
    assert not fused.is_contiguous()
    for _, view in [("fused", fused), *testing.strided_views(batch.q)]:
        out, _, _ = batch.run(impl.ops.attend_pages, q=view)
        impl.assert_same(out, expected)


def test_a_broadcast_query_equals_its_contiguous_copy(impl: Implementation) -> None:
    batch = make_batch([40, 200, 7], seed=18)
    view = batch.q[:1].expand(3, -1, -1)
    expected, _, _ = batch.run(impl.ops.attend_pages, q=view.contiguous())
    impl.assert_same(batch.run(impl.ops.attend_pages, q=view)[0], expected)


def test_infinities_in_unused_slots_never_leak(impl: Implementation) -> None:
    batch = make_batch([0, 15, 16, 40], layout="channel_major", seed=19)
    expected, _, _ = batch.run(impl.ops.attend_pages)
    for pool in (batch.k_pages, batch.v_pages):
        pool.nan_to_num_(nan=torch.inf)
    assert torch.equal(batch.run(impl.ops.attend_pages)[0], expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        # A power of two times 127 is exact in int8, so the scores still are.
        (torch.float32, torch.int8),
    ],
)
def test_softmax_is_invariant_to_a_shift_of_all_scores(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(
        [30, 300], num_heads=2, num_kv_heads=2, head_dim=16, dtype=dtype, kv_dtype=kv_dtype, seed=20
    )
    batch.sm_scale = 1.0
    batch.q.zero_()
    batch.q[:, :, 0] = 1024.0
    batch.q[:, :, 1] = 1.0
    for keys in batch.keys:
        keys.zero_()
        keys[:, :, 0] = -1024.0  # every score is -2**20, about -1e6
    batch.store()
    out, lse, _ = batch.run(impl.ops.attend_pages)
    for b in range(2):
        assert_close(out[b], batch.stored_tokens(b)[1].mean(0), atol=testing.tolerance(dtype))
    assert lse.isfinite().all()
    for keys in batch.keys:
        keys[7, :, 1] = 2.0  # and one key 2 above the rest
    batch.store()
    assert_close(batch.run(impl.ops.attend_pages)[0], testing.attention_oracle(batch)[0])


def test_fp16_products_beyond_the_fp16_range_stay_finite(impl: Implementation) -> None:
    batch = make_batch([20], head_dim=64, dtype=torch.float16, seed=21)
    batch.q.fill_(64.0)
    batch.keys[0].fill_(64.0)
    batch.keys[0][3] = 63.0
    batch.sm_scale = 1.0  # scores of 262144
    batch.store()
    assert_matches_oracle(impl, batch)
    assert_matches_oracle(impl, replace(batch, sm_scale=0.125))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_queries_and_pages_may_differ_in_dtype(
    impl: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    assert_matches_oracle(impl, make_batch([3, 100], dtype=dtype, kv_dtype=kv_dtype, seed=22))


def test_page_offsets_beyond_2_to_the_31_elements_are_right(impl: Implementation) -> None:
    small = make_batch([30], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16, seed=23)
    num_pages = 2**31 // (2 * 16 * 64) + 8
    shared = torch.empty(
        num_pages, 2, 1, 16, 64, dtype=torch.bfloat16
    )  # virtual: only the pages used are touched
    k_pages, v_pages = shared[:, 0], shared[:, 1]
    assert (num_pages - 1) * k_pages.stride(0) > 2**31
    page_table = torch.tensor([[num_pages - 1, num_pages - 2]], dtype=torch.int32)
    for page, page_id in enumerate(page_table[0].tolist()):
        k_pages[page_id] = small.k_pages[small.page_table[0, page]]
        v_pages[page_id] = small.v_pages[small.page_table[0, page]]
    expected, _, _ = small.run(impl.ops.attend_pages)
    out, _, _ = small.run(impl.ops.attend_pages, k_pages=k_pages, v_pages=v_pages, page_table=page_table)
    assert torch.equal(out, expected)
