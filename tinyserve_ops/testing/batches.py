"""Ragged batches over page pools: the arguments of every op, and the plain tokens they were made from.

The pools are filled from `Batch.keys` and `Batch.values` by indexing alone, so an oracle that reads the
plain tokens shares nothing with the code under test. Page ids are shuffled; every slot that no visible token
fills holds NaN (in int8 pages the code -128 and the scale NaN, which no row has) and every summary byte 0xff
(NaN in each of the formats in use).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tinyserve_ops.scorers import default_group_reduction, resolve, summary_bytes
from tinyserve_ops.testing.int8_rows import as_stored, expected_rows

POOLS = ("k_pages", "v_pages", "k_scales", "v_scales", "page_summary")
# Of queries and new tokens, and of the pages.
DTYPE_PAIRS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
)
LAYOUTS = ("token_major", "channel_major", "interleaved")


class SealPages(Protocol):
    def __call__(
        self, page_ids: Tensor, k_pages: Tensor, k_scales: Tensor | None, page_summary: Tensor, scorer: str
    ) -> None: ...


@dataclass
class Batch:
    """Arguments of the ops under their own names, plus the tokens behind them.

    keys and values hold one tensor [length, num_kv_heads, head_dim] per sequence, new tokens included,
    rounded to the pools' dtype (those for int8 pages are not: `stored_tokens` is what such pages give back);
    padding slots (negative positions) have none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_summary: Tensor
    page_budget: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    scorer: str
    sm_scale: float
    group_reduction: str = "mean"
    max_page_budget: int = 0
    num_sink_pages: int = 1
    num_recent_pages: int = 2
    window: int = -1
    softcap: float = 0.0
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    selected_pages: Tensor | None = None
    num_selected: Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages.shape[1]

    @property
    def pools(self) -> dict[str, Tensor]:
        """The pools that there are, by name."""
        return {name: getattr(self, name) for name in POOLS if getattr(self, name) is not None}

    def with_own_pools(self) -> Batch:
        """The same batch over copies of the pools."""
        copies: dict[str, Any] = {}
        for name, pool in self.pools.items():  # clone keeps the strides of a dense tensor only
            copies[name] = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype).copy_(pool)
        return replace(self, **copies)

    def stored_tokens(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence as attention reads them from the pages, float64."""
        tokens = (self.keys[sequence], self.values[sequence])
        if self.k_scales is None:
            return tokens[0].double(), tokens[1].double()
        return as_stored(tokens[0]), as_stored(tokens[1])

    def arguments(self, op: Callable[..., Any], **overrides: Any) -> dict[str, Any]:
        """The keyword arguments of `op`: `overrides`, else this batch's, else left to the op's default."""
        found = {}
        for name in inspect.signature(op).parameters:
            if name in overrides:
                found[name] = overrides.pop(name)
            elif hasattr(self, name):
                found[name] = getattr(self, name)
        assert not overrides, f"{getattr(op, '__name__', op)} has no argument {', '.join(overrides)}"
        return found

    def run(self, op: Callable[..., Any], **overrides: Any) -> Any:
        """Calls `op` with `arguments`."""
        return op(**self.arguments(op, **overrides))

    def new_tokens(self, sequence: int) -> slice:
        """Where a sequence's new tokens lie in the packed batch."""
        return slice(int(self.cu_query_lens[sequence]), int(self.cu_query_lens[sequence + 1]))

    def take(self, sequences: Sequence[int]) -> Batch:
        """The same sequences in another order, or fewer of them; the pools are shared."""
        slices = [self.new_tokens(b) for b in sequences]
        index = torch.tensor([token for s in slices for token in range(s.start, s.stop)], dtype=torch.long)
        rows = torch.tensor(sequences, dtype=torch.long)
        per_token: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[index]
            for name in ("q", "k", "v", "selected_pages", "num_selected")
        }
        return replace(
            self,
            **per_token,
            cu_query_lens=_offsets([s.stop - s.start for s in slices]),
            seq_lens=self.seq_lens[rows],
            page_table=self.page_table[rows],
            page_budget=self.page_budget[rows],
            keys=[self.keys[b] for b in sequences],
            values=[self.values[b] for b in sequences],
        )

    def store(self, *, only_stored: bool = False) -> None:
        """Writes keys and values into the pools; everything else there becomes NaN.

        With `only_stored`, new tokens are left out, as before `append_kv`.
        """
        self.page_summary.fill_(0xFF)
        for pages, scales, tokens in (
            (self.k_pages, self.k_scales, self.keys),
            (self.v_pages, self.v_scales, self.values),
        ):
            pages.fill_(torch.nan if scales is None else -128)
            if scales is not None:
                scales.fill_(torch.nan)
            for b, rows in enumerate(tokens):
                end = max(0, int(self.seq_lens[b])) if only_stored else len(rows)
                codes, row_scales = (rows, None) if scales is None else expected_rows(rows)
                for position in range(end):
                    page_id = int(self.page_table[b, position // self.page_size])
                    slot = position % self.page_size
                    pages[page_id, :, slot] = codes[position]
                    if scales is not None and row_scales is not None:
                        scales[page_id, :, slot] = row_scales[position]

    def sealed_page_ids(self) -> Tensor:
        """Ids of all pages full of tokens."""
        return torch.tensor(
            [
                int(self.page_table[b, page])
                for b, keys in enumerate(self.keys)
                for page in range(len(keys) // self.page_size)
            ],
            dtype=torch.int32,
        )

    def seal(self, seal_pages: SealPages) -> None:
        """Fills page_summary for every full page with the implementation under test."""
        seal_pages(
            page_ids=self.sealed_page_ids(),
            k_pages=self.k_pages,
            k_scales=self.k_scales,
            page_summary=self.page_summary,
            scorer=self.scorer,
        )


def make_batch(
    seq_lens: Sequence[int],
    new_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "token_major",
    scorer: str = "bounds",
    page_budget: int = 4,
    window: int = -1,
    num_spare_pages: int = 3,
    num_spare_columns: int = 2,
    only_stored: bool = False,
    seed: int = 0,
) -> Batch:
    """Makes a batch of random sequences.

    Args:
        seq_lens: stored tokens before the new ones; negative for padding slots in front.
        new_lens: new tokens of each sequence; one each by default.
        layout: one of `LAYOUTS`.
        page_budget: the same for every sequence.
        only_stored: leave the new tokens out of the pools, as before `append_kv`.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    new_lens = [1] * len(seq_lens) if new_lens is None else list(new_lens)
    lengths = [max(0, stored + new) for stored, new in zip(seq_lens, new_lens, strict=True)]
    num_pages = [-(-length // page_size) for length in lengths]
    total_pages = sum(num_pages) + num_spare_pages
    page_ids = torch.randperm(total_pages, generator=generator).tolist()
    page_table = torch.full((len(seq_lens), max([*num_pages, 0]) + num_spare_columns), -1, dtype=torch.int32)
    for b, count in enumerate(num_pages):
        for page in range(count):
            page_table[b, page] = page_ids.pop()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_tokens = sum(new_lens)
    k = normal(num_tokens, num_kv_heads, head_dim)
    v = normal(num_tokens, num_kv_heads, head_dim)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    ends = _offsets(new_lens)[1:].tolist()
    for length, new, end in zip(lengths, new_lens, ends, strict=True):
        num_new = min(new, length)
        for history, packed in ((keys, k), (values, v)):
            stored = normal(length - num_new, num_kv_heads, head_dim)
            tokens = torch.cat([stored, packed[end - num_new : end]])
            history.append(tokens if kv_dtype == torch.int8 else tokens.to(kv_dtype))
    k_pages, v_pages = make_pools(total_pages, num_kv_heads, page_size, head_dim, kv_dtype, layout)
    k_scales, v_scales = None, None
    if kv_dtype == torch.int8:
        k_scales, v_scales = make_scales(total_pages, num_kv_heads, page_size, layout)
    op_scorer = resolve(scorer, page_size, kv_dtype)
    batch = Batch(
        q=normal(num_tokens, num_heads, head_dim),
        k=k,
        v=v,
        cu_query_lens=_offsets(new_lens),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        page_table=page_table,
        k_pages=k_pages,
        v_pages=v_pages,
        page_summary=torch.empty(
            total_pages, num_kv_heads, summary_bytes(op_scorer, head_dim, page_size), dtype=torch.uint8
        ),
        page_budget=torch.full((len(seq_lens),), page_budget, dtype=torch.int32),
        max_page_budget=page_budget,
        keys=keys,
        values=values,
        scorer=op_scorer,
        sm_scale=head_dim**-0.5,
        group_reduction=default_group_reduction(op_scorer),
        window=window,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    batch.store(only_stored=only_stored)
    return batch


def make_pools(
    num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    """Returns K and V pools [num_pages, num_kv_heads, page_size, head_dim], uninitialised.

    "token_major": both contiguous. "channel_major": each K page is stored as [head_dim, page_size].
    "interleaved": one tensor holds K and V page by page behind an offset, so page strides are twice as long.
    """
    shape = (num_kv_heads, page_size, head_dim)
    if layout == "token_major":
        return torch.empty(num_pages, *shape, dtype=dtype), torch.empty(num_pages, *shape, dtype=dtype)
    if layout == "channel_major":
        k_pages = torch.empty(num_pages, num_kv_heads, head_dim, page_size, dtype=dtype).transpose(2, 3)
        return k_pages, torch.empty(num_pages, *shape, dtype=dtype)
    if layout == "interleaved":
        shared = torch.empty(num_pages + 1, 2, *shape, dtype=dtype)[1:]
        return shared[:, 0], shared[:, 1]
    raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")


def make_scales(num_pages: int, num_kv_heads: int, page_size: int, layout: str) -> tuple[Tensor, Tensor]:
    """Returns fp32 K and V scales [num_pages, num_kv_heads, page_size], uninitialised.

    "interleaved" ones share a tensor like the pages, with a gap behind each head.
    """
    if layout == "interleaved":
        shared = torch.empty(num_pages + 1, 2, num_kv_heads, page_size + 3)[1:, :, :, :page_size]
        return shared[:, 0], shared[:, 1]
    return torch.empty(num_pages, num_kv_heads, page_size), torch.empty(num_pages, num_kv_heads, page_size)


def _offsets(lengths: Sequence[int]) -> Tensor:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return torch.tensor(offsets, dtype=torch.int32)
