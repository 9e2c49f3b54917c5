"""How the layers of a stack differ: by settings whose letters repeat over the layers.

A row of `LAYER_PATTERNS` names such a setting, and says for each of its letters which settings a
layer of that letter has instead of the model's. The config of one layer holds for that layer alone,
so that no layer reads its own number.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxformer.config_model import ModelConfig

Changes = Callable[[ModelConfig], Mapping[str, Any]]


def _windowed(config: ModelConfig) -> Mapping[str, Any]:
    """RoPE of the window's own base, which is not stretched, where there is one."""
    if not config.rope_window_theta:
        return {}
    own = {"rope_theta": config.rope_window_theta, "rope_window_theta": 0.0}
    return own | {"rope_scaling": "none", "rope_factor": 1.0}


def _full(config: ModelConfig) -> Mapping[str, Any]:
    return {"window": 0, "rope_window_theta": 0.0}


LAYER_PATTERNS: dict[str, dict[str, Changes]] = {"window_pattern": {"w": _windowed, "f": _full}}


@functools.lru_cache
def layer_configs(config: ModelConfig, layers: int) -> tuple[ModelConfig, ...]:
    """The config of each of `layers` layers, with the settings of its letters; the patterns
    themselves are as by default."""
    known: dict[tuple[str, ...], ModelConfig] = {}
    found = []
    for i in range(layers):
        patterns = {name: getattr(config, name) for name in LAYER_PATTERNS if hasattr(config, name)}
        letters = tuple(pattern[i % len(pattern)] for pattern in patterns.values())
        if letters not in known:
            known[letters] = _resolved(config, dict(zip(patterns, letters, strict=True)))
        found.append(known[letters])
    return tuple(found)


def _resolved(config: ModelConfig, letters: Mapping[str, str]) -> ModelConfig:
    defaults = {entry.name: entry.default for entry in dataclasses.fields(config)}
    changes: dict[str, Any] = {name: defaults[name] for name in letters}
    for name, letter in letters.items():
        changes |= LAYER_PATTERNS[name][letter](config)
    return dataclasses.replace(config, **changes)


def period_of(configs: Sequence[ModelConfig]) -> int:
    """After how many layers the configs repeat; their number where they do not."""
    depth = len(configs)
    repeats = (
        p for p in range(1, depth) if all(configs[i] == configs[i % p] for i in range(depth))
    )
    return next(repeats, depth)
