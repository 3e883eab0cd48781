"""merge_states: attention over parts, put together, is attention over the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyserve_ops import testing
from tinyserve_ops.testing import Implementation, assert_close, make_batch


def random_states(num_states: int, seed: int, scale: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(num_states, 3, 2, 16, generator=generator)
    return outs, scale * torch.randn(num_states, 3, 2, generator=generator)


def oracle(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = lses.double().softmax(0).nan_to_num(0.0)
    return (weights[..., None] * outs.double()).sum(0), lses.double().logsumexp(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_states", [1, 2, 7])
def test_it_equals_the_weighted_mean_in_float64(
    impl: Implementation, num_states: int, dtype: torch.dtype
) -> None:
    outs, lses = random_states(num_states, 0)
    out, lse = impl.ops.merge_states(outs.to(dtype), lses)
    expected_out, expected_lse = oracle(outs.to(dtype), lses)
    assert out.dtype == dtype
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("head_dim", [8, 40, 256])
def test_every_head_dim_is_merged(impl: Implementation, head_dim: int) -> None:
    outs, lses = torch.randn(3, 2, 5, head_dim), torch.randn(3, 2, 5)
    assert_close(impl.ops.merge_states(outs, lses)[0], oracle(outs, lses)[0])


def test_states_that_attended_to_nothing_do_not_count(impl: Implementation) -> None:
    outs, lses = random_states(3, 1)
    lses[0, 0] = -torch.inf
    lses[:, 1] = -torch.inf
    outs[0, 0] = torch.nan
    outs[:, 1] = torch.nan
    out, lse = impl.ops.merge_states(outs, lses)
    assert_close(out[0], oracle(outs[1:], lses[1:])[0][0])
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("shift", [-1e6, -5e4, 0.0, 5e4, 1e6])
def test_merging_is_invariant_to_a_shift(impl: Implementation, shift: float) -> None:
    outs, _ = random_states(3, 2)
    lses = torch.tensor([1.0, 2.0, 4.0])[:, None, None].expand(3, 3, 2).contiguous()
    expected, _ = impl.ops.merge_states(outs, lses)
    out, lse = impl.ops.merge_states(outs, lses + shift)
    assert_close(out, expected)
    assert_close(lse, oracle(outs, lses + shift)[1], rtol=1e-6)


def test_parts_of_a_page_list_merge_to_the_whole(impl: Implementation) -> None:
    batch = make_batch([300, 7], seed=3)
    outs, lses = [], []
    for pages in ([0, 5, 9], [3, 4], [18], []):
        batch.selected_pages = torch.full((2, 2, 3), -1, dtype=torch.int32)
        batch.num_selected = torch.zeros((2, 2), dtype=torch.int32)
        for row, last in enumerate((18, 0)):
            listed = [page for page in pages if page <= last]
            batch.selected_pages[row, :, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
            batch.num_selected[row] = len(listed)
        out, lse, _ = batch.run(impl.ops.attend_pages)
        outs.append(out)
        lses.append(lse)
    out, lse = impl.ops.merge_states(torch.stack(outs), torch.stack(lses))
    every = torch.tensor([0, 3, 4, 5, 9, 18]).expand(2, 2, -1)
    expected_out, expected_lse = testing.attention_oracle(batch, selected_pages=every)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31), num_states=st.integers(2, 6), split=st.integers(1, 5), scale=st.floats(0, 50)
)
def test_merging_is_associative(
    impl: Implementation, seed: int, num_states: int, split: int, scale: float
) -> None:
    outs, lses = random_states(num_states, seed, scale)
    split = min(split, num_states - 1)
    left = impl.ops.merge_states(outs[:split], lses[:split])
    right = impl.ops.merge_states(outs[split:], lses[split:])
    out, lse = impl.ops.merge_states(torch.stack([left[0], right[0]]), torch.stack([left[1], right[1]]))
    whole_out, whole_lse = impl.ops.merge_states(outs, lses)
    assert_close(out, whole_out, atol=1e-5)
    assert_close(lse, whole_lse, atol=1e-5, rtol=1e-6)


def test_one_state_comes_back_unchanged(impl: Implementation) -> None:
    outs, lses = random_states(1, 4)
    out, lse = impl.ops.merge_states(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


def test_strided_states_equal_their_contiguous_copies(impl: Implementation) -> None:
    outs, lses = random_states(4, 5)
    expected = impl.ops.merge_states(outs, lses)
    strided = impl.ops.merge_states(
        outs.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        lses.transpose(0, 2).contiguous().transpose(0, 2),
    )
    for actual, want in zip(strided, expected, strict=True):
        impl.assert_same(actual, want)


def test_no_tokens_give_empty_results(impl: Implementation) -> None:
    out, lse = impl.ops.merge_states(torch.zeros(2, 0, 4, 16), torch.zeros(2, 0, 4))
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
