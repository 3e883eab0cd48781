"""The low-rank scorer: layout and accuracy of the sketch, scores against float64, hostile keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tinyserve_ops import testing
from tinyserve_ops.scorers import RANKS, summary_bytes
from tinyserve_ops.testing import Batch, Implementation, assert_close, assert_same_bits, make_batch

SHAPES = [(2, 8), (5, 24), (16, 64), (16, 80), (16, 128), (64, 256), (33, 40)]  # page_size, head_dim


def seal(impl: Implementation, keys: torch.Tensor, rank: int, layout: str = "token_major") -> torch.Tensor:
    """Summaries of every page of keys [num_pages, num_kv_heads, page_size, head_dim]."""
    k_pages, _ = testing.make_pools(*keys.shape, keys.dtype, layout)
    k_pages.copy_(keys)
    name = f"low_rank_{rank}"
    num_bytes = summary_bytes(name, keys.shape[3], keys.shape[2])
    rows = torch.full((*keys.shape[:2], num_bytes), 0xFF, dtype=torch.uint8)
    impl.ops.seal_pages(torch.arange(len(keys), dtype=torch.int32), k_pages, None, rows, name)
    return rows


def restored(row: torch.Tensor, rank: int, keys: torch.Tensor) -> np.ndarray:
    """The keys [page_size, head_dim] that a summary row stands for."""
    page_size, head_dim = keys.shape[-2:]
    mean, sketch = testing.read_low_rank(row, rank, head_dim, page_size)
    return mean + sketch


def random_keys(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def low_rank_keys(num_pages: int, page_size: int, head_dim: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Pages of keys whose distance from their mean has `rank` directions, each half as long as the last."""
    coefficients = random_keys(num_pages, 1, page_size, rank, seed=seed) * 0.5 ** torch.arange(rank)
    directions = random_keys(num_pages, 1, rank, head_dim, seed=seed + 1)
    return random_keys(num_pages, 1, 1, head_dim, seed=seed + 2) + coefficients @ directions


def sealed(impl: Implementation, *args: object, **kwargs: object) -> Batch:
    batch = make_batch(*args, **kwargs)  # type: ignore[arg-type]
    batch.seal(impl.ops.seal_pages)
    return batch


