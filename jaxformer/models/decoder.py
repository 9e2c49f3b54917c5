"""The decoder-only family (GPT, Llama): one stack with causal attention."""

from dataclasses import replace

import jax

from jaxformer.arrays.params import Params, Specs
from jaxformer.config.model import ModelConfig
from jaxformer.layers.cache import KVCache
from jaxformer.layers.capture import NOTHING, Request
from jaxformer.layers.embed import added_specs, embed, embedding_specs
from jaxformer.layers.head import head_specs
from jaxformer.layers.output import Output
from jaxformer.layers.sublayer import Call
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import run_stack, stack_mask, stack_specs


def specs(config: ModelConfig) -> Specs:
    """Rows named embed, blocks, final_norm and those of the head."""
    return {
        "embed": embedding_specs(config) | added_specs(config),
        **stack_specs(config, config.n_layers),
        **head_specs(config),
    }


def hidden(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: KVCache | None = None,
    key: jax.Array | None = None,
    request: Request = NOTHING,
    causal: bool = True,
) -> Output:
    """The residual stream before the head [B, T, D], and the cache, if given, with these tokens."""
    embed_key, layers_key = (None, None) if key is None else jax.random.split(key)
    mask, cache = stack_mask(params["blocks"], inputs.layout, cache, causal)
    x = embed(params["embed"], config, replace(inputs, layout=mask.queries), embed_key)
    call = Call(mask, key=layers_key, request=request.within(config.family))
    return run_stack(params, config, x, call, cache)
