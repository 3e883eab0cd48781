"""The operators, with errors for people: `ValueError`/`TypeError` that name the argument, what was expected
and got.

Thin wrappers over `torch.ops.tinyserve.*`; `tinyserve_ops.reference` holds the definition of each in plain
PyTorch.

Shapes and conventions shared by all (S = page_size, D = head_dim):

- `q` [num_tokens, num_heads, D], `k`/`v` [num_tokens, num_kv_heads, D]: the new tokens of all sequences,
  packed one sequence after the other; fp32, fp16 or bf16; any strides.
- `cu_query_lens` int32 [batch + 1]: where each sequence's new tokens begin; the last entry is num_tokens.
- `seq_lens` int32 [batch]: stored length of each sequence BEFORE its new tokens. New token i sits at position
  seq_lens + i; a negative position is a padding slot: never stored, output 0, lse -inf. No op changes it.
- `page_table` int32 [batch, max_pages]: page id of each logical page, -1 where none.
- `k_pages`/`v_pages` [num_pages, num_kv_heads, S, D]: the pool; fp32, fp16, bf16 or int8. Keys token-major
  (stride 1 over D) or channel-major (stride 1 over S); values token-major. Page and head strides are free.
- `page_summary` uint8 [num_pages, num_kv_heads, summary_bytes]: what the scorer keeps of a full page
  (`tinyserve_ops.scorers`).
- `window`: a row sees positions (p - window, p]; -1 for no window. `softcap`: must be 0.
- `k_scales`/`v_scales` fp32 [num_pages, num_kv_heads, S], last stride 1: beside int8 pages, where
  value = scale * code (`append_kv` says how they come about); None beside pages of any other dtype.

On a GPU every tensor of a call lies there, lengths, tables and budgets included. What these hold is not
checked then, because the host would have to wait for it; `docs/design.md` says what wrong numbers do.

No op has a gradient: an input that requires grad raises while grad mode is on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinyserve_ops import _library

__all__ = [
    "append_kv",
    "attend_pages",
    "copy_pages",
    "gather_pages",
    "merge_states",
    "prefill_attention",
    "scatter_pages",
    "score_pages",
    "seal_pages",
    "select_pages",
    "sparse_decode",
]

_PREFIX = "tinyserve: "  # every message of csrc/torch/checks.h begins with it


def append_kv(
    k: Tensor,
    v: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
    scorer: str,
) -> None:
    """Writes new keys and values into their pages and seals (summarises) each page that fills.

    Into int8 pages a row (one token and head) goes with scale = amax / 127 in fp32 and codes value / scale,
    rounded to nearest, halves to even. A row of zeros has scale 0; a row that holds a NaN or an infinity has
    scale NaN and codes 0, so it reads back as NaN. Rows stored before are never touched.

    Args:
        page_summary: None keeps no summaries (dense use); `scorer` is then not looked at.
        scorer: op name of a scorer, see `tinyserve_ops.scorers.resolve`.

    Mutates k_pages, v_pages, k_scales, v_scales, page_summary.
    """
    _run(
        OPS.append_kv.default, k, v, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales,
        v_scales, page_summary, scorer,
    )  # fmt: skip


def seal_pages(
    page_ids: Tensor, k_pages: Tensor, k_scales: Tensor | None, page_summary: Tensor, scorer: str
) -> None:
    """Computes the summaries of full pages `page_ids` int32 [n] anew (after a restore, or for another
    scorer).

    Mutates page_summary.
    """
    _run(OPS.seal_pages.default, page_ids, k_pages, k_scales, page_summary, scorer)


def score_pages(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_summary: Tensor,
    page_size: int,
    scorer: str,
    group_reduction: str,
    sm_scale: float,
    window: int = -1,
) -> Tensor:
    """Estimates how much each page matters to each query (Quest, arXiv 2406.10774, for `bounds`).

    Returns:
        page_scores fp32 [num_tokens, num_kv_heads, max_pages]: -inf for pages a row does not see, +inf for a
        last page that is not full yet.
    """
    result: Tensor = _run(
        OPS.score_pages.default, q, cu_query_lens, seq_lens, page_table, page_summary, page_size, scorer,
        group_reduction, sm_scale, window,
    )  # fmt: skip
    return result


def select_pages(
    page_scores: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_budget: Tensor,
    max_page_budget: int,
    page_size: int,
    num_sink_pages: int,
    num_recent_pages: int,
    window: int = -1,
) -> tuple[Tensor, Tensor]:
    """Picks the pages to attend: the forced ones, then the best scores; ties to the lower page, NaN last.

    Args:
        page_budget: int32 [batch], pages per row and kv head, forced ones included.
        max_page_budget: width of the result, at least the largest page_budget.

    Returns:
        selected_pages int32 [num_tokens, num_kv_heads, max_page_budget], logical pages ascending, -1 padded,
        and num_selected int32 [num_tokens, num_kv_heads].
    """
    result: tuple[Tensor, Tensor] = _run(
        OPS.select_pages.default, page_scores, cu_query_lens, seq_lens, page_budget, max_page_budget,
        page_size, num_sink_pages, num_recent_pages, window,
    )  # fmt: skip
    return result


def attend_pages(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    selected_pages: Tensor | None,
    num_selected: Tensor | None,
    sm_scale: float,
    window: int = -1,
    softcap: float = 0.0,
    return_page_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each row over a list of pages, or over every page it sees when `selected_pages` is None.

    Returns:
        out [num_tokens, num_heads, D] of q's dtype, lse fp32 [num_tokens, num_heads] (natural log), and
        page_lse fp32 [num_tokens, num_heads, list width], the log-sum-exp of each listed page, -inf padded;
        shape [0] unless asked for.
    """
    result: tuple[Tensor, Tensor, Tensor] = _run(
        OPS.attend_pages.default, q, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales,
        v_scales, selected_pages, num_selected, sm_scale, window, softcap, return_page_lse,
    )  # fmt: skip
    return result


