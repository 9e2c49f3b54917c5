"""RoPE in a config.json: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling`
before; the older is written, since every reader takes it."""

import math
from dataclasses import dataclass
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interop.fields import FULL, SLIDING, Ours
from jaxformer.interop.hf_config import HFConfig

# Keys of one scaling, theirs to ours, beside the factor.
SCALING_KEYS = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "yarn": {
        "attention_factor": "rope_attention_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
    },
    "llama3": {"low_freq_factor": "rope_low_frequency", "high_freq_factor": "rope_high_frequency"},
}
ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
}


@dataclass(frozen=True)
class Rope:
    """RoPE of a family; `theta`, `fraction` and `local` are its keys for what rope_parameters
    lacks, with defaults."""

    theta: tuple[str, float] = ("rope_theta", 10_000.0)
    fraction: tuple[str, float] | None = None  # the part of a head that rotates
    local: tuple[str, float] | None = None  # the base of layers with a window

    def read(self, hf: HFConfig) -> Ours:
        parameters, scaling = (hf.table(key) for key in ("rope_parameters", "rope_scaling"))
        near: dict[str, Any] = {}
        if self.local:
            near, parameters = parameters.get(SLIDING) or {}, parameters.get(FULL) or parameters
        entry = {**parameters, **scaling}
        base, part = hf.get(*self.theta), hf.get(*self.fraction) if self.fraction else 1.0
        found: Ours = {"positions": "rope", "rope_theta": float(entry.get("rope_theta") or base)}
        found["rope_fraction"] = float(entry.get("partial_rotary_factor") or part)
        if not self.fraction and found["rope_fraction"] != 1:
            raise hf.unsupported("partial_rotary_factor", found["rope_fraction"], [1.0])
        if self.local:
            default = hf.get(*self.local)
            _scaling(
                hf, {key: value for key, value in near.items() if key != "rope_theta"}, ("default",)
            )
            found |= _near(hf, float(near.get("rope_theta") or default))
        return found | _scaling(hf, entry, tuple(SCALING_KEYS))

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        keys: dict[str, Any] = {self.theta[0]: ours.rope_theta, "rope_scaling": None}
        if self.fraction:
            keys[self.fraction[0]] = ours.rope_fraction
        if self.local:
            keys[self.local[0]] = (
                ours.rope_window_theta or ours.rope_theta
            )  # without a window, where none reads it
        if ours.rope_scaling != "none":
            keys["rope_scaling"] = {"rope_type": ours.rope_scaling, "factor": ours.rope_factor}
            names = SCALING_KEYS[ours.rope_scaling].items()
            keys["rope_scaling"] |= {key: getattr(ours, name) for key, name in names}
            if ours.rope_scaling in ("yarn", "llama3"):
                keys["rope_scaling"]["original_max_position_embeddings"] = ours.rope_original_length
        return keys


def _near(hf: HFConfig, theta: float) -> Ours:
    """The base of the layers with a window, where there are any."""
    windows = hf.get("sliding_window", 4096) and SLIDING in (hf.get("layer_types") or [SLIDING])
    return {"rope_window_theta": theta} if windows else {}


def _scaling(hf: HFConfig, entry: dict[str, Any], allowed: tuple[str, ...]) -> Ours:
    kind = entry.get("rope_type", entry.get("type", "default")) or "default"
    if kind not in allowed:
        raise hf.unsupported("rope_type", kind, allowed)
    further = SCALING_KEYS[kind]
    extra = {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    for key, value in entry.items():
        if (
            key not in ROPE_KEYS | {*further} | extra
            and value is not None
            and not (key == "truncate" and value is True)
        ):
            raise hf.unsupported(f"rope_parameters.{key}", value, [None])
    most = hf.get("max_position_embeddings", 2048)
    original = entry.get("original_max_position_embeddings") or most
    factor = entry.get("factor")
    factor = float(factor if factor is not None else most / original if kind == "yarn" else 1)
    found = {name: float(entry[key]) for key, name in further.items() if entry.get(key) is not None}
    if (
        kind == "yarn"
        and "rope_attention_factor" not in found
        and entry.get("mscale")
        and entry.get("mscale_all_dim")
    ):
        scales = [
            1 + 0.1 * entry[key] * math.log(factor) if factor > 1 else 1.0
            for key in ("mscale", "mscale_all_dim")
        ]
        found["rope_attention_factor"] = scales[0] / scales[1]
    if kind == "default" or (
        factor == 1 and kind != "dynamic" and found.get("rope_attention_factor", 1) == 1
    ):
        return {}
    if factor <= 1:
        raise hf.unsupported("rope_parameters.factor", factor, ["a number above 1"])
    if kind == "dynamic":  # stretches from the length in config.json on
        return found | {
            "rope_scaling": kind,
            "rope_factor": factor,
            "max_length": int(most * factor),
            "rope_original_length": most,
        }
    lengths = (
        {"rope_original_length": original}
        if kind in ("yarn", "llama3")
        else {"rope_original_length": most}
    )
    return found | {"rope_scaling": kind, "rope_factor": factor} | lengths


@dataclass(frozen=True)
class Length:
    """The most positions; with dynamic scaling theirs is the length before it."""

    default: int = 2048

    def read(self, hf: HFConfig) -> Ours:
        return {"max_length": hf.get("max_position_embeddings", self.default)}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        dynamic = ours.rope_scaling == "dynamic"
        return {
            "max_position_embeddings": ours.rope_original_length if dynamic else ours.max_length
        }
