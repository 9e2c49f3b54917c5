"""Whether two configs compute the same function, which an export has to keep; and models in muP as
standard ones."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params, dotted, map_specs, rows
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.block import CROSS
from jaxformer.layers.head import total_divisor
from jaxformer.layers.norm import NORMS
from jaxformer.models.transformer import forward
from jaxformer.models.transformer import specs as model_specs

# Settings of configs that are compared: how a model is computed and trained, whatever it computes.
NEUTRAL: Mapping[str, Any] = {
    "dropout": 0.0,
    "attention_dropout": "auto",
    "init": "gpt2",
    "dtype": "float32",
    "layer_loop": "scan",  # which is traced once, however many layers there are
    "remat": "none",
    "attention_kernel": "xla",
    "expert_kernel": "xla",
}


def with_factors(config: ModelConfig) -> ModelConfig:
    """Return the config with the factors of its scores and logits as numbers, those that follow
    from muP too."""
    return dataclasses.replace(
        config,
        attention_scale=config.score_scale or config.head_width**-0.5,
        logit_divisor=total_divisor(config),
        parametrization="standard",
        mup_base="",
    )


@functools.lru_cache(maxsize=8)
def _program(config: ModelConfig, length: int) -> str:
    """Return the text of the programs of the logits, of rows of two tokens and of `length`: windows
    show in long ones, and LongRoPE has other factors in short ones."""
    specs = model_specs(config)
    params = map_specs(lambda path, spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)
    texts = []
    for tokens in (2, length):
        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        inputs = {"segment_ids": ids}
        if config.family == "encoder_decoder":
            inputs |= {"source": ids, "source_segment_ids": ids}
        lowered = jax.jit(forward, static_argnums=1).lower(params, config, ids, **inputs)
        texts.append(lowered.as_text())
    return "".join(texts)


def is_same_function(config: ModelConfig, other: ModelConfig) -> bool:
    """Return whether JAX makes the same program of the logits of two configs, so that no list has
    to say which fields matter beside which others. That takes a tenth of a second, and ten where
    there are hundreds of experts."""
    length = config.max_length
    sides = [dataclasses.replace(with_factors(side), **NEUTRAL) for side in (config, other)]
    if sides[0] == sides[1]:
        return True
    tables = [rows(model_specs(side)) for side in sides]
    shapes = [{path: spec.shape for path, spec in table.items()} for table in tables]
    return shapes[0] == shapes[1] and _program(sides[0], length) == _program(sides[1], length)


def differences(config: ModelConfig, stated: ModelConfig) -> list[str]:
    """Return the fields in which a config is another function than that of a config.json, as
    "model.activation='relu2' (there 'swiglu')": those that alone make another one, or all where it
    takes several."""
    if is_same_function(config, stated):
        return []
    told = {}
    alone = []
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        there = getattr(stated, entry.name)
        if value == there:
            continue
        told[entry.name] = f"model.{entry.name}={value!r} (there {there!r})"
        try:
            changed = dataclasses.replace(config, **{entry.name: there})
            is_neutral = is_same_function(config, changed)
        except ConfigError:  # it is no model
            is_neutral = False
        if not is_neutral:
            alone.append(entry.name)
    return [told[name] for name in alone or told]


def standard_form(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The standard model that computes the logits of one in muP, up to rounding.

    The factor of the scores is in the queries, or in their norm, and the divisor of the logits of a
    tied head is in an output matrix of its own. It is for inference and export: further training
    would have other rates.
    """
    usual = config.attention_scale or config.head_width**-0.5
    factor = (config.score_scale or usual) / usual
    has_norm = config.query_key_norm != "none"
    offset = 0 if config.query_key_norm == "layer" else NORMS[config.norm].offset

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        parent, _, name = dotted(path).rpartition(".")
        if parent.split(".")[-1] not in (config.mixer, CROSS):
            return leaf
        if name == "q_norm":
            return factor * (offset + leaf) - offset
        return factor * leaf if name in ("q", "q_bias") and not has_norm else leaf

    if factor != 1:
        params = jax.tree.map_with_path(scaled, params)
    standard = dataclasses.replace(config, parametrization="standard", mup_base="")
    divisor = total_divisor(config) / config.logit_divisor
    if divisor != 1:
        matrix = params["embed"]["tokens"] / divisor
        params = {**params, "head": {**params.get("head", {}), "weight": matrix}}
        standard = dataclasses.replace(standard, tied_head=False)
    return params, standard
