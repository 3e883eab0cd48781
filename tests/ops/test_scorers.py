"""The table of scorers: names, bytes per summary, and readable errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tinyserve_ops import scorers


@pytest.mark.parametrize(
    ("scorer", "head_dim", "kv_dtype", "expected"),
    [
        ("bounds", 64, torch.float32, 144),
        ("bounds", 64, torch.bfloat16, 144),
        ("bounds", 8, None, 32),
        ("mean", 64, None, 80),
        ("mean", 40, None, 64),
        ("mean_std", 64, None, 144),
        ("bounds_mean", 64, None, 208),
        ("bounds_mean", 40, None, 144),
        ("bounds_full", 64, torch.float32, 512),
        ("bounds_full", 64, torch.float16, 256),
        ("bounds_full", 64, "bfloat16", 256),
        ("bounds_full_fp16", 40, None, 160),
        ("bounds_full_fp32", 256, None, 2048),
        ("low_rank", 64, None, 240),
        ("low_rank_2", 64, None, 160),
        ("low_rank_1", 64, torch.bfloat16, 112),
        ("low_rank_4", 64, None, 240),
        ("low_rank_max_8", 128, None, 736),
    ],
)
def test_summary_bytes_follow_the_layout(
    scorer: str, head_dim: int, kv_dtype: torch.dtype | str | None, expected: int
) -> None:
    assert scorers.summary_bytes(scorer, head_dim, 16, kv_dtype) == expected


def test_rows_are_a_multiple_of_16_bytes() -> None:
    for scorer in scorers.op_scorers():
        for head_dim in scorers.HEAD_DIMS:
            assert scorers.summary_bytes(scorer, head_dim, 16) % 16 == 0


@pytest.mark.parametrize(
    ("scorer", "kv_dtype", "expected"),
    [
        ("bounds", torch.float16, "bounds"),
        ("bounds", torch.int8, "bounds"),
        ("bounds_mean", "int8", "bounds_mean"),
        ("mean_std", None, "mean_std"),
        ("bounds_full", torch.float32, "bounds_full_fp32"),
        ("bounds_full", "float16", "bounds_full_fp16"),
        ("bounds_full", torch.bfloat16, "bounds_full_bf16"),
        ("bounds_full_bf16", torch.bfloat16, "bounds_full_bf16"),
        ("bounds_full_bf16", None, "bounds_full_bf16"),
        ("low_rank", None, "low_rank_4"),
        ("low_rank", torch.float16, "low_rank_4"),
        ("low_rank_8", "bfloat16", "low_rank_8"),
        ("low_rank_max", None, "low_rank_max_4"),
        ("low_rank_max_1", None, "low_rank_max_1"),
    ],
)
def test_names_resolve_to_what_the_ops_take(
    scorer: str, kv_dtype: torch.dtype | str | None, expected: str
) -> None:
    assert scorers.resolve(scorer, 16, kv_dtype) == expected
    assert expected in scorers.op_scorers()


@pytest.mark.parametrize(("page_size", "rank"), [(64, 4), (5, 4), (4, 3), (3, 2), (2, 1)])
def test_a_name_without_rank_takes_what_small_pages_have(page_size: int, rank: int) -> None:
    assert scorers.resolve("low_rank", page_size) == f"low_rank_{rank}"
    named = scorers.summary_bytes(f"low_rank_{rank}", 64, page_size)
    assert scorers.summary_bytes("low_rank", 64, page_size) == named


def test_pages_of_one_token_have_no_rank() -> None:
    with pytest.raises(
        ValueError, match=r"scorer: expected a rank of at most page_size - 1 = 0, got 'low_rank'"
    ):
        scorers.resolve("low_rank", 1)


@pytest.mark.parametrize(
    ("scorer", "kv_dtype", "argument"),
    [
        ("box", torch.float32, "scorer"),
        ("mean_fp16", torch.float16, "scorer"),
        ("bounds_full", None, "kv_dtype"),
        ("bounds_full", torch.float64, "kv_dtype"),
        ("bounds_full", "int7", "kv_dtype"),
        ("bounds_full", torch.int8, "scorer"),
        ("bounds_full", "int8", "scorer"),
        ("bounds_full_fp32", torch.int8, "scorer"),
        ("bounds_full_fp16", torch.float32, "scorer"),
        ("low_rank_0", None, "scorer"),
        ("low_rank_9", None, "scorer"),
        ("low_rank_02", None, "scorer"),
        ("low_rank_max_fp16", None, "scorer"),
        ("mean_2", None, "scorer"),
        (3, torch.float32, "scorer"),
    ],
)
def test_bad_names_are_refused_by_name(
    scorer: str, kv_dtype: torch.dtype | str | None, argument: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{argument}: expected .* got "):
        scorers.resolve(scorer, 16, kv_dtype)


@pytest.mark.parametrize("head_dim", [0, 1, 12, 264, 320, -8])
def test_unsupported_head_dims_are_refused_by_name(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim: expected .* got {head_dim}"):
        scorers.summary_bytes("bounds", head_dim, 16)


@pytest.mark.parametrize("page_size", [0, 65, -16])
def test_unsupported_page_sizes_are_refused_by_name(page_size: int) -> None:
    with pytest.raises(ValueError, match=rf"page_size: expected .* got {page_size}"):
        scorers.summary_bytes("bounds", 64, page_size)


@pytest.mark.parametrize(
    ("scorer", "page_size"), [("low_rank_2", 2), ("low_rank_1", 1), ("low_rank_max_8", 8)]
)
def test_a_rank_that_a_page_cannot_have_is_refused_by_name(scorer: str, page_size: int) -> None:
    expected = rf"scorer: expected a rank of at most page_size - 1 = {page_size - 1}, got '{scorer}'"
    for check in (scorers.check_scorer, lambda name, size: scorers.summary_bytes(name, 64, size)):
        with pytest.raises(ValueError, match=expected):
            check(scorer, page_size)
        check(scorer, page_size + 1)


def test_an_unknown_group_reduction_is_refused_by_name() -> None:
    assert scorers.check_group_reduction("max", "bounds") == "max"
    with pytest.raises(ValueError, match=r"group_reduction: expected one of mean, max, softmax .* 'median'"):
        scorers.check_group_reduction("median", "bounds")


def test_the_mean_over_a_group_exists_for_linear_scorers_only() -> None:
    for scorer in scorers.op_scorers():
        assert "max" in scorers.group_reductions(scorer)
        assert "softmax" in scorers.group_reductions(scorer)
        assert scorers.default_group_reduction(scorer) in scorers.group_reductions(scorer)
    assert scorers.default_group_reduction("mean") == "mean"
    assert scorers.default_group_reduction("low_rank") == "softmax"
    with pytest.raises(ValueError, match=r"group_reduction: expected one of max, softmax .* got 'mean'"):
        scorers.check_group_reduction("mean", "low_rank_2")


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        scorers.SCORERS["bounds"] = scorers.SCORERS["mean"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        scorers.SCORERS["bounds"].name = "box"  # type: ignore[misc]


def test_the_compiled_ops_know_the_same_scorers() -> None:
    from tinyserve_ops import ops

    none = torch.empty(0, dtype=torch.int32)
    for scorer in scorers.op_scorers():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            if not scorer.startswith("bounds_full") or scorers.resolve("bounds_full", 16, dtype) == scorer:
                rows = torch.zeros(2, 1, scorers.summary_bytes(scorer, 40, 16), dtype=torch.uint8)
                ops.seal_pages(none, torch.zeros(2, 1, 16, 40, dtype=dtype), None, rows, scorer)
