"""Policies by name. A class that is registered can be named wherever a policy is asked for."""

from __future__ import annotations

from tinyserve_ops.policies.base import Policy
from tinyserve_ops.registry import Registry

__all__ = ["from_dict", "get", "names", "register", "resolve"]

_registry: Registry[Policy] = Registry("policy")
register, names, get, from_dict = (
    _registry.register,
    _registry.names,
    _registry.get,
    _registry.from_dict,
)


def resolve(policy: Policy | str | None) -> Policy | None:
    """A policy, or the one of that name with default parameters."""
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return get(policy)
    raise TypeError(f"policy: expected a Policy, a name or None, got {type(policy).__name__}")
