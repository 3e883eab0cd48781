"""seal_pages: summaries bound, round and survive hostile keys; compiled and reference bytes are the same.

What is particular to the low-rank sketch is in test_low_rank.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyserve_ops import reference, testing
from tinyserve_ops.scorers import SCORERS, resolve, summary_bytes
from tinyserve_ops.testing import Implementation, assert_same_bits, make_batch, read_summary

HEADER = 16
LINEAR = [scorer.name for scorer in SCORERS.values() if scorer.is_linear]


def seal(impl: Implementation, keys: torch.Tensor, scorer: str, layout: str = "token_major") -> torch.Tensor:
    """Summaries of every page of keys [num_pages, num_kv_heads, page_size, head_dim]."""
    k_pages, _ = testing.make_pools(*keys.shape, keys.dtype, layout)
    k_pages.copy_(keys)
    name = resolve(scorer, keys.shape[2], keys.dtype)
    rows = torch.full(
        (*keys.shape[:2], summary_bytes(name, keys.shape[3], keys.shape[2])), 0xFF, dtype=torch.uint8
    )
    page_ids = torch.arange(len(keys), dtype=torch.int32)
    assert impl.ops.seal_pages(page_ids, k_pages, None, rows, name) is None
    return rows


def random_keys(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(shape, generator=generator) * torch.logspace(-2, 1, shape[-1])
    return (keys + torch.randn(shape[-1], generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scorer", [name for name in LINEAR if name != "mean_std"])
def test_compiled_summaries_equal_the_definition_byte_for_byte(
    cpu: Implementation, scorer: str, dtype: torch.dtype
) -> None:
    for page_size, head_dim in ((16, 64), (7, 40), (1, 8), (64, 256)):
        keys = random_keys(5, 2, page_size, head_dim, dtype=dtype)
        expected = seal(testing.get_implementation("reference"), keys, scorer)
        for layout in testing.LAYOUTS:
            assert_same_bits(seal(cpu, keys, scorer, layout), expected)


def test_compiled_deviations_equal_the_definition_within_one_code(cpu: Implementation) -> None:
    # Squares may be added with or without a fused multiply, so the last bit of a deviation is not fixed.
    keys = random_keys(6, 2, 16, 64)
    actual, expected = (
        seal(cpu, keys, "mean_std"),
        seal(testing.get_implementation("reference"), keys, "mean_std"),
    )
    mean = slice(HEADER, HEADER + 64)
    assert_same_bits(actual[..., mean], expected[..., mean])
    codes = [rows[..., HEADER + 64 :].view(torch.int8).int() for rows in (actual, expected)]
    assert (codes[0] - codes[1]).abs().max() <= 1
    scales = [rows[..., :HEADER].contiguous().view(torch.float32) for rows in (actual, expected)]
    testing.assert_close(scales[0], scales[1], atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scorer", LINEAR)
def test_summaries_equal_float64_statistics_within_one_code(
    impl: Implementation, scorer: str, dtype: torch.dtype
) -> None:
    keys = random_keys(3, 2, 16, 40, dtype=dtype, seed=1)
    rows = seal(impl, keys, scorer)
    for page in range(3):
        for head in range(2):
            tokens = keys[page, head].double().numpy()
            statistics = {
                "max": tokens.max(0), "min": tokens.min(0), "mean": tokens.mean(0), "std": tokens.std(0)
            }  # fmt: skip
            for name, got in read_summary(rows[page, head], resolve(scorer, 16, dtype), 40).items():
                want = statistics[name]
                if scorer == "bounds_full":
                    np.testing.assert_array_equal(got, want)
                    continue
                step = np.abs(want).max() / 127 * (1 + 1e-5)
                assert np.abs(got - want).max() <= (step if name in ("max", "min") else step / 2 * 1.001)
                if name == "max":
                    assert (got >= want).all()
                if name == "min":
                    assert (got <= want).all()


@pytest.mark.parametrize("scorer", LINEAR)
def test_unused_bytes_of_a_row_are_zero(impl: Implementation, scorer: str) -> None:
    keys = random_keys(1, 1, 4, 24, dtype=torch.bfloat16)
    row = seal(impl, keys, scorer)[0, 0]
    num_vectors = len(SCORERS[scorer].vectors)
    used = num_vectors * 24 * 2 if scorer == "bounds_full" else HEADER + num_vectors * 24
    assert not row[used:].any()
    if scorer != "bounds_full":
        assert not row[4 * num_vectors : HEADER].any()


@pytest.mark.parametrize("scorer", LINEAR)
def test_a_page_of_zeros_has_a_summary_of_zeros(impl: Implementation, scorer: str) -> None:
    assert not seal(impl, torch.zeros(2, 1, 16, 16), scorer).any()


@pytest.mark.parametrize("scorer", ["bounds", "bounds_mean", "bounds_full"])
def test_a_constant_page_is_restored_exactly_at_its_largest_channel(
    impl: Implementation, scorer: str
) -> None:
    keys = torch.linspace(-3.0, 2.0, 16).expand(1, 1, 16, 16).contiguous()
    vectors = read_summary(seal(impl, keys, scorer)[0, 0], resolve(scorer, 16, keys.dtype), 16)
    assert vectors["max"][0] >= -3.0
    np.testing.assert_allclose(vectors["min"][0], -3.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scorer", LINEAR)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "all_nan", "huge", "tiny"])
def test_hostile_keys_never_put_nan_or_infinity_into_a_summary(
    impl: Implementation, bad: str, scorer: str, dtype: torch.dtype
) -> None:
    keys = random_keys(1, 1, 16, 16, dtype=dtype, seed=2)
    largest = torch.finfo(dtype).max
    if bad == "all_nan":
        keys[..., 3] = torch.nan
    elif bad == "huge":
        keys[..., 3] = largest
        keys[..., 4] = -largest
    elif bad == "tiny":
        keys.fill_(torch.finfo(dtype).smallest_normal / 8)
    else:
        keys[0, 0, 5, 3] = float(bad)
    name = resolve(scorer, keys.shape[2], dtype)
    row = seal(impl, keys, scorer)[0, 0]
    if scorer == "bounds_full":
        assert all(np.isfinite(vector).all() for vector in read_summary(row, name, 16).values())
    else:
        assert row[:HEADER].view(torch.float32).isfinite().all()
    if bad == "nan" and scorer.startswith("bounds"):
        got = read_summary(row, name, 16)["max"][3]
        assert got >= keys[0, 0, :, 3].double().nan_to_num(-1e9).max().item()


def test_only_the_named_pages_are_sealed(impl: Implementation) -> None:
    batch = make_batch([100, 40])
    batch.page_summary.fill_(0xAB)
    page_id = int(batch.page_table[0, 2])
    batch.run(impl.ops.seal_pages, page_ids=torch.tensor([page_id], dtype=torch.int32))
    untouched = [page for page in range(len(batch.page_summary)) if page != page_id]
    assert (batch.page_summary[untouched] == 0xAB).all()
    assert (batch.page_summary[page_id] != 0xAB).any()


def test_no_page_ids_change_nothing(impl: Implementation) -> None:
    batch = make_batch([100])
    before = batch.page_summary.clone()
    batch.run(impl.ops.seal_pages, page_ids=torch.empty(0, dtype=torch.int32))
    assert torch.equal(batch.page_summary, before)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.floats(-6e4, 6e4, width=32) | st.sampled_from([0.0, -0.0, 1e-38, 6e4, 127.0]),
        min_size=16, max_size=16,
    )
)  # fmt: skip
def test_rounded_bounds_enclose_every_key(impl: Implementation, values: list[float]) -> None:
    keys = torch.tensor(values, dtype=torch.float32).reshape(1, 1, 2, 8)
    for scorer in ("bounds", "bounds_mean", "bounds_full"):
        row = seal(impl, keys, scorer)[0, 0]
        vectors = read_summary(row, resolve(scorer, 2, keys.dtype), 8)
        assert (vectors["max"] >= keys[0, 0].double().numpy()).all()
        assert (vectors["min"] <= keys[0, 0].double().numpy()).all()
    assert_same_bits(
        seal(impl, keys, "bounds"), seal(testing.get_implementation("reference"), keys, "bounds")
    )


def test_the_definition_takes_any_leading_shape() -> None:
    keys = random_keys(3, 2, 16, 16)
    rows = reference.summaries.summarise(keys, "bounds_mean")
    for page in range(3):
        assert_same_bits(reference.summaries.summarise(keys[page], "bounds_mean"), rows[page])
