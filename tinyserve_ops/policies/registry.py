"""Policies by name. A class that is registered can be named wherever a policy is asked for."""

from __future__ import annotations

from typing import Any, TypeVar

from tinyserve_ops.policies.base import Policy

__all__ = ["from_dict", "get", "names", "register", "resolve"]

_classes: dict[str, type[Policy]] = {}
_PolicyClass = TypeVar("_PolicyClass", bound=type[Policy])


def register(policy_class: _PolicyClass) -> _PolicyClass:
    """Makes a policy known by its `name`; returns the class, so it serves as a decorator.

    Raises:
        ValueError: it has no name, or another class has it.
    """
    name = policy_class.name
    if not name:
        raise ValueError(f"name: expected one for {policy_class.__name__}, got ''")
    if _classes.get(name, policy_class) is not policy_class:
        raise ValueError(f"name: expected one that is not taken, got {name!r}, which is {_classes[name]}")
    _classes[name] = policy_class
    return policy_class


def names() -> tuple[str, ...]:
    """Names of all policies, sorted."""
    return tuple(sorted(_classes))


def get(name: str, **parameters: Any) -> Policy:
    """The policy of that name, e.g. `get("streaming_llm", window=2048)`.

    Raises:
        ValueError: an unknown name or parameter, or a value that does not fit.
    """
    if name not in _classes:
        raise ValueError(f"policy: expected one of {names()}, got {name!r}")
    policy_class = _classes[name]
    known = policy_class.__dataclass_fields__
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(f"policy {name!r}: expected parameters among {sorted(known)}, got {unknown}")
    return policy_class(**parameters)


def from_dict(values: dict[str, Any]) -> Policy:
    """The policy of `Policy.to_dict`."""
    if "name" not in values:
        raise ValueError(f"policy: expected a dict with a name, got {values!r}")
    return get(**values)


def resolve(policy: Policy | str | None) -> Policy | None:
    """A policy, or the one of that name with default parameters."""
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return get(policy)
    raise TypeError(f"policy: expected a Policy, a name or None, got {type(policy).__name__}")
