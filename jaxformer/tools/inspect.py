"""Attention weights, masks and other intermediates of a model, activation patching, and the logits
of each layer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.block import MIXERS
from jaxformer.layers.head import head
from jaxformer.layers.masks import AttentionMask, TokenLayout, visible
from jaxformer.layers.norm import norm
from jaxformer.layers.output import Request, fits
from jaxformer.layers.pattern import layer_configs, of_source
from jaxformer.models.inputs import check_inputs, inputs_of
from jaxformer.models.transformer import logits_of

# The names of the attention weights of a layer, by the kind of attention.
CAPTURES = {
    "encoder": "encoder.{}.attention_weights",
    "decoder": "decoder.{}.attention_weights",
    "cross": "decoder.{}.cross_weights",
}


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
    sublayer) or residual (the stream after a block), [B, T, D], or mlp_units [B, T, F], the
    activations of a feed-forward that has no experts. `capture` holds full names, the
    last part alone for all layers, or patterns with *. `replace` maps full names to an array that
    replaces the intermediate, or to a function of it (activation patching). `inputs` are the
    keywords of `jf.forward`. Raises ConfigError for an intermediate that the model does not have.
    """
    request = Request(tuple(capture), dict(replace or {}))
    batch = {"tokens": tokens, **inputs}
    logits, aux = logits_of(params, config, batch, request)
    missing = sorted(request.replace.keys() - aux.captures.keys())
    for name in request.capture:
        if not any(fits(captured, name) for captured in aux.captures):
            missing.append(name)
    if missing:

        def captures(params: Params) -> dict[str, jax.Array]:
            return logits_of(params, config, batch, Request(("*",)))[1].captures

        # Their names alone, by a trace without arrays.
        names = sorted(jax.eval_shape(captures, params))
        raise ConfigError(
            f"this model has no {', '.join(map(repr, missing))}: names are stack.layer.what, here"
            f" {', '.join(names[:12])}, and so on; what alone, or a pattern with *, means all"
            " layers."
        )
    values = {name: value for name, value in aux.captures.items() if request.captures(name)}
    return Inspection(logits, values)


def attention_maps(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    layers: Sequence[int] | None = None,
    **inputs: Any,
) -> AttentionMaps:
    """Return the attention weights of all layers, or of those in `layers`, and the logits of
    `jf.forward`.

    `inputs` are the keywords of `jf.forward`: `source` [B, S] for an encoder-decoder. Raises
    ConfigError for a layer that no stack has, and for a recurrent one.
    """
    # The layers of each kind of attention.
    depths = {"encoder": config.encoder_layers}
    if config.family != "encoder":
        depths["decoder"] = config.n_layers
    if config.family == "encoder_decoder":
        depths["cross"] = config.n_layers
    depth_limit = max(depths.values())
    if layers is None:
        layers = range(depth_limit)
    bad = sorted({*layers} - {*range(depth_limit)})
    if bad:
        raise ConfigError(f"layers={bad} are not among 0 .. {depth_limit - 1} of this model.")
    mixers = [MIXERS[layer.mixer] for layer in layer_configs(config, config.n_layers)]
    recurrent = [i for i in layers if i < len(mixers) and mixers[i].in_order]
    if recurrent:
        attending = [i for i, mixer in enumerate(mixers) if not mixer.in_order]
        raise ConfigError(
            f"layers={recurrent} have a state instead of attention to tokens: choose from"
            f" layers={attending}."
        )
    names = {}
    every = list[str]()
    for kind, depth in depths.items():
        form = CAPTURES[kind]
        names[kind] = [form.format(layer) for layer in range(depth) if layer in layers]
        every += names[kind]
    # In one forward pass, whatever stacks the model has.
    inspection = inspect(params, config, tokens, every, **inputs)
    maps = dict[str, jax.Array | None](encoder=None, decoder=None, cross=None)
    for kind, group in names.items():
        if group:
            maps[kind] = jnp.stack([inspection.values[name] for name in group])
    return AttentionMaps(inspection.logits, **maps)


def attention_masks(
    config: ModelConfig, tokens: Any, layers: Sequence[int] | None = None, **inputs: Any
) -> dict[str, jax.Array]:
    """Return which keys each query may attend to, by the kinds of `attention_maps` that the model
    has: bool [L, B, queries, keys].

    A key is hidden where it is padding or of another segment, comes after the query in a decoder,
    or is outside the window of the layer. `layers` and `inputs` are those of `attention_maps`;
    leading keys, which every query attends to, are not counted in.
    """
    batch = {"tokens": tokens, **inputs}
    check_inputs(config, batch)
    batch_inputs = inputs_of(batch)
    layout = batch_inputs.layout
    source = batch_inputs.source_layout
    masks = {}
    stacks: dict[str, tuple[AttentionMask, list[int]]]
    windows = [layer.window for layer in layer_configs(config, config.n_layers)]
    own = AttentionMask(layout, layout, causal=config.family != "encoder")
    if source is None:
        stacks = {config.family: (own, windows)}
    else:
        encoder_layers = layer_configs(of_source(config), config.encoder_layers)
        stacks = {
            "encoder": (
                AttentionMask(source, source, causal=False),
                [layer.window for layer in encoder_layers],
            ),
            "decoder": (own, windows),
            "cross": (
                AttentionMask(layout, source, causal=False, relative=False),
                [0] * config.n_layers,
            ),
        }
    for kind, (mask, windows) in stacks.items():
        # Layers differ in their windows alone, so a mask of each is enough.
        shape = (*mask.queries.positions.shape, mask.keys.positions.shape[-1])
        chosen = []
        for number, window in enumerate(windows):
            if layers is not None and number not in layers:
                continue
            keys = visible(mask._replace(window=window))
            if keys is None:
                keys = jnp.ones(shape, bool)
            chosen.append(jnp.broadcast_to(keys, shape))
        if chosen:
            masks[kind] = jnp.stack(chosen)
    return masks


def logit_lens(params: Params, config: ModelConfig, residual: Any) -> jax.Array:
    """Return the logits of a layer's residual stream [B, T, D], as if it were that of the last
    layer: the final norm and the head, float32 [B, T, V] (nostalgebraist 2020; Belrose et al. 2023,
    arXiv:2303.08112).

    `residual` is that of `inspect` with capture="residual"; that of the last layer gives the logits
    of the model. Raises ConfigError where no logits of each token exist: model.head.kind is
    classes, projection or none.
    """
    if config.output in ("classes", "projection", "none"):
        raise ConfigError(
            f"the logit lens needs logits of each token, and model.head.kind is {config.output!r}:"
            " take a model whose head is language, masked or tags."
        )
    x = jnp.asarray(residual)
    if config.norm_placement != "post":
        x = norm(params.get("final_norm", {}), config, x)
    # [B, T]
    index = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return head(params, config, x, TokenLayout(index))
