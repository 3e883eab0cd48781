"""SparseConfig: every choice of the sparse path in one frozen, JSON-serialisable value.

Validated once, at construction, so that nothing behind it checks again. A config never changes; caches,
handles and exported files may share and compare it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tinyserve_ops.arguments import check_choice, check_int
from tinyserve_ops.scorers import check_group_reduction, check_scorer, default_group_reduction, resolve

__all__ = ["KV_DTYPES", "SparseConfig"]

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
DEFAULT_TOKEN_BUDGET = 2048

# A ratio typed as a decimal means that decimal: ceil(0.07 * 100) is 7, while binary floating point says 8.
# The denominator bound turns 0.333...3 into 1/3 and keeps numerator * pages far below 2**63, so the same rule
# can run on int64 tensors.
_MAX_RATIO_DENOMINATOR = 1_000_000

# Every page list has room for the forced pages, however short the sequence.
_MAX_FORCED_PAGES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """How a sparse decode step chooses the pages it reads, and how they are stored.

    Give `token_budget` or `keep_ratio`, not both; with neither, `token_budget` is 2048, or as many as the
    forced pages hold where that is more.

    Args:
        page_size: tokens of a page, 1 to 64.
        token_budget: tokens attended per query and kv head, forced pages included; `token_budget //
            page_size` pages.
        keep_ratio: fraction of the sequence's pages that is KEPT, in (0, 1]; rounded up, at least the forced
            pages.
        scorer: how pages are ranked: "low_rank" (mean and a sketch of the keys of rank 4, or of page_size - 1
            where that is less; log-sum-exp over a page's tokens; "low_rank_1" to "low_rank_8" name the
            rank), "low_rank_max" (the same with the maximum over the tokens), "bounds" (int8 box),
            "bounds_full" (box in the KV type, not with int8), "mean", "mean_std", "bounds_mean". Pages of one
            token have no rank: give another.
        group_reduction: how the query heads of one kv head share a page list: "mean" (not for low_rank),
            "max" or "softmax"; None means "softmax" for low_rank and "mean" for the others.
        num_sink_pages: first pages, always attended.
        num_recent_pages: last pages, always attended; the open page counts, so at least 1.
        dense_layers: layers with an index below this one attend to everything.
        kv_dtype: "float32", "float16", "bfloat16", "int8" (with one fp32 scale per token and kv head), or
            None for the model's own type.
        max_kv_bytes: cap of the pool (K, V, scales and summaries of all layers); None lets a CPU pool grow
            freely.
        record_selection: keep the selected pages of every decode step (`PagedKVCache.selection_history`).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    page_size: int = 16
    token_budget: int | None = None
    keep_ratio: float | None = None
    scorer: str = "low_rank"
    group_reduction: str | None = None
    num_sink_pages: int = 1
    num_recent_pages: int = 2
    dense_layers: int = 2
    kv_dtype: str | None = None
    max_kv_bytes: int | None = None
    record_selection: bool = False
    _ratio: Fraction | None = field(default=None, init=False, repr=False, compare=False)
    _op_group_reduction: str = field(default="", init=False, repr=False, compare=False)
    _default_budget: bool = field(default=False, init=False, repr=False, compare=False)  # neither was given

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, 1, 64)
        check_int("num_sink_pages", self.num_sink_pages, 0, _MAX_FORCED_PAGES)
        check_int("num_recent_pages", self.num_recent_pages, 1, _MAX_FORCED_PAGES)
        check_int("dense_layers", self.dense_layers, 0)
        check_scorer(self.scorer, self.page_size)
        if self.group_reduction is not None:
            if not isinstance(self.group_reduction, str):
                raise TypeError(f"group_reduction: expected a string or None, got {self.group_reduction!r}")
            check_group_reduction(self.group_reduction, self.scorer)
        # Kept: every layer of every step asks for it.
        reduction = self.group_reduction or default_group_reduction(self.scorer)
        object.__setattr__(self, "_op_group_reduction", reduction)
        if self.kv_dtype is not None:
            check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
            resolve(self.scorer, self.page_size, self.kv_dtype)
        if self.max_kv_bytes is not None:
            check_int("max_kv_bytes", self.max_kv_bytes, 1)
        if not isinstance(self.record_selection, bool):
            raise TypeError(f"record_selection: expected a bool, got {self.record_selection!r}")
        self._check_budget()

    def _check_budget(self) -> None:
        if self.token_budget is not None and self.keep_ratio is not None:
            raise ValueError(
                "token_budget, keep_ratio: expected one of the two, "
                f"got token_budget={self.token_budget!r} and keep_ratio={self.keep_ratio!r}"
            )
        if self.keep_ratio is not None:
            if isinstance(self.keep_ratio, bool) or not isinstance(self.keep_ratio, (int, float)):
                raise TypeError(f"keep_ratio: expected a float, got {self.keep_ratio!r}")
            if not (math.isfinite(self.keep_ratio) and 0.0 < self.keep_ratio <= 1.0):
                raise ValueError(
                    f"keep_ratio: expected a fraction kept, above 0 and up to 1, got {self.keep_ratio!r}"
                )
            ratio = Fraction(str(float(self.keep_ratio))).limit_denominator(_MAX_RATIO_DENOMINATOR)
            object.__setattr__(self, "_ratio", ratio)
            return
        if self.token_budget is None:
            forced_tokens = self.forced_pages * self.page_size
            object.__setattr__(self, "token_budget", max(DEFAULT_TOKEN_BUDGET, forced_tokens))
            object.__setattr__(self, "_default_budget", True)
            return
        check_int("token_budget", self.token_budget, 1)
        if self.token_budget // self.page_size < self.forced_pages:
            raise ValueError(
                f"token_budget: expected at least {self.forced_pages * self.page_size}, the forced pages "
                f"(num_sink_pages {self.num_sink_pages} + num_recent_pages {self.num_recent_pages}) of "
                f"{self.page_size} tokens, got {self.token_budget}"
            )

    @property
    def forced_pages(self) -> int:
        """Pages that are attended whatever their score."""
        return self.num_sink_pages + self.num_recent_pages

    @property
    def op_group_reduction(self) -> str:
        """`group_reduction` as the ops take it: None replaced by the scorer's default."""
        return self._op_group_reduction

    @property
    def ratio(self) -> Fraction | None:
        """`keep_ratio` as the exact fraction that `page_budget` uses; None with a token budget."""
        return self._ratio

    def page_budget(self, num_pages: int) -> int:
        """Pages attended, of `num_pages` visible ones, per query and kv head. Never below the forced pages.

        The result may exceed `num_pages`; the ops take the smaller of the two.
        """
        if self._ratio is None:
            assert self.token_budget is not None
            return self.token_budget // self.page_size
        return max(-(-self._ratio.numerator * num_pages // self._ratio.denominator), self.forced_pages)

    def covers(self, num_tokens: int) -> bool:
        """Whether the budget reaches every page of a sequence of `num_tokens` tokens."""
        num_pages = -(-num_tokens // self.page_size)
        return self.page_budget(num_pages) >= num_pages

    def replace(self, **changes: Any) -> SparseConfig:
        """A copy with some values changed, validated anew. Naming one kind of budget drops the other."""
        values = self.to_dict()
        if changes.get("keep_ratio") is not None and "token_budget" not in changes:
            values["token_budget"] = None
        if changes.get("token_budget") is not None and "keep_ratio" not in changes:
            values["keep_ratio"] = None
        return SparseConfig.from_dict({**values, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, as they were given (a default budget is None); accepted by `from_dict`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if self._default_budget:
            values["token_budget"] = None
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SparseConfig:
        """The config of `to_dict`. Unknown names are refused, missing ones take their defaults."""
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"SparseConfig: expected names among {sorted(known)}, got {unknown}")
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> SparseConfig:
        """The config of `to_json`."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"SparseConfig: expected a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)
