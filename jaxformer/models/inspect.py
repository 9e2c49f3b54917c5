"""Seeing inside a model: its attention weights, any of its intermediates, and what happens when one
is replaced."""

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
    """The logits of a forward pass, and the intermediates asked for by their full names."""

    logits: jax.Array
    values: dict[str, jax.Array]


class AttentionMaps(NamedTuple):
    """The logits of a forward pass and the attention weights in it, float32 by layer [L, B, N,
    queries, keys]; None for a stack that the model has not. `cross` are the decoder's queries to
    the encoder's keys."""

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
    """`jf.forward` that also gives what passed through it: a pure function, to be jitted with
    config and capture static.

    Intermediates are named stack.layer.what, as in "decoder.3.mlp_out"; what is attention_weights
    [B, N, T, S] (before dropout), attention_out, cross_weights, cross_out, mlp_out (what a sublayer
    adds to the residual stream) or residual (the stream behind a block), [B, T, D]. `capture` holds
    full names, the last part alone for all layers, or patterns with *. `replace` maps full names to
    an array that takes the intermediate's place, or to a function of it (activation patching).
    `inputs` are the keywords of `jf.forward`. Raises ConfigError for a name that the model has not.
    """
    request = Request(tuple(capture), dict(replace or {}))
    batch = {"tokens": tokens, **inputs}
    logits, aux = logits_of(params, config, batch, request)
    missing = [name for name in request.replace if name not in aux.captures]
    missing += [
        name for name in request.capture if not any(fits(found, name) for found in aux.captures)
    ]
    if missing:
        raise ConfigError(_unknown(missing, params, config, batch))
    return Inspection(
        logits, {name: value for name, value in aux.captures.items() if request.captures(name)}
    )


def _unknown(missing: list[str], params: Params, config: ModelConfig, batch: dict[str, Any]) -> str:
    """The message for names that the model has not, with some of those that it has."""
    shapes = jax.eval_shape(
        lambda p: logits_of(p, config, batch, Request(("*",)))[1].captures, params
    )
    return (
        f"this model has no {', '.join(map(repr, missing))}: names are stack.layer.what, here"
        f" {', '.join(sorted(shapes)[:12])}, and so on; what alone, or a pattern with *, means all"
        " layers."
    )


def attention_maps(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    layers: Sequence[int] | None = None,
    **inputs: Any,
) -> AttentionMaps:
    """The attention weights of all layers, or of those in `layers`, and the logits, which are those
    of `jf.forward`.

    `inputs` are the keywords of `jf.forward`: `source` [B, S] for an encoder-decoder. Raises
    ConfigError for a layer that no stack has.
    """
    names = {"encoder": "encoder.{}.attention_weights", "decoder": "decoder.{}.attention_weights"}
    names["cross"] = "decoder.{}.cross_weights"
    depths = {
        "encoder": config.encoder_layers,
        "decoder": 0 if config.family == "encoder" else config.n_layers,
    }
    depths["cross"] = config.n_layers if config.family == "encoder_decoder" else 0
    most = max(depths.values())
    if bad := [layer for layer in layers or () if not 0 <= layer < most]:
        raise ConfigError(f"layers={bad} are not among 0 .. {most - 1} of this model.")
    wanted = {
        stack: [names[stack].format(i) for i in range(depth) if layers is None or i in layers]
        for stack, depth in depths.items()
    }
    found = inspect(
        params, config, tokens, tuple(name for group in wanted.values() for name in group), **inputs
    )
    maps = {
        stack: jnp.stack([found.values[name] for name in group]) if group else None
        for stack, group in wanted.items()
    }
    return AttentionMaps(found.logits, **maps)
