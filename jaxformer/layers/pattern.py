"""Patterns of layers: settings whose letters repeat over the layers of a stack.

A row of `LAYER_PATTERNS` names such a setting, with the settings that a layer of each letter has
instead of the model's. Each layer gets its own config, so that no layer depends on its number.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.config.records import Attention, Latent, Recurrent, Rope, names_of
from jaxformer.config.settings import flat, with_settings
from jaxformer.config.variants import RECURRENT

Changes = Callable[[ModelConfig], Mapping[str, Any]]


UNSCALED = {"rope.window_theta": 0.0, "rope.scaling": "none", "rope.factor": 1.0}


def _windowed(config: ModelConfig) -> Mapping[str, Any]:
    """Return the settings of RoPE with the base of the windows, if there is one, and then without
    scaling."""
    theta = config.rope.window_theta
    return {"rope.theta": theta, **UNSCALED} if theta else {}


def _full(config: ModelConfig) -> Mapping[str, Any]:
    return {"window": 0, "rope.window_theta": 0.0}


def without_positions(config: ModelConfig) -> Mapping[str, Any]:
    """Return the settings of a layer without positions (NoPE, arXiv:2305.19466)."""
    return {"positions": "none", **UNSCALED}


def _unchanged(config: ModelConfig) -> Mapping[str, Any]:
    return {}


def _dense(config: ModelConfig) -> Mapping[str, Any]:
    return {"feed_forward": "ffn", "experts.n": 0}


def _own_mixer(config: ModelConfig) -> Mapping[str, Any]:
    if config.mixer in RECURRENT.values():
        return {}
    widths = [width for width in names_of(config.mup_base) if not width.startswith("recurrent.")]
    return {"recurrent": Recurrent(), "mup_base": " ".join(widths)}


def _recurrent(mixer: str, config: ModelConfig) -> Mapping[str, Any]:
    of_attention = {"attention": Attention(), "latent": Latent(), "rope": Rope()}
    # Those that the stack has embedded are told by the same setting.
    embedded = config.positions if config.positions in ("learned", "sinusoidal") else "none"
    placement = config.norm_placement
    if config.recurrent.norm_placement != "auto":
        placement = config.recurrent.norm_placement
    return {
        "mixer": mixer,
        "norm_placement": placement,
        "recurrent.norm_placement": "auto",
        "positions": embedded,
        "window": 0,
        "n_kv_heads": 0,
        # The scale of scores alone follows the base in a layer.
        "parametrization": "standard",
        "mup_base": "",
        **of_attention,
    }


LAYER_PATTERNS: dict[str, dict[str, Changes]] = {
    "window_pattern": {"w": _windowed, "f": _full},
    "experts.pattern": {"e": _unchanged, "d": _dense},
    # Behind the windows, whose bases it removes.
    "rope.pattern": {"p": _unchanged, "n": without_positions},
    # Behind the settings of attention, which the other mixers do not have.
    "layer_pattern": {
        "m": _own_mixer,
        **{letter: functools.partial(_recurrent, mixer) for letter, mixer in RECURRENT.items()},
    },
}
# Settings that count first layers, which have a letter of a pattern whatever its letters are.
LEADING_LAYERS = {"experts.dense_layers": ("experts.pattern", "d")}


def of_source(config: ModelConfig) -> ModelConfig:
    """Return the config of the layers that read the source of an encoder-decoder."""
    return dataclasses.replace(config, window=config.source_window or config.window)


@functools.lru_cache
def layer_configs(config: ModelConfig, layers: int) -> tuple[ModelConfig, ...]:
    """Return the config of each layer: the model's, with the settings of the layer's letters, and
    with the patterns themselves set to their defaults."""
    settings = flat(config)
    patterns = {name: settings[name] for name in LAYER_PATTERNS if name in settings}
    defaults = flat(type(config)())
    configs = []
    for i in range(layers):
        letters_of_layer = {name: letters[i % len(letters)] for name, letters in patterns.items()}
        for setting, (name, letter) in LEADING_LAYERS.items():
            if i < settings[setting]:
                letters_of_layer[name] = letter
        changes: dict[str, Any] = {name: defaults[name] for name in (*patterns, *LEADING_LAYERS)}
        changes["unnormed_layers"] = int(i < config.unnormed_layers)
        for name, letter in letters_of_layer.items():
            changes |= LAYER_PATTERNS[name][letter](config)
        configs.append(with_settings(config, changes))
    return tuple(configs)


@functools.lru_cache
def repetition_of(configs: tuple[ModelConfig, ...]) -> tuple[int, int]:
    """Return the smallest number of leading layers behind which the configs repeat, and the
    smallest period with which they do. Without a repetition the lead is 0 and the period has all
    layers."""
    depth = len(configs)
    for lead in range(depth):
        following = configs[lead:]
        for period in range(1, len(following)):
            if all(layer == following[i % period] for i, layer in enumerate(following)):
                return lead, period
    return 0, depth
