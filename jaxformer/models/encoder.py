"""The encoder-only family (BERT): one stack in which each token sees both sides."""

import jax

from jaxformer.config_model import ModelConfig
from jaxformer.layers.cache import KVCache
from jaxformer.layers.capture import NOTHING, Request
from jaxformer.layers.embed import embed
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.output import Output
from jaxformer.models.decoder import specs
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import compute_dtype, run_stack
from jaxformer.params import Params

__all__ = ["hidden", "specs"]


def hidden(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: KVCache | None = None,
    key: jax.Array | None = None,
    request: Request = NOTHING,
) -> Output:
    """The residual stream before the head [B, T, D]; a cache means nothing here and is given
    back."""
    embed_key, layers_key = (None, None) if key is None else jax.random.split(key)
    x = embed(
        params["embed"], config, inputs.tokens, inputs.layout, inputs.types, embed_key
    ).astype(compute_dtype(config))
    mask = AttentionMask(inputs.layout, inputs.layout, causal=False)
    out = run_stack(params, config, x, mask, key=layers_key, request=request.within("encoder"))
    return out._replace(cache=cache)