@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES)
def test_the_parts_of_a_row_lie_where_the_layout_says(
    impl: Implementation, page_size: int, head_dim: int
) -> None:
    keys = random_keys(3, 2, page_size, head_dim)
    for rank in [rank for rank in RANKS if rank < page_size]:
        rows = seal(impl, keys, rank)
        sketch_bytes = rank * (-(-head_dim // 16) * 8 + -(-page_size // 16) * 8)
        used = head_dim + sketch_bytes + 2 * (1 + rank)
        assert rows.shape[2] == -(-used // 16) * 16
        assert not rows[..., used:].any()
        nibbles = rows[..., head_dim : head_dim + sketch_bytes]
        codes = torch.stack([nibbles & 15, nibbles >> 4], -1).int() - 8
        assert codes.abs().max() == 7
        # Every rank has its own scale, so its largest coefficient has the largest code.
        scales = rows[..., used - 2 * (1 + rank) : used].contiguous().view(torch.bfloat16)
        assert scales.isfinite().all()
        assert (scales > 0).all()


@pytest.mark.parametrize(("page_size", "head_dim"), [(5, 24), (17, 40)])
def test_channels_and_tokens_beyond_the_page_have_code_zero(
    impl: Implementation, page_size: int, head_dim: int
) -> None:
    row = seal(impl, random_keys(1, 1, page_size, head_dim), 1)[0, 0]
    blocks = row[head_dim : head_dim + (head_dim + 8) // 2].unflatten(0, (-1, 8))
    assert (blocks[-1] >> 4 == 8).all()  # head_dim 8 modulo 16: the high halves of the last block
    start = head_dim + (head_dim + 8) // 2
    num_blocks = -(-page_size // 16)
    coefficients = row[start : start + 8 * num_blocks].unflatten(0, (num_blocks, 8))
    codes = torch.cat([coefficients & 15, coefficients >> 4], 1).flatten()
    assert (codes[page_size:] == 8).all()


@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES)
def test_the_mean_is_restored_within_one_percent_of_a_code(
    impl: Implementation, page_size: int, head_dim: int
) -> None:
    keys = random_keys(2, 2, page_size, head_dim) + random_keys(head_dim, seed=1)
    rows = seal(impl, keys, 1)
    for page in range(2):
        for head in range(2):
            want = keys[page, head].double().numpy().mean(0)
            got, _ = testing.read_low_rank(rows[page, head], 1, head_dim, page_size)
            assert np.abs(got - want).max() <= 1.01 * np.abs(want).max() / 127 / 2 + 1e-6


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (16, 128), (64, 24), (64, 256)])
def test_keys_of_that_rank_are_restored_within_the_error_of_int4(
    impl: Implementation, rank: int, page_size: int, head_dim: int
) -> None:
    keys = low_rank_keys(8, page_size, head_dim, rank)
    rows = seal(impl, keys, rank)
    for page in range(8):
        want = keys[page, 0].double().numpy()
        spread = np.linalg.norm(want - want.mean(0))
        assert np.linalg.norm(restored(rows[page, 0], rank, keys) - want) < 0.35 * spread


@pytest.mark.parametrize("page_size", [5, 16, 64])
def test_more_ranks_never_restore_much_less(impl: Implementation, page_size: int) -> None:
    keys = random_keys(6, 1, page_size, 64)
    errors = []
    for rank in [rank for rank in RANKS if rank < page_size]:
        rows = seal(impl, keys, rank)
        restore = np.stack([restored(rows[page, 0], rank, keys) for page in range(6)])
        errors.append(np.linalg.norm(restore - keys[:, 0].double().numpy()))
    assert all(more <= 1.01 * less for less, more in itertools.pairwise(errors))
    assert errors[-1] < 0.95 * errors[0]


def test_the_key_far_from_the_others_is_fitted_first(impl: Implementation) -> None:
    keys = random_keys(1, 1, 16, 64)
    keys[0, 0, 11] *= 6.0
    want = keys[0, 0, 11].double().numpy()
    got = restored(seal(impl, keys, 1)[0, 0], 1, keys)[11]
    assert np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want)


@pytest.mark.parametrize("scorer", ["low_rank_1", "low_rank_2", "low_rank_4", "low_rank_8"])
@pytest.mark.parametrize("group_reduction", ["max", "softmax"])
def test_scores_equal_float64_for_every_rank(impl: Implementation, scorer: str, group_reduction: str) -> None:
    for name in (scorer, scorer.replace("rank", "rank_max")):
        batch = sealed(impl, [0, 15, 16, 100], [1, 1, 3, 1], num_heads=6, scorer=name)
        batch.group_reduction = group_reduction
        assert_close(
            batch.run(impl.ops.score_pages), testing.score_oracle(batch), atol=testing.score_tolerance(batch)
        )


@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES)
def test_scores_equal_float64_for_every_shape(impl: Implementation, page_size: int, head_dim: int) -> None:
    for scorer in ("low_rank_1", "low_rank_max_1", f"low_rank_{min(4, page_size - 1)}"):
        for dtype in (torch.float32, torch.bfloat16):
            batch = sealed(
                impl,
                [150, 3],
                scorer=scorer,
                page_size=page_size,
                head_dim=head_dim,
                dtype=dtype,
                num_heads=6,
            )
            assert_close(
                batch.run(impl.ops.score_pages),
                testing.score_oracle(batch),
                atol=testing.score_tolerance(batch),
            )


@pytest.mark.parametrize("group_size", [1, 3, 7, 9, 16])
def test_scores_equal_float64_for_every_group_size(impl: Implementation, group_size: int) -> None:
    batch = sealed(impl, [300], num_heads=2 * group_size, num_kv_heads=2, scorer="low_rank")
    for group_reduction in ("max", "softmax"):
        batch.group_reduction = group_reduction
        assert_close(
            batch.run(impl.ops.score_pages), testing.score_oracle(batch), atol=testing.score_tolerance(batch)
        )


