"""int8 pages: how rows are quantised, that poison stays with its sequence, that unused slots never leak."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyserve_ops import testing
from tinyserve_ops.testing import Batch, Implementation, assert_close, assert_same_bits, make_batch


def append(impl: Implementation, keys: torch.Tensor, scorer: str = "bounds") -> Batch:
    """A batch of one sequence whose `keys` [n, num_kv_heads, head_dim] (values alike) went through
    append_kv.
    """
    batch = make_batch(
        [0], [len(keys)], num_heads=keys.shape[1], num_kv_heads=keys.shape[1], head_dim=keys.shape[2],
        dtype=keys.dtype, kv_dtype=torch.int8, scorer=scorer, only_stored=True,
    )  # fmt: skip
    batch.k, batch.v = keys, keys.flip(0)
    batch.keys, batch.values = [batch.k], [batch.v]
    batch.run(impl.ops.append_kv)
    return batch


def rows_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Key codes [n, num_kv_heads, head_dim] and scales [n, num_kv_heads] of the first sequence."""
    ids = batch.page_table[0][batch.page_table[0] >= 0].long()
    assert batch.k_scales is not None
    codes = batch.k_pages[ids].transpose(1, 2).flatten(0, 1)
    return codes[: len(batch.k)], batch.k_scales[ids].transpose(1, 2).flatten(0, 1)[: len(batch.k)]


def attend_both(impl: Implementation, batch: Batch) -> list[torch.Tensor]:
    """Everything that attention gives: dense, and sparse over freshly sealed pages."""
    batch.seal(impl.ops.seal_pages)
    return [*batch.run(impl.ops.attend_pages)[:2], *batch.run(impl.ops.sparse_decode)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.floats(width=32) | st.sampled_from([0.0, -0.0, 127.0, 63.5, 0.5, 1e-45, -1e-44, 6e4, 3.4e38]),
        min_size=8,
        max_size=8,
    )
)
def test_codes_and_scales_are_those_of_the_definition_bit_for_bit(
    impl: Implementation, values: list[float]
) -> None:
    keys = torch.tensor(values, dtype=torch.float32).reshape(1, 1, 8)
    codes, scales = rows_of(append(impl, keys))
    expected_codes, expected_scales = testing.expected_rows(keys)
    assert torch.equal(codes, expected_codes)
    assert_same_bits(scales, expected_scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ops_and_definition_store_the_same_bits(cpu: Implementation, dtype: torch.dtype) -> None:
    keys = torch.randn(70, 3, 64, generator=torch.Generator().manual_seed(1)).mul(
        torch.logspace(-9, 4, 70)[:, None, None]
    )
    for scorer in ("bounds", "bounds_mean"):
        ours, reference = (
            append(impl, keys.to(dtype), scorer) for impl in (cpu, testing.get_implementation("reference"))
        )
        for name, pool in ours.pools.items():
            assert_same_bits(pool, reference.pools[name])


def test_halves_go_to_the_even_code(impl: Implementation) -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]).reshape(1, 1, 8)
    codes, scales = rows_of(append(impl, row))
    assert scales.item() == 1.0
    assert codes.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_a_value_is_off_by_at_most_half_a_scale(impl: Implementation) -> None:
    keys = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(2)) * 7
    codes, scales = rows_of(append(impl, keys))
    error = (scales.double()[..., None] * codes.double() - keys.double()).abs()
    assert (error <= scales.double()[..., None] * 0.5 * (1 + 1e-5)).all()
    assert (codes.abs().amax(-1) == 127).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -6e-44])
def test_rows_of_zeros_or_next_to_nothing_have_scale_and_codes_0(impl: Implementation, value: float) -> None:
    codes, scales = rows_of(append(impl, torch.full((20, 2, 8), value)))
    assert not codes.any()
    assert_same_bits(scales, torch.zeros(20, 2))


def test_all_zero_keys_give_the_mean_of_the_values(impl: Implementation) -> None:
    batch = make_batch([39], kv_dtype=torch.int8)
    batch.keys[0].zero_()
    batch.store()
    mean = batch.stored_tokens(0)[1].mean(0).repeat_interleave(2, 0)
    dense_out, _, sparse_out, *_ = attend_both(impl, batch)  # a budget of four pages covers all three
    for out in (dense_out, sparse_out):
        assert_close(out[0], mean, atol=1e-6 + testing.attention_tolerance(batch)[0])


