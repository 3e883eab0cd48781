"""Where the padding of a batch lies: runs of padded positions, one list per row.

transformers counts padded positions; the pages hold real tokens only. A row's real tokens keep their order,
so a padded position and a stored position differ by the number of pads before it, and a few runs say
everything. Invariant: the runs of a row are ascending, disjoint, not adjacent, and lie in [0, length).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["PadRuns", "mask_from_4d", "new_tokens"]

Run = tuple[int, int]


class PadRuns:
    """Padded length of a batch (one number, as in transformers) and the pad runs of each row."""

    def __init__(self, batch_size: int, length: int = 0, runs: Sequence[Sequence[Run]] | None = None) -> None:
        self.length = length
        self.runs: list[list[Run]] = (
            [list(r) for r in runs] if runs is not None else [[] for _ in range(batch_size)]
        )
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None  # see `_pads_and_edges`

    def __bool__(self) -> bool:
        """Whether any row holds padding."""
        return any(self.runs)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.runs)

    def copy(self) -> PadRuns:
        """An independent copy."""
        return PadRuns(self.batch_size, self.length, self.runs)

    def num_stored(self, row: int, length: int | None = None) -> int:
        """Real tokens among the first `length` padded positions of a row (default: all)."""
        length = self.length if length is None else length
        return length - sum(min(stop, length) - start for start, stop in self.runs[row] if start < length)

    def stored_positions(self, row: int, device: torch.device) -> torch.Tensor:
        """int64 [num_stored]: padded position of each stored token of a row."""
        keep = torch.ones(self.length, dtype=torch.bool)
        for start, stop in self.runs[row]:
            keep[start:stop] = False
        return keep.nonzero().squeeze(1).to(device)

    def append(self, num_new: int, valid: torch.Tensor | None) -> None:
        """Adds `num_new` positions to every row; `valid` bool [batch, num_new] says which are real, None
        means all.
        """
        if valid is not None:
            pads = torch.nn.functional.pad((~valid).to(torch.int8), (1, 1)).diff(dim=1)
            starts, stops = (pads == 1).nonzero().tolist(), (pads == -1).nonzero().tolist()
            for (row, start), (_, stop) in zip(starts, stops, strict=True):
                self._add_run(row, self.length + start, self.length + stop)
        self.length += num_new

    def _add_run(self, row: int, start: int, stop: int) -> None:
        runs = self.runs[row]
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
        self._known = None

    def crop(self, length: int) -> None:
        """Keeps the first `length` padded positions."""
        self.length, self._known = length, None
        for row, runs in enumerate(self.runs):
            if runs and runs[-1][1] > length:
                self.runs[row] = [(start, min(stop, length)) for start, stop in runs if start < length]

    def take(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        self.runs, self._known = [list(self.runs[row]) for row in rows], None

    def agrees_with(self, mask: torch.Tensor) -> bool:
        """Whether bool `mask` [batch, length] is False exactly on the pad runs."""
        # Equal counts of real tokens, and False on every run, leave no position where the two could differ.
        stored = torch.tensor([self.num_stored(row) for row in range(self.batch_size)], device=mask.device)
        if not torch.equal(mask.sum(dim=1), stored):
            return False
        return not any(
            bool(mask[row, start:stop].any()) for row, runs in enumerate(self.runs) for start, stop in runs
        )

    def agrees_with_step(self, mask: torch.Tensor) -> bool:
        """As `agrees_with`, for every decode step: counts the real tokens of each row and looks only at both
        ends of every run, which is enough for a mask whose runs are where they were or moved as a whole.
        """
        num_pads, edges = self._pads_and_edges(mask.device)
        if not torch.equal(mask.sum(dim=1), self.length - num_pads):
            return False
        return not bool(mask[edges[0], edges[1]].any())

    def _pads_and_edges(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(padding of each row, int64 [batch]; row and position of the ends of all runs, int64 [2, ends]);
        kept until a run changes.
        """
        if self._known is None or self._known[0].device != device:
            num_pads = [sum(stop - start for start, stop in runs) for runs in self.runs]
            ends = [(row, end) for row, runs in enumerate(self.runs) for a, b in runs for end in (a, b - 1)]
            edges = torch.tensor(ends, dtype=torch.int64, device=device).reshape(-1, 2)
            self._known = torch.tensor(num_pads, device=device), edges.T
        return self._known


