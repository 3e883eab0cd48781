"""Which ops were called, as torch saw them: independent of who called them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OpCalls(TorchDispatchMode):
    """Within it, every call of an op of this library: its name and its arguments.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tinyserve":
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False))
            self.calls.append((func._schema.name.removeprefix("tinyserve::"), given))
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> list[tuple[str, dict[str, Any]]]:
        """The calls of these ops so far, which are then forgotten."""
        found = [call for call in self.calls if call[0] in names]
        self.calls.clear()
        return found
