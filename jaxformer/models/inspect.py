"""Attention weights and other intermediates of a model, and activation patching."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config_model import ModelConfig
from jaxformer.layers.capture import Request, fits
from jaxformer.models.transformer import logits_of
from jaxformer.params import Params
from jaxformer.settings import ConfigError


class Inspection(NamedTuple):
    """The logits of a forward pass, and the captured intermediates by their full names."""

    logits: jax.Array
    values: dict[str, jax.Array]


class AttentionMaps(NamedTuple):
    """The logits of a forward pass and its attention weights, float32 [L, B, N, queries, keys];
    None for a stack that the model does not have. `cross` is from decoder to encoder."""

    logits: jax.Array
    encoder: jax.Array | None
    decoder: jax.Array | None
    cross: jax.Array | None


def inspect(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    capture: Sequence[str] = (),
    replace: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> Inspection:
    """`jf.forward` that also returns intermediates: a pure function; config and capture are static.

    Intermediates are named stack.layer.what, as in "decoder.3.mlp_out"; what is attention_weights
    [B, N, T, S] (before dropout), attention_out, cross_weights, cross_out, mlp_out (the output of a
    sublayer) or residual (the stream after a block), [B, T, D]. `capture` holds full names, the
    last part alone for all layers, or patterns with *. `replace` maps full names to an array that
    replaces the intermediate, or to a function of it (activation patching). `inputs` are the
    keywords of `jf.forward`. Raises ConfigError for an intermediate that the model does not have.
    """
    request = Request(tuple(capture), dict(replace or {}))
    batch = {"tokens": tokens, **inputs}
    logits, aux = logits_of(params, config, batch, request)
    missing = [name for name in request.replace if name not in aux.captures]
    for name in request.capture:
        if not any(fits(found, name) for found in aux.captures):
            missing.append(name)
    if missing:
        raise ConfigError(_unknown(missing, params, config, batch))
    found = {name: value for name, value in aux.captures.items() if request.captures(name)}
    return Inspection(logits, found)


def _unknown(missing: list[str], params: Params, config: ModelConfig, batch: dict[str, Any]) -> str:
    """The message for names that the model does not have, with some that it has."""

    def captures(params: Params) -> dict[str, jax.Array]:
        return logits_of(params, config, batch, Request(("*",)))[1].captures

    known = sorted(jax.eval_shape(captures, params))
    return (
        f"this model has no {', '.join(map(repr, missing))}: names are stack.layer.what, here"
        f" {', '.join(known[:12])}, and so on; what alone, or a pattern with *, means all layers."
    )


def attention_maps(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    layers: Sequence[int] | None = None,
    **inputs: Any,
) -> AttentionMaps:
    """The attention weights of all layers, or of those in `layers`, and the logits of `jf.forward`.

    `inputs` are the keywords of `jf.forward`: `source` [B, S] for an encoder-decoder. Raises
    ConfigError for a layer that no stack has.
    """
    layers_of_decoder = config.n_layers
    depths = {  # of each kind of attention, by the form of its captures' names
        "encoder.{}.attention_weights": config.encoder_layers,
        "decoder.{}.attention_weights": 0 if config.family == "encoder" else layers_of_decoder,
        "decoder.{}.cross_weights": layers_of_decoder if config.family == "encoder_decoder" else 0,
    }
    most = max(depths.values())
    if bad := [layer for layer in layers or () if not 0 <= layer < most]:
        raise ConfigError(f"layers={bad} are not among 0 .. {most - 1} of this model.")
    groups, every = [], list[str]()
    for form, depth in depths.items():
        group = [form.format(i) for i in range(depth) if layers is None or i in layers]
        groups.append(group)
        every += group
    found = inspect(params, config, tokens, every, **inputs)

    def stacked(group: list[str]) -> jax.Array | None:
        return jnp.stack([found.values[name] for name in group]) if group else None

    return AttentionMaps(found.logits, *map(stacked, groups))
