"""Every page is read, and tokens that the model is sure of leave it early.

The TinyServe paper (arXiv 2509.12211) names an EntropyStop baseline with a threshold of 0.5 and defines it
nowhere; here it is `full_cache` with the plugin `early_exit` (`tinyserve_ops/plugins/early_exit.py`), its
threshold in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tinyserve_ops.arguments import check_number
from tinyserve_ops.policies.base import Policy

__all__ = ["EntropyStop"]


@dataclass(frozen=True, kw_only=True)
class EntropyStop(Policy):
    """Nothing is left out of the cache; layers are, for tokens whose logit-lens entropy is low.

    Needs a model enabled with this policy: on a bare `PagedKVCache` nobody has logits to show.

    Args:
        threshold: in nats.
    """

    name: ClassVar[str] = "entropy_stop"
    reads_all: ClassVar[bool] = True
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0.0, 1e9)

    def plugins(self) -> tuple[dict[str, Any], ...]:
        """Early exit at the threshold."""
        return ({"name": "early_exit", "threshold": self.threshold},)