def test_one_outlier_silences_the_small_values_of_its_row_only(impl: Implementation) -> None:
    keys = torch.full((20, 2, 16), 1e-3)
    keys[5, 0, 3] = 1e4
    codes, scales = rows_of(append(impl, keys))
    assert codes[5, 0].tolist() == [0, 0, 0, 127] + [0] * 12
    assert scales[5, 0] == torch.tensor(1e4) / 127
    others = torch.ones(20, 2, dtype=torch.bool)
    others[5, 0] = False
    assert (codes[others] == 127).all()
    assert_close(scales[others], torch.full((39,), 1e-3 / 127))


def test_fp16_keys_near_the_end_of_their_range_stay_finite(impl: Implementation) -> None:
    batch = make_batch([40], head_dim=64, dtype=torch.float16, kv_dtype=torch.int8)
    batch.keys[0].copy_(torch.where(batch.keys[0] > 0, 6e4, -6e4))
    batch.sm_scale = 1e-4
    batch.store()
    batch.seal(impl.ops.seal_pages)
    expected_out, expected_lse = testing.attention_oracle(batch)
    out, lse, _ = batch.run(impl.ops.attend_pages)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse, atol=1e-3, rtol=1e-5)
    assert all(result.isfinite().all() for result in attend_both(impl, batch))


def test_a_page_of_negative_keys_has_negative_bounds(impl: Implementation) -> None:
    keys = -0.1 - torch.rand(16, 2, 16, generator=torch.Generator().manual_seed(3))
    batch = append(impl, keys)
    stored = batch.stored_tokens(0)[0].float()  # a bound is promised for the fp32 product
    for head in range(2):
        row = batch.page_summary[batch.page_table[0, 0], head]
        vectors = testing.read_summary(row, "bounds", 16)
        assert (vectors["max"] >= stored[:, head].amax(0).numpy()).all()
        assert (vectors["min"] <= stored[:, head].amin(0).numpy()).all()
        assert (vectors["max"] < 0).all()


