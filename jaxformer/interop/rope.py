"""RoPE in a config.json: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling`
before. The older keys are written, since every reader takes them."""

import math
from dataclasses import dataclass
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.config.records import numbers_of
from jaxformer.config.settings import with_settings
from jaxformer.interop.fields import FULL, SLIDING, TYPES, ConfigFields, KeyMapping, Keys, value_of
from jaxformer.interop.hf_config import HFConfig

# The fields of each scaling's own keys.
SCALING_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "yarn": {
        "attention_factor": "rope.attention_factor",
        "beta_fast": "rope.fast",
        "beta_slow": "rope.slow",
        "truncate": "rope.truncate",
    },
    "llama3": {"low_freq_factor": "rope.slow", "high_freq_factor": "rope.fast"},
    "longrope": {
        "attention_factor": "rope.attention_factor",
        "short_factor": "rope.short_factor",
        "long_factor": "rope.long_factor",
    },
}
NOUNS = {bool: "true or false", float: "a number", str: "a list of numbers"}
ORIGINAL = "original_max_position_embeddings"
SCALED_BY_ORIGINAL = ("yarn", "llama3", "longrope")  # scalings with that key
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", ORIGINAL}
MSCALES = ("mscale", "mscale_all_dim")  # of YaRN, instead of attention_factor


@dataclass(frozen=True)
class RopeKeys(KeyMapping):
    """RoPE of a family. `theta`, `fraction` and `local` are (key, default) for what rope_parameters
    does not say: the base, the rotated part of a head, and the base of layers with a window.
    `original` is (key, default) of the length before scaling where it is beside rope_parameters.
    `kinds` are the scalings: LongRoPE is Phi-3's, and other readers of Llama do not know it.
    `needed`: every file has rope_parameters. Where `local` is `theta`, only rope_parameters tells
    the two bases apart."""

    theta: tuple[str, float] = ("rope_theta", 10_000.0)
    fraction: tuple[str, float] | None = None
    local: tuple[str, float] | None = None
    original: tuple[str, int] | None = None
    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
    needed: bool = False

    def read(self, hf: HFConfig) -> ConfigFields:
        parameters = hf.table("rope_parameters")
        scaling = hf.table("rope_scaling")
        windowed: dict[str, Any] = {}
        if self.local:
            # Parameters by kind of layer; older files have one table for both kinds.
            windowed = parameters.get(SLIDING) or {}
            parameters = parameters.get(FULL) or parameters
            entry = parameters | scaling
        else:
            # As transformers does: rope_scaling replaces rope_parameters, theta included.
            entry = scaling or parameters
        if self.needed and not entry:
            raise hf.unsupported("rope_parameters", None, [{"rope_type": "default"}])
        if self.original:
            entry = entry | {ORIGINAL: hf.number(*self.original)}
        rotation: ConfigFields = {
            "positions": "rope",
            "rope.theta": _number(hf, entry, "rope_theta", self.theta),
            "rope.fraction": _number(hf, entry, "partial_rotary_factor", self.fraction),
        }
        if not self.fraction and rotation["rope.fraction"] != 1:
            raise hf.unsupported("partial_rotary_factor", rotation["rope.fraction"], [1.0])
        if self.local:
            _scaling(hf, windowed, ("default",))
            rotation["rope.window_theta"] = _number(hf, windowed, "rope_theta", self.local)
        return rotation | _scaling(hf, entry, self.kinds)

    def write(self, config: ModelConfig) -> Keys:
        keys: Keys = {self.theta[0]: config.rope.theta, "rope_scaling": None}
        if self.needed:
            keys["rope_scaling"] = {"rope_type": "default"}
        if self.fraction:
            keys[self.fraction[0]] = config.rope.fraction
        # Read by no layer where none has a window.
        window_theta = config.rope.window_theta or config.rope.theta
        if self.local and self.local != self.theta:
            keys[self.local[0]] = window_theta
        if config.rope.scaling != "none":
            kind = config.rope.scaling
            scaling: Keys = {"rope_type": kind, "factor": config.rope.factor}
            for key, field in SCALING_KEYS.get(kind, {}).items():
                value = value_of(config, field)
                if isinstance(value, str):
                    value = [*numbers_of(value)]
                # Older readers do not know YaRN's flag, which is true in them.
                if value is not True:
                    scaling[key] = value
            if kind in SCALED_BY_ORIGINAL:
                scaling[ORIGINAL] = config.original_length
            if self.original:
                # LongRoPE with the keys that transformers 4 demands of Phi-3, and no others but for
                # numbers that do not follow from the two lengths.
                default_scale = with_settings(config, {"rope.attention_factor": 0.0}).rope_scale
                following = {
                    "factor": config.max_length / config.original_length,
                    "attention_factor": default_scale,
                    ORIGINAL: config.original_length,
                }
                different: Keys = {"type": scaling.pop("rope_type")}
                for key, value in scaling.items():
                    if value != following.get(key):
                        different[key] = value
                scaling = different
            keys["rope_scaling"] = scaling
        if self.local == self.theta:
            windowed = {"rope_type": "default", "rope_theta": window_theta}
            scaling = keys["rope_scaling"] or {"rope_type": "default"}
            full = scaling | {"rope_theta": config.rope.theta}
            keys["rope_parameters"] = {FULL: full, SLIDING: windowed}
        if self.original:
            keys[self.original[0]] = config.original_length
        return keys


