"""`JointBatch`: one call of the model for single tokens of several caches, each with a policy of its own.

The weights of a model are most of what a step of one token reads. Methods that are compared take their steps
together, so these are read once for all of them; attention goes its own way in each cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tinyserve.eval.batch import EvalBatch
from tinyserve_ops.hf import PackedBatch

__all__ = ["JointBatch", "StepRequest"]

# A cache's batch, its sequence, and the token to append.
StepRequest = tuple[EvalBatch, int, int]


class JointBatch(PackedBatch):
    """Forwards of several batches of one enabled model, their tokens packed one behind the other.

    Args:
        first: any of the batches; all have the model's shape.
    """

    def __init__(self, model: Any, first: EvalBatch) -> None:
        super().__init__(model, first.kv)
        self._model = model
        self._batches: list[EvalBatch] = []  # those that take part in the forward under way
        self._errors: dict[EvalBatch, Exception] = {}

    def step(self, requests: Sequence[StepRequest]) -> list[torch.Tensor | Exception]:
        """Appends one token to each sequence; a single one in a forward of its own, as without others.

        Returns:
            fp32 logits [vocabulary] behind each token, or what was raised in its own cache, unseen by the
            others. What the model itself raises, all of them get.
        """
        if len(requests) == 1:
            batch, seq, token = requests[0]
            try:
                return [batch.feed(seq, [token])]
            except Exception as error:
                return [error]
        self._batches, self._errors, inputs = [], {}, []
        for batch, seq, token in requests:
            try:
                inputs.append(batch.inputs([(seq, [token])]))
                self._batches.append(batch)
            except Exception as error:
                self._errors[batch] = error
        answers: dict[EvalBatch, torch.Tensor | Exception] = {}
        if inputs:
            try:
                logits = self._model(**self._joined(inputs)).logits[0].float()
                answers.update(zip(self._batches, logits, strict=True))
            except Exception as error:
                for batch in self._batches:
                    batch.abandon()
                    answers[batch] = error
        answers.update(self._errors)
        return [answers[batch] for batch, _, _ in requests]

    def _joined(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The arguments of the model's call for all of them."""
        joined = dict(inputs[0])
        for name in ("input_ids", "position_ids"):
            joined[name] = torch.cat([given[name] for given in inputs], dim=1)
        joined[self._cache_argument] = self
        if self._keeps_logits:
            joined["logits_to_keep"] = torch.arange(len(inputs), device=joined["input_ids"].device)
        return joined

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sm_scale: float,
        window: int,
    ) -> torch.Tensor:
        """As `PackedBatch.attend`, each token by its own batch; zeros where one has raised."""
        self._handed_on = False
        outs = []
        for row, batch in enumerate(self._batches):
            q, k, v = (x[:, :, row : row + 1] for x in (query, key, value))
            out = torch.zeros_like(q).transpose(1, 2)
            if batch not in self._errors:
                try:
                    out = batch.attend(layer_idx, q, k, v, None, sm_scale, window)
                except Exception as error:
                    self._errors[batch] = error
                    batch.abandon()
            outs.append(out)
        return torch.cat(outs, dim=1)