def test_appending_to_a_page_leaves_its_earlier_rows_alone(impl: Implementation) -> None:
    batch = make_batch([5], [1], kv_dtype=torch.int8, only_stored=True)
    before = batch.with_own_pools()
    batch.k.mul_(1e6)
    batch.run(impl.ops.append_kv)
    page_id = int(batch.page_table[0, 0])
    for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
        assert_same_bits(batch.pools[name][page_id, :, :5], before.pools[name][page_id, :, :5])
    assert batch.k_scales is not None
    assert (batch.k_scales[page_id, :, 5] > 1e3).all()


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_reads_back_as_nan_and_no_other_does(
    impl: Implementation, bad: float, part: str
) -> None:
    batch = make_batch([40, 300, 7], num_heads=6, kv_dtype=torch.int8, page_budget=8)
    clean = attend_both(impl, batch)
    poisoned = replace(batch, keys=[t.clone() for t in batch.keys], values=[t.clone() for t in batch.values])
    poisoned = poisoned.with_own_pools()
    (poisoned.keys if part == "k" else poisoned.values)[1][290, 0, 3] = bad  # in the recent pages
    poisoned.store()
    results = attend_both(impl, poisoned)
    for got, want in zip(results, clean, strict=True):
        for row in (0, 2):  # other sequences, to the bit
            impl.assert_same(got[row], want[row])
    for out in (results[0], results[2]):
        assert out[1, :3].isnan().all()  # the query heads of kv head 0
        assert out[1, 3:].isfinite().all()
    poison_scales = poisoned.k_scales if part == "k" else poisoned.v_scales
    assert poison_scales is not None
    page_id = int(poisoned.page_table[1, 290 // 16])
    assert poison_scales[page_id, 0, 290 % 16].isnan()
    assert not (poisoned.k_pages if part == "k" else poisoned.v_pages)[page_id, 0, 290 % 16].any()
    assert (
        poisoned.page_summary[poisoned.sealed_page_ids().long(), :, :16].view(torch.float32).isfinite().all()
    )


def test_a_query_of_nan_leaves_the_other_sequences_alone(impl: Implementation) -> None:
    batch = make_batch([40, 300, 7], num_heads=6, kv_dtype=torch.int8, page_budget=8)
    clean = attend_both(impl, batch)
    batch.q[1, 2] = torch.nan
    results = attend_both(impl, batch)
    for got, want in zip(results, clean, strict=True):
        for row in (0, 2):
            impl.assert_same(got[row], want[row])
    assert results[0][1, 2].isnan().all()
    for head in (0, 1, 3, 4, 5):
        impl.assert_same(results[0][1, head], clean[0][1, head])


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("window", [-1, 20])
def test_whatever_lies_in_unused_slots_never_leaks(impl: Implementation, window: int, layout: str) -> None:
    batch = make_batch([0, 15, 16, 40], kv_dtype=torch.int8, layout=layout, window=window)
    prefill = make_batch(
        [10, 33], [20, 5], kv_dtype=torch.int8, layout=layout, window=window, only_stored=True
    )
    expected = [*attend_both(impl, batch), *prefill.run(impl.ops.prefill_attention)]
    for case in (batch, prefill):
        for pages, scales in ((case.k_pages, case.k_scales), (case.v_pages, case.v_scales)):
            assert scales is not None
            unused = scales.isnan()
            assert unused.any()
            scales[unused] = torch.inf
            pages.masked_fill_(unused[..., None], 77)
    got = [*batch.run(impl.ops.attend_pages)[:2], *batch.run(impl.ops.sparse_decode)]
    for actual, want in zip([*got, *prefill.run(impl.ops.prefill_attention)], expected, strict=True):
        assert_same_bits(actual, want)
    assert all(result.isfinite().all() for result in (expected[0], expected[2]))


def test_prefill_attends_to_new_tokens_as_given_and_decode_to_what_is_stored(impl: Implementation) -> None:
    batch = make_batch([30], [10], kv_dtype=torch.int8, only_stored=True)
    as_given, _ = batch.run(impl.ops.prefill_attention)
    assert_close(as_given, testing.attention_oracle(batch, new_tokens_as_given=True)[0])
    batch.run(impl.ops.append_kv)
    stored, _, _ = batch.run(impl.ops.attend_pages)
    rounding, _ = testing.attention_tolerance(batch)
    assert_close(stored, testing.attention_oracle(batch)[0], atol=2e-5 + rounding)
    assert 1e-4 < (stored - as_given).abs().max() < 0.05


def test_int8_attention_stays_close_to_that_of_the_tokens_themselves(impl: Implementation) -> None:
    batch = make_batch([700, 40], head_dim=64, kv_dtype=torch.int8)
    exact = make_batch([700, 40], head_dim=64)
    out, _, _ = batch.run(impl.ops.attend_pages)
    assert_close(out, testing.attention_oracle(exact)[0], atol=0.01, rtol=0.01)


def test_page_and_scale_offsets_beyond_2_to_the_31_elements_are_right(impl: Implementation) -> None:
    small = make_batch([16], [14], num_heads=2, num_kv_heads=1, head_dim=64, kv_dtype=torch.int8)
    num_pages = 2**31 // (2 * 16 * 64) + 8
    pages = torch.empty(num_pages, 2, 1, 16, 64, dtype=torch.int8)  # virtual: only two pages are touched
    scales = torch.empty(num_pages, 2, 1, 1024)[..., :16]
    assert (num_pages - 1) * pages.stride(0) > 2**31
    assert (num_pages - 1) * scales.stride(0) > 2**31
    page_table = torch.tensor([[num_pages - 1, num_pages - 2]], dtype=torch.int32)
    far = replace(
        small, k_pages=pages[:, 0], v_pages=pages[:, 1], k_scales=scales[:, 0], v_scales=scales[:, 1],
        page_table=page_table,
    )  # fmt: skip
    for page, page_id in enumerate(page_table[0].tolist()):
        for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
            far.pools[name][page_id] = small.pools[name][small.page_table[0, page]]
    for batch in (small, far):  # over what is there already
        batch.run(impl.ops.append_kv, page_summary=None)
    for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
        for page, page_id in enumerate(page_table[0].tolist()):
            tokens = 16 if page == 0 else 14
            here = small.pools[name][small.page_table[0, page]][:, :tokens]
            assert_same_bits(far.pools[name][page_id][:, :tokens], here)
    for op in (impl.ops.attend_pages, impl.ops.prefill_attention):
        assert_same_bits(far.run(op)[0], small.run(op)[0])
