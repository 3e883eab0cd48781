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
    ],
)
def test_summary_bytes_follow_the_layout(
    scorer: str, head_dim: int, kv_dtype: torch.dtype | str | None, expected: int
) -> None:
    assert scorers.summary_bytes(scorer, head_dim, kv_dtype) == expected


def test_rows_are_a_multiple_of_16_bytes() -> None:
    for scorer in scorers.op_scorers():
        for head_dim in scorers.HEAD_DIMS:
            assert scorers.summary_bytes(scorer, head_dim) % 16 == 0


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
    ],
)
def test_names_resolve_to_what_the_ops_take(
    scorer: str, kv_dtype: torch.dtype | str | None, expected: str
) -> None:
    assert scorers.resolve(scorer, kv_dtype) == expected
    assert expected in scorers.op_scorers()


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
        (3, torch.float32, "scorer"),
    ],
)
def test_bad_names_are_refused_by_name(
    scorer: str, kv_dtype: torch.dtype | str | None, argument: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{argument}: expected .* got "):
        scorers.resolve(scorer, kv_dtype)


@pytest.mark.parametrize("head_dim", [0, 1, 12, 264, 320, -8])
def test_unsupported_head_dims_are_refused_by_name(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim: expected .* got {head_dim}"):
        scorers.summary_bytes("bounds", head_dim)


def test_an_unknown_group_reduction_is_refused_by_name() -> None:
    assert scorers.check_group_reduction("max") == "max"
    with pytest.raises(ValueError, match="group_reduction: expected one of mean, max, got 'median'"):
        scorers.check_group_reduction("median")


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
            if not scorer.startswith("bounds_full") or scorers.resolve("bounds_full", dtype) == scorer:
                rows = torch.zeros(2, 1, scorers.summary_bytes(scorer, 40), dtype=torch.uint8)
                ops.seal_pages(none, torch.zeros(2, 1, 16, 40, dtype=dtype), None, rows, scorer)