def _number(
    hf: HFConfig, entry: dict[str, Any], name: str, instead: tuple[str, float] | None
) -> float:
    """Return the number of an entry of rope_parameters; where there is none, that of the key
    `instead`, which has a default, or 1."""
    if entry.get(name) is not None:
        return float(hf.checked_number(f"rope_parameters.{name}", entry[name]))
    if instead:
        return float(hf.number(*instead))
    return 1.0


def _scaling(hf: HFConfig, entry: dict[str, Any], allowed: tuple[str, ...]) -> ConfigFields:
    """Return the fields of a scaling; none where it changes nothing."""
    kind = entry.get("rope_type", entry.get("type", "default")) or "default"
    if kind == "su":
        kind = "longrope"  # older files have the first name of the method
    if kind not in allowed:
        raise hf.unsupported("rope_type", kind, allowed)
    read_keys = ROPE_KEYS | SCALING_KEYS[kind].keys()
    if kind == "yarn":
        read_keys.update(MSCALES)
    for key, value in entry.items():
        if key not in read_keys and value is not None:
            raise hf.unsupported(f"rope_parameters.{key}", value, [None])
    length = hf.number("max_position_embeddings", 2048)
    original = hf.checked_number(ORIGINAL, entry.get(ORIGINAL) or length)
    factor = entry.get("factor")
    if factor is None:
        factor = 1
        if kind in ("yarn", "longrope"):
            factor = length / original
    factor = float(hf.checked_number("rope_parameters.factor", factor))
    scaling: ConfigFields = {}
    for key, field in SCALING_KEYS[kind].items():
        value = entry.get(key)
        name = f"rope_parameters.{key}"
        if value is None:
            continue
        if isinstance(value, list):
            value = " ".join(str(float(hf.checked_number(name, number))) for number in value)
        elif type(value) is int:
            value = float(value)
        if not isinstance(value, TYPES[field]):
            raise hf.unsupported(name, entry[key], [NOUNS[TYPES[field]]])
        scaling[field] = value
    if kind == "yarn" and "rope.attention_factor" not in scaling and all(map(entry.get, MSCALES)):
        # The factor is m(mscale) / m(mscale_all_dim), m(x) = 1 + 0.1 x ln(factor) (DeepSeek).
        log = math.log(max(factor, 1))
        numbers = [hf.checked_number(f"rope_parameters.{key}", entry[key]) for key in MSCALES]
        scales = [1 + 0.1 * number * log for number in numbers]
        scaling["rope.attention_factor"] = scales[0] / scales[1]
    unchanged = factor == 1 and scaling.get("rope.attention_factor", 1) == 1
    if kind == "default" or (unchanged and kind not in ("dynamic", "longrope")):
        return {}
    if factor <= 1:
        raise hf.unsupported("rope_parameters.factor", factor, ["a number above 1"])
    scaling |= {"rope.scaling": kind, "rope.factor": factor, "rope.original_length": length}
    if kind == "dynamic":
        # config.json has the length before scaling.
        scaling["max_length"] = int(length * factor)
    elif kind in SCALED_BY_ORIGINAL:
        scaling["rope.original_length"] = original
    return scaling


@dataclass(frozen=True)
class Length(KeyMapping):
    """The maximum length; config.json has the length before dynamic scaling."""

    default: int | None = None

    def read(self, hf: HFConfig) -> ConfigFields:
        return {"max_length": hf.number("max_position_embeddings", self.default)}

    def write(self, config: ModelConfig) -> Keys:
        length = config.max_length
        if config.rope.scaling == "dynamic":
            length = config.original_length
        return {"max_position_embeddings": length}


TEMPERATURE = "llama_4_scaling_beta"


class TemperedRope(RopeKeys):
    """RoPE, and beside it in rope_parameters the growth of scores with the position (Ministral 3).
    No reader of this family knows older keys."""

    def read(self, hf: HFConfig) -> ConfigFields:
        entry = dict(hf.table("rope_parameters"))
        slope = hf.checked_number(f"rope_parameters.{TEMPERATURE}", entry.pop(TEMPERATURE, None))
        original = hf.checked_number(f"rope_parameters.{ORIGINAL}", entry.get(ORIGINAL))
        entry.pop("max_position_embeddings", None)  # repeats the key of the model
        table = hf.with_values({"rope_parameters": entry})
        tempered = {"attention.temperature": float(slope), "rope.original_length": original}
        return super().read(table) | tempered

    def write(self, config: ModelConfig) -> Keys:
        keys = super().write(config)
        entry = {
            **(keys["rope_scaling"] or {"rope_type": "default"}),
            "rope_theta": config.rope.theta,
            ORIGINAL: config.original_length,
            TEMPERATURE: config.attention.temperature,
        }
        return {"rope_parameters": entry}
