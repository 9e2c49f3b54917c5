"""Small models that together use every row of every table, for the laws to run over."""

import functools

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

import jaxformer as jf
from jaxformer.config.settings import with_settings

VOCABULARY, LENGTH = 61, 24
SIZES = dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, d_ff=40, max_length=64)
MODELS = {
    "llama": dict(n_kv_heads=2),
    "gpt2": dict(
        norm="layer",
        positions="learned",
        activation="gelu",
        bias="all",
        tied_head=True,
        n_kv_heads=0,
    ),
    "multi-query, interleaved, post-norm": {
        "n_kv_heads": 1,
        "rope.pairing": "interleaved",
        "norm_placement": "post",
        "activation": "geglu",
    },
    "no norm, no positions": dict(norm="none", positions="none", activation="relu2"),
    "wide heads, silu": dict(
        init="truncated_normal", head_dim=12, activation="silu", norm="layer", norm_placement="post"
    ),
    "relu with biases": dict(activation="relu", bias="all", norm="rms"),
    "tanh gelu, learned": dict(activation="gelu_tanh", positions="learned"),
    "experts": {"feed_forward": "experts", "experts.n": 4, "experts.d_ff": 24, "bias": "all"},
    "experts in groups after a dense layer": {
        "feed_forward": "experts",
        "experts.n": 6,
        "experts.per_token": 3,
        "experts.d_ff": 16,
        "experts.shared_ff": 8,
        "experts.dense_layers": 1,
        "n_layers": 3,
        "experts.router": "sigmoid",
        "experts.router_bias": "balanced",
        "experts.groups": 3,
        "experts.top_groups": 2,
        "experts.scale": 1.5,
    },
}


def model(name: str, **changes) -> jf.ModelConfig:
    return with_settings(jf.ModelConfig(), SIZES | MODELS[name] | changes)


def strong(params, key=1, size=0.15):
    """Params moved well away from their initial values, so that no term is too small to be seen."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(key), len(leaves))
    return jax.tree.unflatten(
        treedef,
        [
            leaf + size * jax.random.normal(k, leaf.shape)
            for leaf, k in zip(leaves, keys, strict=True)
        ],
    )


forward = jax.jit(jf.forward, static_argnums=1)


def tokens(rows=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length), dtype=np.int32)


def weights_and_tokens(name: str, **changes):
    config = model(name, **changes)
    return made(config), config, tokens()


@functools.cache
def made(config: jf.ModelConfig):
    return jax.jit(lambda key: strong(jf.init(config, key)))(jax.random.key(0))


def products_of(jaxpr):
    """The dtypes of the operands of every product in a program."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "narrow_product"):
            found.append({str(operand.aval.dtype) for operand in eqn.invars})
        for inner in jaxprs_in_params(eqn.params):
            found += products_of(inner)
    return found