@pytest.mark.parametrize("window", [1, 17, 40])
def test_the_softmax_runs_over_the_pages_in_the_window(impl: Implementation, window: int) -> None:
    batch = sealed(impl, [15, 47, 100], [2, 1, 1], scorer="low_rank", window=window)
    scores = batch.run(impl.ops.score_pages)
    assert_close(scores, testing.score_oracle(batch), atol=testing.score_tolerance(batch))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_page_of_that_rank_scores_close_to_its_true_log_sum_exp(impl: Implementation, rank: int) -> None:
    batch = make_batch([255], num_heads=2, num_kv_heads=2, head_dim=64, scorer=f"low_rank_{rank}")
    for head in range(2):
        pages = low_rank_keys(16, 16, 64, rank, seed=head)
        batch.keys[0][:, head] = pages.flatten(0, 2)
    batch.store()
    batch.seal(impl.ops.seal_pages)
    logits = batch.sm_scale * torch.einsum("hd,thd->ht", batch.q[0].double(), batch.keys[0].double())
    each = logits.unflatten(1, (16, 16))
    for scorer, want in ((batch.scorer, each.logsumexp(2)), (f"low_rank_max_{rank}", each.amax(2))):
        scores = batch.run(impl.ops.score_pages, scorer=scorer, group_reduction="max")[0, :, :16]
        # int4 and 8 bits for the mean: a tenth of a logit's spread, not a promise about single pages.
        assert (scores.double() - want).square().mean().sqrt() < 0.2 * want.std()


@pytest.mark.parametrize("scorer", ["bounds", "mean_std", "bounds_full", "low_rank", "low_rank_max"])
def test_the_softmax_over_pages_adds_the_shares_of_the_heads(impl: Implementation, scorer: str) -> None:
    batch = sealed(impl, [200], num_heads=6, num_kv_heads=2, scorer=scorer)
    alone = []
    for head in range(6):  # one query head per kv head: its own scores, nothing to reduce
        q = batch.q[:, [head, head]]
        alone.append(batch.run(impl.ops.score_pages, q=q, group_reduction="max")[0, head // 3, :12].double())
    shares = torch.stack(alone).softmax(1).unflatten(0, (2, 3)).sum(1)
    scores = batch.run(impl.ops.score_pages, group_reduction="softmax")
    assert_close(scores[0, :, :12], shares.log())
    assert (scores[0, :, 12] == torch.inf).all()


@pytest.mark.parametrize("scorer", ["low_rank", "low_rank_max", "bounds"])
def test_a_nan_query_gives_nan_to_its_own_kv_head_only(impl: Implementation, scorer: str) -> None:
    batch = sealed(impl, [63], num_heads=6, num_kv_heads=2, scorer=scorer)
    batch.q[0, 1, 3] = torch.nan
    scores = batch.run(impl.ops.score_pages, group_reduction="softmax")
    assert scores[0, 0, :4].isnan().all()
    assert scores[0, 1, :4].isfinite().all()


def test_a_nan_score_spoils_its_own_page_only(impl: Implementation) -> None:
    batch = sealed(impl, [63], num_heads=2, num_kv_heads=1, scorer="bounds_full")
    row = batch.page_summary[int(batch.page_table[0, 1]), 0]
    row[:4] = torch.tensor([torch.nan]).view(torch.uint8)
    scores = batch.run(impl.ops.score_pages, group_reduction="softmax")[0, 0, :4]
    assert scores.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("hidden", [[0], [0, 1, 2, 3]])
def test_pages_of_minus_infinity_are_not_nan(impl: Implementation, hidden: list[int]) -> None:
    batch = sealed(impl, [63], num_heads=2, num_kv_heads=1, scorer="bounds_full")
    batch.q.fill_(1.0)
    for page in hidden:
        row = batch.page_summary[int(batch.page_table[0, page]), 0]
        row[:] = torch.full((len(row) // 4,), -torch.inf).view(torch.uint8)
    # max(q, 0) * -inf is -inf, min(q, 0) * -inf would be 0 * inf: only the maxima are infinite.
    for page in hidden:
        batch.page_summary[int(batch.page_table[0, page]), 0, 64:] = 0
    scores = batch.run(impl.ops.score_pages, group_reduction="softmax")[0, 0, :4]
    assert not scores.isnan().any()
    assert (scores[hidden] == -torch.inf).all()


def test_a_page_of_equal_keys_keeps_its_mean_and_nothing_else(impl: Implementation) -> None:
    for page_size in (2, 5, 16, 64):
        keys = random_keys(1, 1, 1, 64).expand(1, 1, page_size, 64).contiguous()
        mean, sketch = testing.read_low_rank(seal(impl, keys, 1)[0, 0], 1, 64, page_size)
        assert not sketch.any()
        np.testing.assert_allclose(mean, keys[0, 0, 0].double().numpy(), atol=0.02)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_page_of_zeros_has_codes_and_scales_of_zero(impl: Implementation, zero: float) -> None:
    row = seal(impl, torch.full((1, 1, 16, 64), zero), 2)[0, 0]
    assert not row[:64].any()
    assert (row[64 : 64 + 80] == 0x88).all()
    assert not row[64 + 80 :].any()
    batch = make_batch([31], scorer="low_rank")
    batch.keys[0].fill_(zero)
    batch.store()
    batch.seal(impl.ops.seal_pages)
    scores = batch.run(impl.ops.score_pages, group_reduction="max")
    assert_close(scores[0, :, :2], torch.full((2, 2), np.log(16.0)))


def test_minus_zero_counts_as_zero(impl: Implementation) -> None:
    keys = random_keys(1, 1, 16, 64)
    keys[..., ::3] = 0.0
    assert_same_bits(seal(impl, torch.where(keys == 0, -0.0, keys), 2), seal(impl, keys, 2))


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "all_nan", "all_inf", "one_huge", "largest"])
def test_hostile_keys_never_put_nan_or_infinity_into_a_summary(
    impl: Implementation, bad: str, rank: int
) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        keys = random_keys(1, 1, 16, 24, dtype=dtype, seed=2)
        if bad.startswith("all"):
            keys[:] = float(bad.removeprefix("all_"))
        elif bad == "one_huge":
            keys[0, 0, 3] *= torch.finfo(dtype).max / 16
        elif bad == "largest":
            keys = keys.sign() * torch.finfo(dtype).max
        else:
            keys[0, 0, 5, 3] = float(bad)
        row = seal(impl, keys, rank)[0, 0]
        mean, sketch = testing.read_low_rank(row, rank, 24, 16)
        assert np.isfinite(mean).all()
        assert np.isfinite(sketch).all()
        assert_same_bits(seal(impl, keys, rank)[0, 0], row)


def test_a_nan_key_counts_as_zero(impl: Implementation) -> None:
    keys = random_keys(1, 1, 16, 24)
    keys[0, 0, 4, 7] = torch.nan
    assert_same_bits(seal(impl, keys, 2), seal(impl, keys.nan_to_num(0.0), 2))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 6e4, 1e30])