def mask_from_4d(mask: torch.Tensor, past_length: int) -> torch.Tensor:
    """The key mask, bool [batch, length], of a causal mask [batch, heads, queries, length] that also hides
    padding.

    Accepts bool masks (True = attend) and additive ones (0 = attend, very negative = hide). A mask that says
    more than "causal, without these keys" can't be kept by a cache that stores tokens in order, and is
    refused.

    Args:
        mask: [batch, heads, num_new, past_length + num_new].
        past_length: tokens before the first query.

    Raises:
        ValueError: a bias, a different mask per head, or a pattern that is not causal plus padding.
    """
    if mask.dtype == torch.bool:
        visible = mask
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 4
        if not bool(((mask == 0) | hidden).all()):
            raise ValueError(
                "attention_mask: expected 0 or the dtype's minimum in an additive mask, "
                "got other values (a bias)"
            )
        visible = ~hidden
    if visible.size(1) > 1 and not bool((visible == visible[:, :1]).all()):
        raise ValueError("attention_mask: expected the same mask for all heads, got different ones")
    visible = visible[:, 0]
    num_new, length = visible.shape[1:]
    # The last query sees every real key. Where it is padding itself its row says nothing, and the other
    # queries are asked.
    last = visible[:, -1]
    valid = torch.where(last[:, -1:], last, visible.any(dim=1))
    if num_new > 1:
        queries = torch.arange(past_length, past_length + num_new, device=mask.device)
        causal = torch.arange(length, device=mask.device)[None] <= queries[:, None]
        expected = causal[None] & valid[:, None]
        differs = (visible != expected).any(dim=2) & valid[:, past_length:]
        if bool(differs.any()):
            raise ValueError(
                "attention_mask: expected a causal mask with padding, got a 4D mask of another pattern"
            )
    return valid


def new_tokens(mask: torch.Tensor | None, pads: PadRuns, num_new: int) -> torch.Tensor | None:
    """Which new tokens are real, bool [batch, num_new], None for all; refuses a mask that contradicts what is
    stored.
    """
    if mask is None:
        if pads:
            raise ValueError(
                "attention_mask: expected the mask with the padding stored in the cache, got None"
            )
        return None
    if mask.dim() == 4:
        _check_mask_shape(mask.shape[-2:], (num_new, pads.length + num_new))
        if mask.size(0) not in (1, pads.batch_size):
            raise ValueError(f"attention_mask: expected a batch of {pads.batch_size}, got {mask.size(0)}")
        mask = mask_from_4d(mask, pads.length).expand(pads.batch_size, -1)
    mask = mask if mask.dtype == torch.bool else mask != 0
    _check_mask_shape(mask.shape, (pads.batch_size, pads.length + num_new))
    stored, new = mask[:, : pads.length], mask[:, pads.length :]
    if pads.length and not (pads.agrees_with_step(stored) if num_new == 1 else pads.agrees_with(stored)):
        raise _mask_disagrees(pads)
    return None if bool(new.all()) else new


def _check_mask_shape(got: Sequence[int], expected: tuple[int, int]) -> None:
    if tuple(got) != expected:
        raise ValueError(
            f"attention_mask: expected {list(expected)} (earlier tokens included), got {list(got)}"
        )


def _mask_disagrees(pads: PadRuns) -> ValueError:
    return ValueError(
        f"attention_mask: expected the padding of the {pads.length} tokens already stored, got another; "
        "tokens can't be hidden or shown afterwards (start a new cache, or crop)"
    )
