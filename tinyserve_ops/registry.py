"""`Registry`: classes of one kind by name: a name, or a dict of JSON values, can stand for an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

__all__ = ["Registry"]


class _Named(Protocol):
    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]


_Kind = TypeVar("_Kind", bound=_Named)
_Class = TypeVar("_Class", bound=type[Any])


class Registry(Generic[_Kind]):
    """Frozen dataclasses of one kind by their `name`.

    Args:
        kind: what messages call one of them.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._classes: dict[str, type[_Kind]] = {}

    def register(self, cls: _Class) -> _Class:
        """Makes a class known by its `name`; returns it, so it serves as a decorator.

        Raises:
            ValueError: it has no name, or another class has it.
        """
        name = cls.name
        if not name:
            raise ValueError(f"name: expected one for {cls.__name__}, got ''")
        if self._classes.get(name, cls) is not cls:
            raise ValueError(
                f"name: expected one that is not taken, got {name!r}, which is {self._classes[name]}"
            )
        self._classes[name] = cls
        return cls

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._classes))

    def get(self, name: str, **parameters: Any) -> _Kind:
        """The object of that name with these parameters, e.g. `get("streaming_llm", window=2048)`.

        Raises:
            ValueError: an unknown name or parameter, or a value that does not fit.
        """
        if name not in self._classes:
            raise ValueError(f"{self._kind}: expected one of {self.names()}, got {name!r}")
        found = self._classes[name]
        known = found.__dataclass_fields__
        unknown = sorted(set(parameters) - set(known))
        if unknown:
            raise ValueError(
                f"{self._kind} {name!r}: expected parameters among {sorted(known)}, got {unknown}"
            )
        return found(**parameters)

    def from_dict(self, values: Mapping[str, Any]) -> _Kind:
        """The object of its `to_dict`.

        Raises:
            ValueError: no name, or what `get` refuses.
        """
        if "name" not in values:
            raise ValueError(f"{self._kind}: expected a dict with a name, got {dict(values)!r}")
        return self.get(**values)
