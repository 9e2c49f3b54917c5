"""The three families: a decoder (GPT, Llama), an encoder (BERT), whose stack is that of a decoder
with attention to both sides, and an encoder-decoder (T5), with a stack over the source and a causal
one that attends to it."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxformer.arrays.params import Params, Specs, map_specs
from jaxformer.config.model import ModelConfig
from jaxformer.layers.cache import Cache
from jaxformer.layers.embed import added_specs, embed, embedding_specs
from jaxformer.layers.head import head_specs
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.output import NOTHING, Aux, Output, Request, merged
from jaxformer.layers.pattern import of_source
from jaxformer.layers.sublayer import Call, EncoderOutput
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import run_stack, stack_mask, stack_specs


def decoder_specs(config: ModelConfig) -> Specs:
    """Return rows named embed, blocks, final_norm and those of the head."""
    return {
        "embed": embedding_specs(config) | added_specs(config),
        **stack_specs(config, config.n_layers),
        **head_specs(config),
    }


def decoder_hidden(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: Cache | None = None,
    key: jax.Array | None = None,
    request: Request = NOTHING,
    causal: bool = True,
) -> Output:
    """Return the residual stream before the head [B, T, D], and the cache, if given, with these
    tokens."""
    embed_key, layers_key = (None, None) if key is None else jax.random.split(key)
    mask, cache = stack_mask(params["blocks"], inputs.layout, cache, causal)
    inputs = replace(inputs, layout=mask.queries)
    x = embed(params["embed"], config, inputs, embed_key)
    call = Call(mask, key=layers_key, request=request.within(config.family))
    return run_stack(params, config, x, call, cache)


def encoder_decoder_specs(config: ModelConfig) -> Specs:
    """Return rows named embed (whose tokens serve both stacks, unless the encoder has its own),
    encoder, and those of a decoder."""
    added = added_specs(config)
    tokens = embedding_specs(config)
    own = tokens if config.embedding.source == "separate" else {}
    embedding = {"embed": own | added} if own | added else {}
    encoder = embedding | stack_specs(of_source(config), config.encoder_layers)
    return {
        "embed": tokens | added,
        "encoder": map_specs(lambda _, spec: replace(spec, reads="source"), encoder),
        **stack_specs(config, config.n_layers, cross=True),
        **head_specs(config),
    }


def encode(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    key: jax.Array | None = None,
    request: Request = NOTHING,
) -> Output:
    """Return the output of the encoder for the source: [B, S] -> [B, S, D]."""
    embed_key, layers_key = (None, None) if key is None else jax.random.split(key)
    config = of_source(config)
    encoder = params["encoder"]
    # What a stack reads and adds to its inputs has the same names in both.
    tables = params["embed"] | encoder.get("embed", {})
    layout: Any = inputs.source_layout  # a model of this family always has a source here
    mask, _ = stack_mask(encoder["blocks"], layout, causal=False)
    source = Inputs(inputs.source, mask.queries)  # type: ignore[arg-type]
    x = embed(tables, config, source, embed_key)
    call = Call(mask, key=layers_key, request=request.within("encoder"))
    return run_stack(encoder, config, x, call)


def encoder_decoder_hidden(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: Cache | None = None,
    key: jax.Array | None = None,
    request: Request = NOTHING,
) -> Output:
    """Return the residual stream before the head [B, T, D]. The source is read in the first call
    with a cache, which has its keys and values for the others."""
    source_key, embed_key, layers_key = (None,) * 3 if key is None else jax.random.split(key, 3)
    source_layout: Any = inputs.source_layout
    if inputs.source is not None:
        encoded, _, encoder_aux = encode(params, config, inputs, source_key, request)
        cache = None if cache is None else replace(cache, source_layout=source_layout)
    else:
        assert cache is not None
        encoded = None
        encoder_aux = Aux()
        source_layout = cache.source_layout
    mask, cache = stack_mask(params["blocks"], inputs.layout, cache)
    inputs = replace(inputs, layout=mask.queries)
    x = embed(params["embed"], config, inputs, embed_key)
    # A target sees the whole source of its segment number, and no distances in it.
    to_source = AttentionMask(mask.queries, source_layout, causal=False, relative=False)
    source = EncoderOutput(encoded, to_source)
    call = Call(mask, source=source, key=layers_key, request=request.within("decoder"))
    out = run_stack(params, config, x, call, cache)
    return out._replace(aux=merged((encoder_aux, out.aux)))


class ModelFamily(NamedTuple):
    """The table of parameters of a family, and its residual stream before the head."""

    specs: Callable[[ModelConfig], Specs]
    hidden: Callable[..., Output]


MODEL_FAMILIES = {
    "decoder": ModelFamily(decoder_specs, decoder_hidden),
    "encoder": ModelFamily(decoder_specs, functools.partial(decoder_hidden, causal=False)),
    "encoder_decoder": ModelFamily(encoder_decoder_specs, encoder_decoder_hidden),
}
