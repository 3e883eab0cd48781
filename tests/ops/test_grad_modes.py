"""No op has a gradient: inputs that require grad raise by name; no_grad, inference_mode and normal mode all
work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tinyserve_ops.testing import Batch, Implementation, assert_refused, make_batch

FLOATS = [
    ("append_kv", "k"), ("append_kv", "v"), ("append_kv", "k_pages"), ("append_kv", "v_pages"),
    ("seal_pages", "k_pages"), ("score_pages", "q"), ("select_pages", "page_scores"), ("attend_pages", "q"),
    ("attend_pages", "k_pages"), ("attend_pages", "v_pages"), ("sparse_decode", "q"),
    ("sparse_decode", "v_pages"), ("merge_states", "outs"), ("merge_states", "lses"),
    ("prefill_attention", "q"), ("prefill_attention", "k"),
    ("prefill_attention", "v"), ("prefill_attention", "k_pages"), ("copy_pages", "k_pages"),
    ("gather_pages", "v_pages"), ("scatter_pages", "k"), ("scatter_pages", "v_pages"),
]  # fmt: skip


def arguments_of(impl: Implementation, op: str) -> dict[str, Any]:
    batch = make_batch([20, 50], [3, 1])
    ids = torch.tensor([0, 2], dtype=torch.int32)
    extra: dict[str, Any] = {}
    if op == "select_pages":
        extra = {"page_scores": torch.zeros(4, 2, batch.page_table.shape[1])}
    elif op in ("seal_pages", "gather_pages"):
        extra = {"page_ids": ids}
    elif op == "copy_pages":
        extra = {"src_page_ids": ids, "dst_page_ids": ids + 1}
    elif op == "merge_states":
        extra = {"outs": torch.zeros(2, 3, 4, 16), "lses": torch.zeros(2, 3, 4)}
    elif op == "scatter_pages":
        extra = {
            "page_ids": ids, "k": torch.zeros(2, 2, 16, 16), "v": torch.zeros(2, 2, 16, 16),
            "k_scales_in": None, "v_scales_in": None, "summary_in": None, "page_summary": None,
        }  # fmt: skip
    return batch.arguments(getattr(impl.ops, op), **extra)


@pytest.mark.parametrize(("op", "argument"), FLOATS)
def test_an_input_that_requires_grad_raises_by_name(impl: Implementation, op: str, argument: str) -> None:
    arguments = arguments_of(impl, op)
    arguments[argument] = arguments[argument].clone().requires_grad_()
    assert_refused(getattr(impl.ops, op), arguments, argument)


@pytest.mark.parametrize(("op", "argument"), [pair for pair in FLOATS if not pair[1].endswith("_pages")])
def test_an_input_that_requires_grad_is_fine_without_grad_mode(
    impl: Implementation, op: str, argument: str
) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        arguments = arguments_of(impl, op)
        arguments[argument] = arguments[argument].clone().requires_grad_()
        with mode():
            getattr(impl.ops, op)(**arguments)


def decode(impl: Implementation, batch: Batch) -> torch.Tensor:
    batch.run(impl.ops.append_kv)
    out: torch.Tensor = batch.run(impl.ops.sparse_decode)[0]
    return out


def test_modes_may_be_mixed_on_one_pool(impl: Implementation) -> None:
    expected = decode(impl, make_batch([15, 40], only_stored=True))
    for first, second in (
        (torch.inference_mode, torch.no_grad),
        (torch.no_grad, torch.enable_grad),
        (torch.enable_grad, torch.inference_mode),
    ):
        with torch.no_grad():
            batch = make_batch([15, 40], only_stored=True)
        with first():
            batch.run(impl.ops.append_kv)
        with second():
            out = batch.run(impl.ops.sparse_decode)[0]
        impl.assert_same(out, expected)


def test_results_do_not_require_grad(impl: Implementation) -> None:
    assert not decode(impl, make_batch([15, 40], only_stored=True)).requires_grad
