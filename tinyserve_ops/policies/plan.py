"""What a cache's policy means for its executor, settled once when the cache is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.base import Policy, SelectionPolicy
from tinyserve_ops.policies.eviction import EvictionPolicy
from tinyserve_ops.policies.registry import resolve

__all__ = ["PolicyPlan"]


@dataclass(frozen=True)
class PolicyPlan:
    """How the layers of a cache are served.

    Attributes:
        policy: as it was given; None is the fused query-aware selection.
        dense_layers: layers below this index read all that is stored.
        selection: the policy to ask for pages stage by stage; None where the fused op or nothing selects.
        eviction: the policy to ask which tokens stay.
        layer_groups: groups of layers that must not share a page table, or None.
    """

    policy: Policy | None
    dense_layers: int
    selection: SelectionPolicy | None = None
    eviction: EvictionPolicy | None = None
    layer_groups: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def make(cls, policy: Policy | str | None, config: SparseConfig, num_layers: int) -> PolicyPlan:
        """The plan of a policy, or of the one of that name, at a config.

        Raises:
            ValueError, TypeError: they don't go together, by name.
        """
        found = resolve(policy)
        if found is None:
            return cls(None, config.dense_layers)
        found.check(config)
        groups = None
        if isinstance(found, EvictionPolicy):
            groups = tuple(tuple(group) for group in found.layer_groups(num_layers, config))
        return cls(
            found,
            num_layers if found.reads_all else config.dense_layers,
            found if isinstance(found, SelectionPolicy) and not found.fused else None,
            found if isinstance(found, EvictionPolicy) else None,
            groups,
        )

    def check_groups(self, layer_groups: Sequence[Sequence[int]]) -> None:
        """Raises ValueError where layers that keep different numbers of tokens share a page table."""
        for group in layer_groups:
            if self.layer_groups is not None and not any(set(group) <= set(own) for own in self.layer_groups):
                raise ValueError(
                    f"layer_groups: expected each within one of {self.layer_groups}, the groups of policy "
                    f"{self.policy}, got {tuple(group)}"
                )
