"""Patterns of layers: settings whose letters repeat over the layers of a stack.

A row of `LAYER_PATTERNS` names such a setting, with the settings that a layer of each letter has
instead of the model's. Each layer gets a config of its own, so that none reads its own number.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class Repetition(NamedTuple):
    """How the layers of a stack repeat: `lead` layers differ from the rest, which repeats after
    each `period` layers."""

    lead: int
    period: int


@functools.lru_cache
def repetition_of(configs: tuple[ModelConfig, ...]) -> Repetition:
    """The smallest lead with which the configs repeat, and the smallest period behind it; without a
    repetition no lead, and a period of all layers."""
    depth = len(configs)
    for lead in range(depth):
        rest = configs[lead:]
        for period in range(1, len(rest)):
            if all(rest[i] == rest[i % period] for i in range(len(rest))):
                return Repetition(lead, period)
    return Repetition(0, depth)
