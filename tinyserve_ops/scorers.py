"""The scorers: what each keeps of a sealed page, how a query reads it, and how many bytes that costs.

A frozen table that mirrors csrc/core/scorer.h; everything else asks it instead of naming scorers. Most
scorers are linear in a feature of the query, score = sm_scale * sum_v dot(feature_v(q), vector_v), so a page
keeps only their vectors. The low-rank sketch keeps enough to approximate the logit of every token and scores
a page by their log-sum-exp, or by their maximum. A scorer of another kind gets an `encoding` of its own, its
branch in `summary_bytes` and its row in `SCORERS`; nothing else here has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

__all__ = [
    "GROUP_REDUCTIONS",
    "HEAD_DIMS",
    "PAGE_SIZES",
    "RANKS",
    "SCORERS",
    "Scorer",
    "SummaryVector",
    "check_group_reduction",
    "check_scorer",
    "default_group_reduction",
    "find_op_scorer",
    "group_reductions",
    "op_scorers",
    "resolve",
    "summary_bytes",
]

HEAD_DIMS = range(8, 257, 8)
PAGE_SIZES = range(1, 65)

# Ranks of the low-rank sketch; a page of S centred keys has a rank of at most S - 1. A name without a number
# means DEFAULT_RANK, or the most that a smaller page has.
RANKS = range(1, 9)
DEFAULT_RANK = 4

# How the query heads of one kv head come to one score: "mean" averages the query features over the group
# (one dot product; linear scorers only), "max" keeps the highest score of the group's heads, "softmax" adds
# the heads' softmax over the row's pages: log sum_g exp(score_gj - lse_g).
GROUP_REDUCTIONS = ("mean", "max", "softmax")

_CODES_PER_BLOCK = 16  # int4 codes come in blocks of 16, 8 bytes each
_HEADER_BYTES = 16  # room for one fp32 scale per vector, and keeps the codes aligned
_ROW_ALIGNMENT = 16
# Key types that a full-precision summary can be of, and how its op name ends; int8 pages have none.
_FULL_DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
)
_KV_DTYPES = (*_FULL_DTYPES, torch.int8)


@dataclass(frozen=True)
class SummaryVector:
    """One vector of a page summary and the query feature it is multiplied with."""

    statistic: Literal["max", "min", "mean", "std"]  # per channel, over the tokens of the page
    feature: Literal["positive_part", "negative_part", "identity", "absolute"]
    weight: float = 1.0


@dataclass(frozen=True)
class Scorer:
    """One row of the table.

    `encoding` "int8": one fp32 scale per vector in a 16-byte header, then int8 codes (max rounded up, min
    down, the others to nearest). `encoding` "full": the vectors in the element type of the key pages, no
    header. `encoding` "low_rank": the mean in int8 and a sketch of the centred keys in int4 (`rank` basis
    vectors, `rank` coefficients per token), then bf16 scales; no vectors.
    """

    name: str
    vectors: tuple[SummaryVector, ...] = ()
    encoding: Literal["int8", "full", "low_rank"] = "int8"
    rank: int = 0
    token_reduction: Literal["logsumexp", "max"] | None = None  # over the logits of a page's tokens

    @property
    def is_linear(self) -> bool:
        """Whether the score is linear in a feature of the query."""
        return self.encoding != "low_rank"


_BOX_MAX = SummaryVector("max", "positive_part")
_BOX_MIN = SummaryVector("min", "negative_part")
_MEAN = SummaryVector("mean", "identity")

SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        scorer.name: scorer
        for scorer in (
            Scorer("bounds", (_BOX_MAX, _BOX_MIN)),
            Scorer("bounds_full", (_BOX_MAX, _BOX_MIN), encoding="full"),
            Scorer("mean", (_MEAN,)),
            Scorer("mean_std", (_MEAN, SummaryVector("std", "absolute"))),
            Scorer(
                "bounds_mean",
                (
                    SummaryVector("max", "positive_part", 0.7),
                    SummaryVector("min", "negative_part", 0.7),
                    SummaryVector("mean", "identity", 0.3),
                ),
            ),
            Scorer("low_rank", encoding="low_rank", token_reduction="logsumexp"),
            Scorer("low_rank_max", encoding="low_rank", token_reduction="max"),
        )
    }
)


def resolve(scorer: str, page_size: int, kv_dtype: torch.dtype | str | None = None) -> str:
    """Returns the name that the ops take: "bounds_full" becomes "bounds_full_fp16" and the like, "low_rank"
    becomes "low_rank_4", or less where pages have fewer than 5 tokens.

    Args:
        scorer: a name of `SCORERS`, a low-rank name with its rank ("low_rank_4"), or a name that this
            function returned before.
        page_size: tokens of a page, 1 to 64.
        kv_dtype: element type of the key pages, as a torch dtype or its name ("float32", "float16",
            "bfloat16", "int8"). May be None where the scorer's summary does not depend on it.

    Raises:
        ValueError: an unknown scorer, an unsupported `kv_dtype`, a full-precision scorer for int8 pages, a
            resolved name of another dtype, or a rank that pages of `page_size` do not have.
        TypeError: `scorer` is not a string.
    """
    found, named_dtype = find_op_scorer(scorer, allow_public=True)
    if found.encoding == "low_rank":
        return f"{found.name}_{_rank(found, scorer, page_size)}"
    if found.encoding != "full":
        return found.name
    dtype = named_dtype if kv_dtype is None else _as_kv_dtype(kv_dtype)
    if dtype is None:
        raise ValueError(f"kv_dtype: expected {_kv_dtype_names()} for scorer {scorer!r}, got None")
    if dtype not in _FULL_DTYPES:
        raise ValueError(
            f"scorer: expected 'bounds' or another with int8 summaries for {dtype} pages, got {scorer!r}"
        )
    if named_dtype not in (None, dtype):
        raise ValueError(
            f"scorer: expected {found.name}_{_FULL_DTYPES[dtype]} for kv_dtype {dtype}, got {scorer!r}"
        )
    return f"{found.name}_{_FULL_DTYPES[dtype]}"


def summary_bytes(
    scorer: str, head_dim: int, page_size: int, kv_dtype: torch.dtype | str | None = None
) -> int:
    """Returns the bytes of one page summary row (one page and kv head), a multiple of 16.

    Args:
        scorer: a name of `SCORERS` or of the ops.
        head_dim: a multiple of 8 from 8 to 256.
        page_size: tokens of a page, 1 to 64.
        kv_dtype: as for `resolve`.

    Raises:
        ValueError, TypeError: as for `resolve`, for an unsupported `head_dim` or `page_size`, and for a rank
            that pages of `page_size` do not have.
    """
    _check_page_size(page_size)
    found, dtype = find_op_scorer(resolve(scorer, page_size, kv_dtype))
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected a multiple of 8 from 8 to 256, got {head_dim}")
    if found.encoding == "low_rank":
        sketch_codes = _whole_blocks(head_dim) + _whole_blocks(page_size)  # of one rank
        num_bytes = head_dim + found.rank * sketch_codes // 2 + (1 + found.rank) * torch.bfloat16.itemsize
    else:
        values = len(found.vectors) * head_dim
        num_bytes = values * dtype.itemsize if dtype is not None else _HEADER_BYTES + values
    return -(-num_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def op_scorers() -> tuple[str, ...]:
    """Returns every name that the ops take."""
    names: list[str] = []
    for scorer in SCORERS.values():
        if scorer.encoding == "full":
            names += [f"{scorer.name}_{short_name}" for short_name in _FULL_DTYPES.values()]
        elif scorer.encoding == "low_rank":
            names += [f"{scorer.name}_{rank}" for rank in RANKS]
        else:
            names.append(scorer.name)
    return tuple(names)


def find_op_scorer(scorer: str, *, allow_public: bool = False) -> tuple[Scorer, torch.dtype | None]:
    """Returns the table row behind an op's scorer name (with the rank that the name carries), and the dtype
    that it carries.

    The rank is 0 for a public name without one. The dtype is None where the encoding does not depend on it,
    and for a public name of a full-precision scorer. Public names that are not names of the ops are accepted
    with `allow_public` only.
    """
    if not isinstance(scorer, str):
        raise TypeError(f"scorer: expected a string, got {type(scorer).__name__}")
    found = SCORERS.get(scorer)
    if found is not None and (found.encoding == "int8" or allow_public):
        return found, None
    stem, _, suffix = scorer.rpartition("_")
    base = SCORERS.get(stem)
    if base is not None and base.encoding == "full":
        for dtype, short_name in _FULL_DTYPES.items():
            if suffix == short_name:
                return base, dtype
    if base is not None and base.encoding == "low_rank":
        for rank in RANKS:
            if suffix == str(rank):
                return replace(base, rank=rank), None
    raise ValueError(f"scorer: expected one of {_scorer_names(allow_public)}, got {scorer!r}")


def check_scorer(scorer: str, page_size: int) -> str:
    """Returns `scorer` if it is a public name (of `SCORERS`, or low-rank with a rank) for pages of
    `page_size`, else raises ValueError or TypeError."""
    found, named_dtype = find_op_scorer(scorer, allow_public=True)
    if named_dtype is not None:
        raise ValueError(f"scorer: expected one of {_scorer_names(public=True)}, got {scorer!r}")
    _check_page_size(page_size)
    if found.encoding == "low_rank":
        _rank(found, scorer, page_size)
    return scorer


def group_reductions(scorer: str) -> tuple[str, ...]:
    """The group reductions that exist for `scorer`, a public name or one of the ops."""
    is_linear = find_op_scorer(scorer, allow_public=True)[0].is_linear
    return tuple(name for name in GROUP_REDUCTIONS if is_linear or name != "mean")


def default_group_reduction(scorer: str) -> str:
    """The group reduction of `scorer` (a public name or one of the ops) where none is asked for."""
    return "mean" if find_op_scorer(scorer, allow_public=True)[0].is_linear else "softmax"


def check_group_reduction(group_reduction: str, scorer: str) -> str:
    """Returns `group_reduction` if it names one that exists for `scorer`, else raises ValueError."""
    allowed = group_reductions(scorer)
    if group_reduction not in allowed:
        raise ValueError(
            f"group_reduction: expected one of {', '.join(allowed)} for scorer {scorer!r}, "
            f"got {group_reduction!r}"
        )
    return group_reduction


def _check_page_size(page_size: int) -> None:
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size: expected 1 to 64, got {page_size}")


def _rank(found: Scorer, scorer: str, page_size: int) -> int:
    """The rank that a low-rank name means for pages of this size."""
    rank = found.rank or max(min(DEFAULT_RANK, page_size - 1), 1)
    if rank > page_size - 1:
        raise ValueError(
            f"scorer: expected a rank of at most page_size - 1 = {page_size - 1}, "
            f"got {scorer!r} of rank {rank}"
        )
    return rank


def _whole_blocks(num_codes: int) -> int:
    return -(-num_codes // _CODES_PER_BLOCK) * _CODES_PER_BLOCK


def _scorer_names(public: bool) -> str:
    if not public:
        return ", ".join(op_scorers())
    ranked = (
        f"{scorer.name}_{RANKS[0]} to {scorer.name}_{RANKS[-1]}"
        for scorer in SCORERS.values()
        if scorer.encoding == "low_rank"
    )
    return ", ".join((*SCORERS, *ranked))


def _as_kv_dtype(kv_dtype: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, kv_dtype, None) if isinstance(kv_dtype, str) else kv_dtype
    if not isinstance(dtype, torch.dtype) or dtype not in _KV_DTYPES:
        raise ValueError(f"kv_dtype: expected {_kv_dtype_names()}, got {kv_dtype!r}")
    return dtype


def _kv_dtype_names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _KV_DTYPES)