def test_scaling_the_keys_scales_the_sketch(impl: Implementation, magnitude: float) -> None:
    power = 2.0 ** round(np.log2(magnitude))
    keys = random_keys(2, 2, 16, 64)
    rows, scaled = seal(impl, keys, 2), seal(impl, keys * power, 2)
    codes = slice(0, 64 + 2 * 40)
    assert_same_bits(scaled[..., codes], rows[..., codes])
    before, after = (restored(r[0, 0], 2, keys) for r in (rows, scaled))
    np.testing.assert_allclose(after, before * power, rtol=1e-12)


@pytest.mark.parametrize("magnitude", [1e-30, 6e4, 1e30])
def test_extreme_magnitudes_give_finite_scores_and_the_right_ranking(
    impl: Implementation, magnitude: float
) -> None:
    batch = make_batch([63], num_heads=2, num_kv_heads=1, head_dim=64, scorer="low_rank")
    batch.keys[0] *= magnitude
    batch.store()
    batch.seal(impl.ops.seal_pages)
    batch.sm_scale = 0.125 / magnitude
    scores = batch.run(impl.ops.score_pages)
    assert scores[0, 0, :4].isfinite().all()
    assert_close(scores, testing.score_oracle(batch), atol=testing.score_tolerance(batch))


def test_pages_of_one_outlier_among_equal_keys_and_of_repeated_keys_are_restored(
    impl: Implementation,
) -> None:
    keys = random_keys(2, 1, 1, 64).repeat(1, 1, 16, 1)
    keys[0, 0, 9] += 3.0 * random_keys(64, seed=1)
    keys[1, 0, ::2] = random_keys(64, seed=2)  # two kinds of tokens: rank 1
    for rank in (1, 2, 8):
        rows = seal(impl, keys, rank)
        for page in range(2):
            want = keys[page, 0].double().numpy()
            error = np.linalg.norm(restored(rows[page, 0], rank, keys) - want)
            assert error < 0.35 * np.linalg.norm(want - want.mean(0))


