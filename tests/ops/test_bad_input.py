"""Every op refuses bad input by the argument's name, with what was expected and what came, and changes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyserve_ops.testing import Batch, Implementation, assert_refused, make_batch

Arguments = dict[str, Any]
Change = Callable[[Any], Any]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good_batch() -> Batch:
    batch = make_batch([20, 50], [3, 1])
    batch.selected_pages = torch.tensor([0, 1, -1], dtype=torch.int32).repeat(4, 2, 1)
    batch.selected_pages[3] = torch.tensor([0, 1, 3])
    batch.num_selected = int32(2, 2, 2, 3)[:, None].repeat(1, 2)
    return batch


def extra(batch: Batch, op: str) -> Arguments:
    """Arguments that are no part of a batch."""
    if op == "select_pages":
        return {"page_scores": torch.zeros(4, 2, batch.page_table.shape[1])}
    if op in ("seal_pages", "gather_pages"):
        return {"page_ids": int32(0, 2)}
    if op == "copy_pages":
        return {"src_page_ids": int32(0, 2), "dst_page_ids": int32(3, 4)}
    if op == "scatter_pages":
        shape = (2, *batch.k_pages.shape[1:])
        summary = torch.zeros(2, *batch.page_summary.shape[1:], dtype=torch.uint8)
        return {
            "page_ids": int32(0, 2), "k": torch.zeros(shape), "v": torch.zeros(shape), "k_scales_in": None,
            "v_scales_in": None, "summary_in": summary,
        }  # fmt: skip
    if op == "merge_states":
        return {"outs": torch.zeros(2, 3, 4, 16), "lses": torch.zeros(2, 3, 4)}
    return {}


# Ops by the common arguments they take.
BATCHED = ("append_kv", "score_pages", "select_pages", "attend_pages", "sparse_decode", "prefill_attention")
QUERIES = ("score_pages", "attend_pages", "sparse_decode", "prefill_attention")
TABLES = ("append_kv", "score_pages", "attend_pages", "sparse_decode", "prefill_attention")
POOLS = ("append_kv", "attend_pages", "sparse_decode", "prefill_attention")
MOVING = ("copy_pages", "gather_pages", "scatter_pages")
SCORED = ("append_kv", "seal_pages", "score_pages", "sparse_decode")
SELECTING = ("select_pages", "sparse_decode")
ATTENDING = ("attend_pages", "sparse_decode", "prefill_attention")


def to(value: object) -> Change:
    return lambda old: value


def put(index: tuple[int, ...], value: int) -> Change:
    def change(old: torch.Tensor) -> torch.Tensor:
        tensor = old.clone()
        tensor[index] = value
        return tensor

    return change


# Ops, the argument (and, behind a colon, the word that the message must contain instead), what is wrong with
# it, the change that makes it so.
BAD: list[tuple[tuple[str, ...], str, str, Change]] = [
    (BATCHED, "cu_query_lens", "of int64", torch.Tensor.long),
    (BATCHED, "cu_query_lens", "one too short", lambda t: t[:-1]),
    (BATCHED, "cu_query_lens", "of rank 2", lambda t: t[None]),
    (BATCHED, "seq_lens", "of int64", torch.Tensor.long),
    (BATCHED, "seq_lens", "of rank 0", to(torch.tensor(3, dtype=torch.int32))),
    (BATCHED, "seq_lens", "on another device", lambda t: t.to("meta")),
    (QUERIES, "q", "of float64", torch.Tensor.double),
    (QUERIES, "q", "of rank 2", lambda t: t.flatten(1)),
    (QUERIES, "q", "with heads that do not divide", lambda t: t[:, :3]),
    (QUERIES, "q", "without heads", lambda t: t[:, :0]),
    (ATTENDING, "q", "of another head_dim", lambda t: t[..., :8]),
    (TABLES, "page_table", "of int64", torch.Tensor.long),
    (TABLES, "page_table", "of rank 1", lambda t: t[0]),
    (TABLES, "page_table", "of another batch", lambda t: t[:1]),
    (MOVING, "k_pages", "of float64", torch.Tensor.double),
    (MOVING, "k_pages", "of rank 3", lambda t: t[0]),
    (MOVING, "v_pages", "with fewer pages", lambda t: t[:-1]),
    (("copy_pages", "gather_pages"), "v_pages", "with other heads", lambda t: t[:, :1]),
    (MOVING, "page_summary", "with fewer pages", lambda t: t[:-1]),
    (MOVING, "page_summary", "of rank 2", lambda t: t[0]),
    (MOVING, "k_scales", "of rank 4", to(torch.ones(9, 2, 16, 1))),
    (POOLS, "k_pages: k_scales", "of int8", lambda t: t.nan_to_num().to(torch.int8)),
    (POOLS, "k_pages", "of uint8", lambda t: t.nan_to_num().to(torch.uint8)),
    (POOLS, "k_pages", "of float64", torch.Tensor.double),
    (POOLS, "k_pages", "of rank 3", lambda t: t[0]),
    (POOLS, "k_pages", "without unit stride", lambda t: t.repeat(1, 1, 2, 2)[:, :, ::2, ::2]),
    (POOLS, "k_pages: page_size", "0", lambda t: t[:, :, :0]),
    (POOLS, "k_pages: page_size", "65", lambda t: t.new_zeros(9, 2, 65, 16)),
    (POOLS, "v_pages", "of another dtype", torch.Tensor.half),
    (POOLS, "v_pages", "with fewer pages", lambda t: t[:-1]),
    (POOLS, "v_pages", "channel-major", lambda t: t.mT.contiguous().mT),
    (POOLS, "k_scales", "beside float pages", to(torch.ones(9, 2, 16))),
    (POOLS, "v_scales", "beside float pages", to(torch.ones(9, 2, 16))),
    (("seal_pages",), "k_scales", "beside float pages", to(torch.ones(9, 2, 16))),
    (SCORED, "scorer", "unknown", to("low_rank_of_something")),
    (SCORED, "scorer: page_summary", "of another scorer", to("mean")),
    (SCORED, "page_summary", "of int8", lambda t: t.view(torch.int8)),
    (SCORED, "page_summary", "of rank 2", lambda t: t[0]),
    (("append_kv", "seal_pages", "sparse_decode"), "page_summary", "with fewer pages",
     (lambda t: t[:-1])),
    (("append_kv", "seal_pages", "sparse_decode"), "scorer", "for pages of another dtype",
     to("bounds_full_fp16")),
    (("score_pages", "sparse_decode"), "group_reduction", "unknown", to("median")),
    (("score_pages", "select_pages"), "page_size", "0", to(0)),
    (("score_pages", "select_pages"), "page_size", "65", to(65)),
    (("score_pages", "select_pages", *ATTENDING), "window", "0", to(0)),
    (("score_pages", "select_pages", *ATTENDING), "window", "-2", to(-2)),
    (ATTENDING, "softcap", "set", to(30.0)),
    (SELECTING, "page_budget", "of int64", torch.Tensor.long),
    (SELECTING, "page_budget", "of another batch", lambda t: t[:1]),
    (SELECTING, "max_page_budget", "negative", to(-1)),
    (SELECTING, "num_sink_pages", "negative", to(-1)),
    (SELECTING, "num_recent_pages", "0", to(0)),
    (("select_pages",), "page_scores", "of fp16", torch.Tensor.half),
    (("attend_pages",), "selected_pages", "of int64", torch.Tensor.long),
    (("attend_pages",), "selected_pages", "of other rows", lambda t: t[:2]),
    (("attend_pages",), "num_selected", "missing", to(None)),
    (("attend_pages",), "num_selected", "of int64", torch.Tensor.long),
    (("append_kv", "prefill_attention"), "k", "of float64", torch.Tensor.double),
    (("append_kv", "prefill_attention"), "k", "with other heads", lambda t: t[:, :1]),
    (("append_kv", "prefill_attention"), "v", "with fewer tokens", lambda t: t[:-1]),
    (("seal_pages", "gather_pages"), "page_ids", "of int64", torch.Tensor.long),
    (("copy_pages",), "dst_page_ids", "fewer than sources", to(int32(3))),
    (("scatter_pages",), "k", "of another dtype", torch.Tensor.half),
    (("scatter_pages",), "v", "of other pages", lambda t: t[:1]),
    (("scatter_pages",), "summary_in", "of another width", lambda t: t[..., :16]),
    (("scatter_pages",), "summary_in", "missing", to(None)),
    (("merge_states",), "outs", "of float64", torch.Tensor.double),
    (("merge_states",), "outs", "of rank 3", lambda t: t[0]),
    (("merge_states",), "lses", "of fp16", torch.Tensor.half),
    (("merge_states",), "lses", "of another shape", lambda t: t[:1]),
]  # fmt: skip

# Wrong only by what lengths, tables, lists and budgets hold, which nobody looks at in CUDA
# (test_unchecked_contents.py).
BAD_CONTENTS: list[tuple[tuple[str, ...], str, str, Change]] = [
    (BATCHED, "cu_query_lens", "not from 0", lambda t: t + 1),
    (BATCHED, "cu_query_lens", "descending", to(int32(0, 5, 4))),
    (BATCHED, "cu_query_lens", "past the tokens", to(int32(0, 3, 5))),
    (TABLES, "page_table", "too narrow", lambda t: t[:, :1]),
    (TABLES, "page_table", "with a hole", put((1, 3), -1)),
    (TABLES, "page_table", "past the pool", put((1, 3), 999)),
    (SELECTING, "page_budget", "negative", put((1,), -1)),
    (SELECTING, "page_budget", "below the forced pages", put((0,), 2)),
    (SELECTING, "page_budget", "above max_page_budget", put((1,), 5)),
    (SELECTING, "max_page_budget", "below a budget", to(3)),
    (("select_pages",), "page_scores", "too narrow", lambda t: t[..., :2]),
    (("attend_pages",), "selected_pages", "below 0", put((1, 1, 0), -1)),
    (("attend_pages",), "selected_pages", "twice the same", put((0, 0, 1), 0)),
    (("attend_pages",), "selected_pages", "past the visible", put((0, 1, 1), 3)),
    (("attend_pages",), "num_selected", "past the list", put((2, 0), 4)),
    (("attend_pages",), "num_selected", "negative", put((2, 0), -1)),
    (("seal_pages", "gather_pages", "scatter_pages"), "page_ids", "past the pool", to(int32(0, 999))),
    (("seal_pages", "gather_pages", "scatter_pages"), "page_ids", "negative", to(int32(0, -1))),
    (("copy_pages",), "src_page_ids", "past the pool", to(int32(0, 999))),
    (("copy_pages",), "dst_page_ids", "negative", to(int32(0, -1))),
    (("copy_pages",), "dst_page_ids", "twice the same", to(int32(3, 3))),
    (("copy_pages",), "dst_page_ids", "also a source", to(int32(3, 0))),
    (("scatter_pages",), "page_ids", "twice the same", to(int32(3, 3))),
]  # fmt: skip


def cases(bad: list[tuple[tuple[str, ...], str, str, Change]]) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(op, argument, change, id=f"{op}-{argument} {what}")
        for ops, argument, what, change in bad
        for op in ops
    ]
    return pytest.mark.parametrize(("op", "argument", "change"), parameters)


@cases(BAD_CONTENTS)
def test_bad_contents_of_an_argument_are_refused_by_name(
    impl: Implementation, op: str, argument: str, change: Change
) -> None:
    if impl.is_cuda:
        pytest.skip("contents are not looked at in CUDA")
    test_a_bad_argument_is_refused_by_name(impl, op, argument, change)


@cases(BAD)
def test_a_bad_argument_is_refused_by_name(
    impl: Implementation, op: str, argument: str, change: Change
) -> None:
    batch = good_batch()
    function = getattr(impl.ops, op)
    arguments = batch.arguments(function, **extra(batch, op))
    name, _, word = argument.partition(": ")
    arguments[name] = change(arguments[name])
    assert_refused(function, arguments, word or name)


# The same for a batch over int8 pages.
BAD_INT8: list[tuple[tuple[str, ...], str, str, Change]] = [
    (POOLS, "v_pages", "of fp32", torch.Tensor.float),
    (("append_kv", "seal_pages", "sparse_decode"), "scorer: bounds", "of full precision",
     to("bounds_full_fp32")),
    *(
        (ops, scales, what, change)
        for ops, scales in ((POOLS, "k_scales"), (POOLS, "v_scales"), (("seal_pages",), "k_scales"))
        for what, change in (
            ("missing", to(None)),
            ("of fp16", torch.Tensor.half),
            ("of float64", torch.Tensor.double),
            ("of rank 2", lambda t: t[0]),
            ("of rank 4", lambda t: t[..., None]),
            ("with fewer pages", lambda t: t[:-1]),
            ("with other heads", lambda t: t[:, :1]),
            ("of another page_size", lambda t: t[:, :, :8]),
            ("without unit stride", lambda t: t.repeat_interleave(2, 2)[:, :, ::2]),
            ("on another device", lambda t: t.to("meta")),
        )
    ),
]  # fmt: skip


@cases(BAD_INT8)
def test_bad_scales_of_int8_pages_are_refused_by_name(
    impl: Implementation, op: str, argument: str, change: Change
) -> None:
    batch = make_batch([20, 50], [3, 1], kv_dtype=torch.int8)
    function = getattr(impl.ops, op)
    arguments = batch.arguments(function, **extra(batch, op))
    name, _, word = argument.partition(": ")
    arguments[name] = change(arguments[name])
    assert_refused(function, arguments, word or name)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 2), (1, 2), (5, 4)])
def test_heads_that_do_not_divide_are_refused(
    impl: Implementation, num_heads: int, num_kv_heads: int
) -> None:
    batch = make_batch([20], num_heads=num_heads, num_kv_heads=num_kv_heads)
    for op in QUERIES:
        function = getattr(impl.ops, op)
        assert_refused(function, batch.arguments(function), "q")


def test_page_ids_that_no_row_sees_are_not_looked_at(impl: Implementation) -> None:
    batch = make_batch([20, 50], window=5)
    batch.page_table[0, 0] = 999
    batch.page_table[1, :2] = -1
    batch.page_table[:, -1] = 12345
    out, _, _ = batch.run(impl.ops.attend_pages)
    assert out.isfinite().all()


def test_sequences_without_new_tokens_need_no_pages(impl: Implementation) -> None:
    batch = make_batch([20, 50], [1, 0])
    batch.page_table[1] = -1
    for op in ("append_kv", "attend_pages", "prefill_attention"):
        batch.run(getattr(impl.ops, op))
