"""Patterns of layers: settings whose letters repeat over the layers of a stack.

A row of `LAYER_PATTERNS` names such a setting, with the settings that a layer of each letter has
instead of the model's. Each layer gets a config of its own, so that none reads its own number.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxformer.config.model import ModelConfig

Changes = Callable[[ModelConfig], Mapping[str, Any]]


def _windowed(config: ModelConfig) -> Mapping[str, Any]:
    """RoPE with the base of the windows, if there is one, and then without scaling."""
    if not config.rope_window_theta:
        return {}
    own = {"rope_theta": config.rope_window_theta, "rope_window_theta": 0.0}
    return own | {"rope_scaling": "none", "rope_factor": 1.0}


def _full(config: ModelConfig) -> Mapping[str, Any]:
    return {"window": 0, "rope_window_theta": 0.0}


LAYER_PATTERNS: dict[str, dict[str, Changes]] = {"window_pattern": {"w": _windowed, "f": _full}}


@functools.lru_cache
def layer_configs(config: ModelConfig, layers: int) -> tuple[ModelConfig, ...]:
    """The config of each layer: its letters' settings, and the defaults of the patterns."""
    patterns = {name: getattr(config, name) for name in LAYER_PATTERNS if hasattr(config, name)}
    defaults = {entry.name: entry.default for entry in dataclasses.fields(config)}
    found = []
    for i in range(layers):
        changes: dict[str, Any] = {name: defaults[name] for name in patterns}
        for name, letters in patterns.items():
            changes |= LAYER_PATTERNS[name][letters[i % len(letters)]](config)
        found.append(dataclasses.replace(config, **changes))
    return tuple(found)


def period_of(configs: Sequence[ModelConfig]) -> int:
    """The number of layers after which the configs repeat; all of them if they do not."""
    depth = len(configs)
    for period in range(1, depth):
        if all(configs[i] == configs[i % period] for i in range(depth)):
            return period
    return depth
