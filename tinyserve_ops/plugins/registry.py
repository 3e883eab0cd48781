"""Plugins by name. A class that is registered can be named wherever plugins are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyserve_ops.plugins.base import Plugin
from tinyserve_ops.registry import Registry

__all__ = ["PluginLike", "from_dict", "get", "names", "register", "resolve"]

PluginLike = Plugin | str | Mapping[str, Any]

_registry: Registry[Plugin] = Registry("plugin")
register, names, get, from_dict = (
    _registry.register,
    _registry.names,
    _registry.get,
    _registry.from_dict,
)


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
