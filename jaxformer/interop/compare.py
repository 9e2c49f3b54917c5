"""When two configs are the same function: what an export has to keep."""

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.config_model import BIASED
from jaxformer.layers.pattern import layer_configs


def bias_named(carried: frozenset[str]) -> str:
    """The name of what carries a bias; where norms have none anyway, "norm" may be in it or not."""
    exact = [name for name, parts in BIASED.items() if parts == carried]
    return (exact or [name for name, parts in BIASED.items() if parts - {"norm"} == carried])[0]


def resolved(config: ModelConfig) -> ModelConfig:
    """The config with every default that depends on another field written out, and fields that
    change no logit as they are by default: two configs of the same function are then equal."""
    new = ModelConfig()
    fields: dict[str, Any] = {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_width,
        "value_dim": config.value_width,
    }
    fields |= {"d_ff": config.ff_width, "head": config.output, "pooling": config.pooled}
    fields["pooler"] = (
        config.pooler and not config.next_sentence and config.output != "classes"
    )  # these have it anyway
    if config.family == "encoder_decoder":
        fields["n_encoder_layers"] = config.encoder_layers
    scale = config.attention_scale or config.head_width**-0.5
    fields["attention_scale"] = float(f"{scale:.9g}")
    each = [layer.window for layer in layer_configs(config, config.n_layers)]
    near = any(each)
    pattern = "".join("w" if window else "f" for window in each)
    fields |= {"window_pattern": pattern} if near else {"window": 0, "window_pattern": "w"}
    carried = config.biased if config.norm == "layer" else config.biased - {"norm"}
    fields["bias"] = bias_named(carried)
    if config.positions == "rope" and config.rope_scaling != "none":
        fields["rope_original_length"] = config.original_length
    if config.rope_scaling == "yarn":
        fields["rope_attention_factor"] = float(f"{config.rope_scale:.9g}")
    if near and config.positions == "rope" and config.rope_scaling == "none":
        fields["rope_window_theta"] = config.rope_window_theta or config.rope_theta
    idle = ["dropout", "init", "dtype", "layer_loop", "remat", "attention_kernel"]
    idle += [] if config.positions == "learned" else ["max_length"]
    idle += [] if config.output in ("classes", "tags") else ["n_classes"]
    idle += [] if config.output in ("language", "masked") else ["tied_head"]
    idle += [] if config.output == "classes" else ["pooling"]
    idle += (
        []
        if config.rope_scaling == "yarn"
        else ["rope_beta_fast", "rope_beta_slow", "rope_attention_factor"]
    )
    idle += [] if config.rope_scaling == "llama3" else ["rope_low_frequency", "rope_high_frequency"]
    idle += [] if config.rope_scaling != "none" else ["rope_original_length"]
    idle += [] if near else ["rope_window_theta"]
    for scheme, prefix in (("rope", "rope_"), ("t5", "relative_"), ("sinusoidal", "sinusoid_")):
        if config.positions != scheme:
            idle += [
                entry.name for entry in dataclasses.fields(config) if entry.name.startswith(prefix)
            ]
    return dataclasses.replace(config, **fields | {name: getattr(new, name) for name in idle})


def differences(asked: ModelConfig, stated: ModelConfig) -> list[str]:
    """The fields in which two configs are not the same function, as "model.activation='relu2'
    (there 'swiglu')"."""
    a, b = (dataclasses.asdict(resolved(config)) for config in (asked, stated))
    return [f"model.{name}={a[name]!r} (there {b[name]!r})" for name in a if a[name] != b[name]]