def sparse_decode(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor,
    page_budget: Tensor,
    max_page_budget: int,
    scorer: str,
    group_reduction: str,
    sm_scale: float,
    num_sink_pages: int,
    num_recent_pages: int,
    window: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`score_pages`, `select_pages` and `attend_pages` in one call (TinyServe, arXiv 2509.12211, algorithm
    1).

    Bit for bit what the three give one after the other.

    Returns:
        out, lse, selected_pages, num_selected.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _run(
        OPS.sparse_decode.default, q, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales,
        v_scales, page_summary, page_budget, max_page_budget, scorer, group_reduction, sm_scale,
        num_sink_pages, num_recent_pages, window, softcap,
    )  # fmt: skip
    return result


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combines attention results over disjoint sets of keys by their log-sum-exp.

    Args:
        outs: [num_states, num_tokens, num_heads, D].
        lses: fp32 [num_states, num_tokens, num_heads]; -inf where a state attended to nothing.

    Returns:
        out [num_tokens, num_heads, D] and lse fp32 [num_tokens, num_heads].
    """
    result: tuple[Tensor, Tensor] = _run(OPS.merge_states.default, outs, lses)
    return result


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    sm_scale: float,
    window: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention of several new tokens over the stored ones (from the pages) and over themselves (k,
    v).

    No length x length mask is built. Equal to the other ops within rounding, not bit for bit.

    Returns:
        out [num_tokens, num_heads, D] of q's dtype and lse fp32 [num_tokens, num_heads].
    """
    result: tuple[Tensor, Tensor] = _run(
        OPS.prefill_attention.default, q, k, v, cu_query_lens, seq_lens, page_table, k_pages, v_pages,
        k_scales, v_scales, sm_scale, window, softcap,
    )  # fmt: skip
    return result


def copy_pages(
    src_page_ids: Tensor,
    dst_page_ids: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> None:
    """Copies pages src_page_ids[i] to dst_page_ids[i] (int32 [n]), summaries included: copy-on-write.

    A destination must be neither a source nor named twice. Mutates all parts.
    """
    _run(
        OPS.copy_pages.default,
        src_page_ids,
        dst_page_ids,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        page_summary,
    )


def gather_pages(
    page_ids: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns contiguous copies of pages: k, v [n, num_kv_heads, S, D], k_scales, v_scales, page_summary.

    A part that is None comes back with shape [0].
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _run(
        OPS.gather_pages.default, page_ids, k_pages, v_pages, k_scales, v_scales, page_summary
    )
    return result


def scatter_pages(
    page_ids: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales_in: Tensor | None,
    v_scales_in: Tensor | None,
    summary_in: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor | None,
) -> None:
    """Writes what `gather_pages` returned into the pages `page_ids`. Mutates the parts that are given."""
    _run(
        OPS.scatter_pages.default, page_ids, k, v, k_scales_in, v_scales_in, summary_in, k_pages, v_pages,
        k_scales, v_scales, page_summary,
    )  # fmt: skip


NO_GRADIENT = (
    "expected a tensor that does not require grad (this op has no gradient), got one that does; "
    "run it under torch.no_grad() or pass a detached tensor"
)
OPS = torch.ops.tinyserve  # the ops themselves: for `pool_ops`, which checks less


def _run(op: Any, *args: object) -> Any:
    _check_tensors(op, args)
    try:
        return op(*args)
    except RuntimeError as error:
        raise translated(error) from None


def translated(error: RuntimeError) -> Exception:
    """The error for people of one that an op raised; any other as it is."""
    # torch appends its own frames after the first line.
    message = str(error).split("\n", 1)[0]
    if _PREFIX not in message:
        return error
    message = message.split(_PREFIX, 1)[1]
    return (TypeError if "expected dtype" in message else ValueError)(message)


def _check_tensors(op: Any, args: tuple[object, ...]) -> None:
    """What the dispatcher would hide: tensors of several devices, and a gradient that vanishes."""
    grad = torch.is_grad_enabled()
    # One quick look at a call where all is as it should be: it is made for every layer and token.
    for arg in args:
        if isinstance(arg, Tensor) and (not arg.is_cpu or (grad and arg.requires_grad)):
            _look_at_tensors(op, args, grad)
            return


def _look_at_tensors(op: Any, args: tuple[object, ...], grad: bool) -> None:
    tensors = [(index, arg) for index, arg in enumerate(args) if isinstance(arg, Tensor)]
    device = tensors[0][1].device
    for index, tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                f"{_argument_name(op, index)}: expected a tensor on {device} like the first argument, "
                f"got one on {tensor.device}"
            )
    for index, tensor in tensors:
        if grad and tensor.requires_grad:
            raise ValueError(f"{_argument_name(op, index)}: {NO_GRADIENT}")
    if device.type == "cuda":
        _library.load_cuda(device)


def _argument_name(op: Any, index: int) -> str:
    return str(op._schema.arguments[index].name)
