"""The scorers: what each keeps of a sealed page, how a query reads it, and how many bytes that costs.

A frozen table that mirrors csrc/core/scorer.h; everything else asks it instead of naming scorers. Every
scorer here is linear in a feature of the query, score = sm_scale * sum_v dot(feature_v(q), vector_v), so a
page keeps only its vectors. A scorer of another kind (the low-rank sketch, whose score is a log-sum-exp)
gets an `encoding` of its own, its branch in `summary_bytes` and its row in `SCORERS`; nothing else here has
to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

__all__ = [
    "GROUP_REDUCTIONS",
    "HEAD_DIMS",
    "PAGE_SIZES",
    "SCORERS",
    "Scorer",
    "SummaryVector",
    "check_group_reduction",
    "find_op_scorer",
    "op_scorers",
    "resolve",
    "summary_bytes",
]

HEAD_DIMS = range(8, 257, 8)
PAGE_SIZES = range(1, 65)

# How the query heads of one kv head come to one score: "mean" averages the query features over the group
# (one dot product), "max" keeps the highest score of the group's heads.
GROUP_REDUCTIONS = ("mean", "max")

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
    header.
    """

    name: str
    vectors: tuple[SummaryVector, ...]
    encoding: Literal["int8", "full"] = "int8"


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
        )
    }
)


def resolve(scorer: str, kv_dtype: torch.dtype | str | None = None) -> str:
    """Returns the name that the ops take: "bounds_full" becomes "bounds_full_fp16" and the like.

    Args:
        scorer: a name of `SCORERS`, or a name that this function returned before.
        kv_dtype: element type of the key pages, as a torch dtype or its name ("float32", "float16",
            "bfloat16", "int8"). May be None where the scorer's summary does not depend on it.

    Raises:
        ValueError: an unknown scorer, an unsupported `kv_dtype`, a full-precision scorer for int8 pages, or a
            resolved name of another dtype.
        TypeError: `scorer` is not a string.
    """
    found, named_dtype = find_op_scorer(scorer, allow_public=True)
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


def summary_bytes(scorer: str, head_dim: int, kv_dtype: torch.dtype | str | None = None) -> int:
    """Returns the bytes of one page summary row (one page and kv head), a multiple of 16.

    Args:
        scorer: a name of `SCORERS` or of the ops.
        head_dim: a multiple of 8 from 8 to 256.
        kv_dtype: as for `resolve`.

    Raises:
        ValueError, TypeError: as for `resolve`, and for an unsupported `head_dim`.
    """
    found, dtype = find_op_scorer(resolve(scorer, kv_dtype))
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected a multiple of 8 from 8 to 256, got {head_dim}")
    values = len(found.vectors) * head_dim
    num_bytes = values * dtype.itemsize if dtype is not None else _HEADER_BYTES + values
    return -(-num_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def op_scorers() -> tuple[str, ...]:
    """Returns every name that the ops take."""
    dtypes = tuple(_FULL_DTYPES)
    return tuple(
        resolve(scorer.name, dtype)
        for scorer in SCORERS.values()
        for dtype in (dtypes if scorer.encoding == "full" else dtypes[:1])
    )


def find_op_scorer(scorer: str, *, allow_public: bool = False) -> tuple[Scorer, torch.dtype | None]:
    """Returns the table row behind an op's scorer name, and the dtype that the name carries.

    The dtype is None where the encoding does not depend on it, and for a public name of a full-precision
    scorer (accepted with `allow_public` only).
    """
    if not isinstance(scorer, str):
        raise TypeError(f"scorer: expected a string, got {type(scorer).__name__}")
    found = SCORERS.get(scorer)
    if found is not None and (found.encoding != "full" or allow_public):
        return found, None
    stem, _, suffix = scorer.rpartition("_")
    for dtype, short_name in _FULL_DTYPES.items():
        if suffix == short_name and stem in SCORERS and SCORERS[stem].encoding == "full":
            return SCORERS[stem], dtype
    names = ", ".join(SCORERS if allow_public else op_scorers())
    raise ValueError(f"scorer: expected one of {names}, got {scorer!r}")


def check_group_reduction(group_reduction: str) -> str:
    """Returns `group_reduction` if it names one, else raises ValueError."""
    if group_reduction not in GROUP_REDUCTIONS:
        raise ValueError(
            f"group_reduction: expected one of {', '.join(GROUP_REDUCTIONS)}, got {group_reduction!r}"
        )
    return group_reduction


def _as_kv_dtype(kv_dtype: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, kv_dtype, None) if isinstance(kv_dtype, str) else kv_dtype
    if not isinstance(dtype, torch.dtype) or dtype not in _KV_DTYPES:
        raise ValueError(f"kv_dtype: expected {_kv_dtype_names()}, got {kv_dtype!r}")
    return dtype


def _kv_dtype_names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _KV_DTYPES)
