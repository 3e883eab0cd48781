"""Plugins by name. A class that is registered can be named wherever plugins are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tinyserve_ops.plugins.base import Plugin

__all__ = ["PluginLike", "from_dict", "get", "names", "register", "resolve"]

PluginLike = Plugin | str | Mapping[str, Any]

_classes: dict[str, type[Plugin]] = {}
_PluginClass = TypeVar("_PluginClass", bound=type[Plugin])


def register(plugin_class: _PluginClass) -> _PluginClass:
    """Makes a plugin known by its `name`; returns the class, so it serves as a decorator.

    Raises:
        ValueError: it has no name, or another class has it.
    """
    name = plugin_class.name
    if not name:
        raise ValueError(f"name: expected one for {plugin_class.__name__}, got ''")
    if _classes.get(name, plugin_class) is not plugin_class:
        raise ValueError(f"name: expected one that is not taken, got {name!r}, which is {_classes[name]}")
    _classes[name] = plugin_class
    return plugin_class


def names() -> tuple[str, ...]:
    """Names of all plugins, sorted."""
    return tuple(sorted(_classes))


def get(name: str, **parameters: Any) -> Plugin:
    """The plugin of that name, e.g. `get("early_exit", threshold=0.5)`.

    Raises:
        ValueError: an unknown name or parameter, or a value that does not fit.
    """
    if name not in _classes:
        raise ValueError(f"plugin: expected one of {names()}, got {name!r}")
    plugin_class = _classes[name]
    known = plugin_class.__dataclass_fields__
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(f"plugin {name!r}: expected parameters among {sorted(known)}, got {unknown}")
    return plugin_class(**parameters)


def from_dict(values: Mapping[str, Any]) -> Plugin:
    """The plugin of `Plugin.to_dict`."""
    if "name" not in values:
        raise ValueError(f"plugin: expected a dict with a name, got {dict(values)!r}")
    return get(**values)


def resolve(plugins: Sequence[PluginLike] | None) -> tuple[Plugin, ...]:
    """Plugins, their names or their dicts as plugins, in their order; None for none.

    Raises:
        TypeError, ValueError: one is neither, by its place; or a plugin is named twice.
    """
    if plugins is None:
        return ()
    if isinstance(plugins, (str, Mapping)) or not isinstance(plugins, Sequence):
        raise TypeError(f"plugins: expected a list of plugins, got {type(plugins).__name__}")
    found = []
    for index, plugin in enumerate(plugins):
        if isinstance(plugin, str):
            plugin = get(plugin)
        elif isinstance(plugin, Mapping):
            plugin = from_dict(plugin)
        if not isinstance(plugin, Plugin):
            raise TypeError(
                f"plugins[{index}]: expected a Plugin, a name or a dict, got {type(plugin).__name__}"
            )
        found.append(plugin)
    for plugin in found:
        if sum(other.name == plugin.name for other in found) > 1:
            raise ValueError(f"plugins: expected each at most once, got {plugin.name!r} more often")
    return tuple(found)
