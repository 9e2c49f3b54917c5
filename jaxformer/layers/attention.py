"""Grouped-query attention of a sequence to itself or another; multi-head (K = N) and multi-query (K
= 1) are its ends."""

import math
from dataclasses import replace

import jax
from jaxtyping import Array, Float, Int

from jaxformer.config_model import ModelConfig
from jaxformer.layers.capture import NOTHING, Captures, Request
from jaxformer.layers.dot_product import (
    attention_weights,
    dot_product_attention,
    plain,
    weighted_values,
)
from jaxformer.layers.linear import INITIALIZERS, dropout, linear
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.norm import rms_norm, scale_of, scale_spec
from jaxformer.layers.positions import rotate
from jaxformer.params import Params, Spec, Specs, scaled, zeros

__all__ = [
    "attention",
    "attention_specs",
    "cross_attention_specs",
    "dot_product_attention",
    "keys_and_values",
]


def attention_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    d, n, k, h, w = (
        config.d_model,
        config.n_heads,
        config.kv_heads,
        config.head_width,
        config.value_width,
    )
    # Queries start so that scores have the spread of 1/sqrt(H) whatever their scale is (T5's is 1).
    query_init = (
        scaled(make.weight, 1 / (config.attention_scale * math.sqrt(h)))
        if config.attention_scale
        else make.weight
    )
    specs: Specs = {
        "q": Spec((d, n, h), ("embed", "heads", "head_dim"), query_init, inputs=("embed",)),
        "k": Spec((d, k, h), ("embed", "kv_heads", "head_dim"), make.weight, inputs=("embed",)),
        "v": Spec((d, k, w), ("embed", "kv_heads", "head_dim"), make.weight, inputs=("embed",)),
        "out": Spec(
            (n, w, d), ("heads", "head_dim", "embed"), make.residual, inputs=("heads", "head_dim")
        ),
    }
    if "qkv" in config.biased:
        specs["q_bias"] = Spec((n, h), ("heads", "head_dim"), zeros)
        specs |= {
            f"{name}_bias": Spec((k, width), ("kv_heads", "head_dim"), zeros)
            for name, width in (("k", h), ("v", w))
        }
    if "out" in config.biased:
        specs["out_bias"] = Spec((d,), ("residual",), zeros)
    if config.query_key_norm != "none":
        specs |= {
            f"{name}_norm": _query_key_norm_spec(config, heads)
            for name, heads in (("q", n), ("k", k))
        }
    if config.attention_sinks:
        specs["sinks"] = Spec((n,), ("heads",), zeros)
    return specs


def cross_attention_specs(config: ModelConfig) -> Specs:
    """The same rows, of which those of keys and values read the source."""
    specs = attention_specs(config)
    return specs | {name: replace(specs[name], reads="source") for name in ("k", "v")}


def _query_key_norm_spec(config: ModelConfig, heads: int) -> Spec:
    shape = {"head": (config.head_width,), "width": (heads * config.head_width,)}[
        config.query_key_norm
    ]
    return scale_spec(config, shape)


def _normed(params: Params, config: ModelConfig, name: str, x: jax.Array) -> jax.Array:
    """Queries or keys [B, T, N, H] after their norm, over each head or over all heads as one
    (arXiv:2010.04245)."""
    if config.query_key_norm == "none":
        return x
    rows = x if config.query_key_norm == "head" else x.reshape(*x.shape[:2], -1)
    return rms_norm(rows, scale_of(config, params[f"{name}_norm"]), config.norm_eps).reshape(
        x.shape
    )


def keys_and_values(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B S D"],
    positions: Int[Array, "B S"] | None,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]]:
    """What attention looks at: [B, S, D] -> [B, S, K, H], [B, S, K, W]; keys are turned by their
    positions, if given."""
    k = _normed(params, config, "k", linear("BTD,DKH->BTKH", params, "k", x))
    v = linear("BTD,DKH->BTKH", params, "v", x)
    return (k if positions is None else rotate(config, k, positions)), v


def attention(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    seen: tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]],
    mask: AttentionMask,
    key: jax.Array | None = None,
    request: Request = NOTHING,
    name: str = "attention",
) -> tuple[Float[Array, "B T D"], Captures]:
    """Attention to the keys and values in `seen`, as far as `mask` lets it: [B, T, D] -> [B, T, D].

    A key turns dropout on. The second result has the weights [B, N, T, S], before dropout, as
    `name`_weights where the request wants them.
    """
    q = _normed(params, config, "q", linear("BTD,DNH->BTNH", params, "q", x))
    if mask.relative:
        q = rotate(config, q, mask.queries.positions)
    mask = mask._replace(
        scale=config.attention_scale, soft_cap=config.attention_soft_cap, sinks=params.get("sinks")
    )
    weights_name = f"{name}_weights"
    captures: Captures = {}
    if request.wants(weights_name) or (key is not None and config.dropout > 0):
        weights, captures = request.apply(weights_name, attention_weights(q, seen[0], mask))
        out = weighted_values(dropout(weights, config.dropout, key), seen[1])
    elif config.attention_kernel in ("auto", "xla"):
        out = plain(q, *seen, mask)
    else:
        from jaxformer.layers.kernels import (
            attend,
        )  # the fused kernels are imported where one is chosen

        out = attend(config.attention_kernel, q, *seen, mask)
    return linear("BTNH,NHD->BTD", params, "out", out, to=("batch", None, None)), captures