def test_the_layout_of_the_pool_changes_no_score(impl: Implementation) -> None:
    keys = random_keys(4, 2, 16, 64, dtype=torch.bfloat16)
    expected = seal(impl, keys, 2)
    for layout in testing.LAYOUTS:
        rows = seal(impl, keys, 2, layout)
        for page in range(4):
            np.testing.assert_allclose(
                restored(rows[page, 0], 2, keys), restored(expected[page, 0], 2, keys), atol=1e-2
            )


def test_appending_seals_like_sealing(impl: Implementation) -> None:
    batch = make_batch([0], [70], scorer="low_rank", only_stored=True)
    batch.run(impl.ops.append_kv)
    appended = batch.page_summary.clone()
    batch.seal(impl.ops.seal_pages)
    assert_same_bits(appended, batch.page_summary)


@pytest.mark.parametrize("op", ["score_pages", "sparse_decode"])
def test_the_mean_over_the_group_is_refused_by_name(impl: Implementation, op: str) -> None:
    batch = sealed(impl, [40], scorer="low_rank")
    with pytest.raises(ValueError, match="group_reduction"):
        batch.run(getattr(impl.ops, op), group_reduction="mean")


@pytest.mark.parametrize("op", ["seal_pages", "score_pages", "append_kv"])
def test_a_rank_that_a_page_cannot_have_is_refused_by_name(impl: Implementation, op: str) -> None:
    batch = make_batch([40], page_size=4)
    batch.scorer, batch.group_reduction = "low_rank_4", "softmax"
    arguments = {"page_ids": batch.sealed_page_ids()} if op == "seal_pages" else {}
    with pytest.raises(ValueError, match="scorer"):
        batch.run(getattr(impl.ops, op), **arguments)


@pytest.mark.parametrize("scorer", ["low_rank", "low_rank_9", "low_rank_0", "low_rank_max"])
def test_the_ops_take_names_with_a_rank_only(impl: Implementation, scorer: str) -> None:
    batch = sealed(impl, [40], scorer="low_rank")
    with pytest.raises(ValueError, match="scorer"):
        batch.run(impl.ops.score_pages, scorer=scorer)


@pytest.mark.parametrize("group_reduction", ["max", "softmax"])
def test_a_sequence_alone_scores_like_in_a_batch(impl: Implementation, group_reduction: str) -> None:
    batch = sealed(impl, [0, 3000, -2, 40], [1, 1, 1, 3], num_heads=6, scorer="low_rank")
    batch = replace(batch, group_reduction=group_reduction)
    scores = batch.run(impl.ops.score_pages)
    for b in range(4):
        impl.assert_same(batch.take([b]).run(impl.ops.score_pages), scores[batch.new_tokens(b)])


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (16, 80), (9, 8), (64, 128)])
def test_compiled_sketches_score_like_the_definition(
    cpu: Implementation, rank: int, page_size: int, head_dim: int
) -> None:
    definition = testing.get_implementation("reference")
    keys = low_rank_keys(40, page_size, head_dim, 8) + 0.3 * random_keys(40, 1, page_size, head_dim, seed=9)
    queries = random_keys(16, head_dim, seed=7).double().numpy() * head_dim**-0.5
    ours, theirs = seal(cpu, keys, rank), seal(definition, keys, rank)
    for page in range(40):
        got, want = (queries @ restored(rows[page, 0], rank, keys).T for rows in (ours, theirs))
        # A code on the edge of rounding may fall either way; that is one step of one channel or one token.
        assert np.abs(got - want).max() <= 0.1 * np.abs(want).max()
