"""Small models with virtual tokens that matter, for the tests of prompt and prefix tuning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from families import SIZES, params_of

import jaxformer as jf
from jaxformer.config.settings import with_settings

forward = jax.jit(jf.forward, static_argnums=1)
TOKENS = 3
KINDS = {"prompt": jf.PromptTuning(TOKENS), "prefix": jf.PrefixTuning(TOKENS)}
SCORES = {
    "attention.soft_cap": 1.0,
    "attention.sinks": True,
    "attention.value_dim": 6,
    "n_kv_heads": 1,
}
DECODERS = {
    "rope": {},
    "learned": {"positions": "learned", "embedding.position_offset": 2, "bias": "all"},
    "sinusoidal": {"positions": "sinusoidal", "embedding.scale": "sqrt", "embedding.norm": True},
    "alibi": {"positions": "alibi", "norm_placement": "post"},
    "t5": {"positions": "t5"},
    "scores": {"attention.query_key_norm": "head", **SCORES},
    "positions in some layers": {"rope.pattern": "np"},
    "window": {"window": 2, "window_pattern": "wf", "rope.window_theta": 50.0},
}
BOTH = {"family": "encoder_decoder", "attention.max_segments": 4}
MODELS = DECODERS | {
    "encoder-decoder t5": BOTH | {"positions": "t5"},
    "encoder-decoder learned": BOTH
    | {"positions": "learned", "n_encoder_layers": 1}
    | {"embedding.source": "separate"},
}


@functools.cache
def model(name, **changes):
    return with_settings(jf.ModelConfig(), SIZES | MODELS[name] | changes)


@functools.cache
def adapted(name, kind):
    """Params with virtual tokens that matter."""
    config = model(name)
    params = jf.adapt(params_of(config), config, KINDS[kind], jax.random.key(1))
    leaves, tree = jax.tree.flatten(params["virtual"])
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [
        leaf + 0.5 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return params | {"virtual": jax.tree.unflatten(tree, moved)}


def assert_close(found, wanted, tolerance=1e-5):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        scale = max(float(jnp.abs(b).max()), 1e-3)
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)
