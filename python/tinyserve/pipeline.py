"""Policy and plugins from a YAML file, as `tinyserve_ops.enable` takes them.

policy: {name: streaming_llm, window: 2048}      # or just its name; left out: query-aware selection
plugins:                                          # in the order in which they stack
  - early_exit
  - {name: approximate_attention, top_p: 0.9, enabled: false}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyserve.errors import UsageError
from tinyserve_ops import plugins, policies
from tinyserve_ops.plugins import Plugin
from tinyserve_ops.policies import Policy

__all__ = ["Pipeline", "load_pipeline"]

_KEYS = ("policy", "plugins")


@dataclass(frozen=True)
class Pipeline:
    """`enable(model, config, policy=pipeline.policy, plugins=pipeline.plugins)`."""

    policy: Policy | None
    plugins: tuple[Plugin, ...]


def load_pipeline(path: Path) -> Pipeline:
    """Reads a YAML file.

    Raises:
        UsageError: it can't be read, is not YAML, or names what does not exist or fit.
    """
    import yaml  # heavy for a command line that may not need it

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: expected a YAML file, got {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or set(values) - set(_KEYS):
        found = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise UsageError(f"{path}: expected a mapping with {' and '.join(_KEYS)}, got {found}")
    policy = values.get("policy")
    try:
        if isinstance(policy, dict):
            policy = policies.from_dict(policy)
        return Pipeline(policies.resolve(policy), plugins.resolve(values.get("plugins")))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
