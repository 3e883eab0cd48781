"""Tokens that got most attention so far, and the latest ones (Zhang et al., H2O, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyserve_ops.policies.eviction import (
    EvictionPolicy,
    Observed,
    SequenceTokens,
    add_attention,
    keep_best,
)

__all__ = ["H2O"]


@dataclass(frozen=True, kw_only=True)
class H2O(EvictionPolicy):
    """Half the budget for heavy hitters, half for recent tokens (the odd one too).

    A token's score is the sum of its attention probabilities over all queries since it came, summed over the
    query heads of a kv head, in fp32. The prompt is scored as a whole and cut down when it is complete; after
    it every token is followed by an eviction, also within a forward of several tokens.

    A token that is gone can't come back, so nothing but the whole sequence can be rolled back.
    """

    name: ClassVar[str] = "h2o"
    per_step: ClassVar[bool] = True

    def observe(self, memory: Any, tokens: SequenceTokens) -> Observed:
        """Adds to the scores; evicts once the prompt is complete."""
        scores = torch.zeros(tokens.pool.num_kv_heads, tokens.length, device=tokens.q.device)
        if memory is not None:
            scores[:, : tokens.num_stored] = memory
        if not tokens.in_prompt:
            return self._observe_steps(scores, tokens)
        add_attention(scores, tokens)
        budget = tokens.budget
        if not tokens.ends_prompt or tokens.length <= budget:
            return Observed(scores)
        num_heavy = budget // 2
        kept = keep_best(scores[:, : tokens.length - (budget - num_heavy)], num_heavy, tokens.length)
        return Observed(scores.gather(1, kept), kept)

    def _observe_steps(self, scores: Tensor, tokens: SequenceTokens) -> Observed:
        """One new token after the other sees what is left, and pushes the least of it out.

        Args:
            scores: [num_kv_heads, length]; changed.
        """
        keys, queries = tokens.keys(), tokens.grouped_queries()
        values = tokens.values() if tokens.num_new > 1 else None
        slots = torch.arange(tokens.length, device=scores.device)
        alive = torch.ones_like(scores, dtype=torch.bool)
        outs = []
        for i in range(tokens.num_new):
            last = tokens.num_stored + i
            seen = alive & (slots <= last)
            logits = tokens.sm_scale * queries[:, :, i] @ keys.transpose(1, 2)  # [kv heads, group, length]
            shares = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            scores += shares.sum(1)
            if values is not None:
                outs.append((shares @ values).flatten(0, 1))
            budget = tokens.budget_of(tokens.num_tokens - tokens.num_new + i + 1)
            surplus = int(seen[0].sum()) - budget
            if surplus > 0:
                age = seen.flip(1).cumsum(1).flip(1)  # 1 for the newest that is seen
                candidates = scores.masked_fill(~(seen & (age > budget - budget // 2)), torch.inf)
                # The later of two equals goes, as in `keep_best`.
                worst = candidates.flip(1).sort(dim=1, stable=True).indices[:, :surplus]
                alive.scatter_(1, tokens.length - 1 - worst, False)
        out = torch.stack(outs).to(tokens.q.dtype) if outs else None
        if bool(alive.all()):
            return Observed(scores, out=out)
        kept = alive.nonzero()[:, 1].view(alive.size(0), -1)
        return Observed(scores.gather(1, kept), kept, out)
