"""Grouped-query attention (K = N is multi-head, K = 1 multi-query) to any sequence."""

import math
from dataclasses import replace

import jax
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params, Spec, Specs, scaled, zeros
from jaxformer.config.model import ModelConfig
from jaxformer.layers.capture import NOTHING, Captures, Request
from jaxformer.layers.dot_product import attention_weights, plain, weighted_values
from jaxformer.layers.linear import INITIALIZERS, dropout, linear
from jaxformer.layers.masks import AttentionMask, Scoring, TokenLayout
from jaxformer.layers.norm import rms_norm, scale_of, scale_spec
from jaxformer.layers.positions import rotate


def attention_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    d, n, k = config.d_model, config.n_heads, config.kv_heads
    h, w = config.head_width, config.value_width
    query_init = make.weight
    if config.attention_scale:  # scores keep the variance that they have with 1/sqrt(H); T5's is 1
        query_init = scaled(query_init, 1 / (config.attention_scale * math.sqrt(h)))
    query, key = ("heads", "head_dim"), ("kv_heads", "head_dim")
    specs: Specs = {
        "q": Spec((d, n, h), ("embed", *query), query_init, inputs=("embed",)),
        "k": Spec((d, k, h), ("embed", *key), make.weight, inputs=("embed",)),
        "v": Spec((d, k, w), ("embed", *key), make.weight, inputs=("embed",)),
        "out": Spec((n, w, d), (*query, "embed"), make.residual, inputs=query),
    }
    if "qkv" in config.biased:
        specs["q_bias"] = Spec((n, h), query, zeros)
        specs["k_bias"] = Spec((k, h), key, zeros)
        specs["v_bias"] = Spec((k, w), key, zeros)
    if "out" in config.biased:
        specs["out_bias"] = Spec((d,), ("residual",), zeros)
    if config.query_key_norm != "none":
        whole = config.query_key_norm == "width"
        specs["q_norm"] = scale_spec(config, (n * h if whole else h,))
        specs["k_norm"] = scale_spec(config, (k * h if whole else h,))
    if config.attention_sinks:
        specs["sinks"] = Spec((n,), ("heads",), zeros)
    return specs


def cross_attention_specs(config: ModelConfig) -> Specs:
    """The same rows; keys and values read the source."""
    specs = attention_specs(config)
    return specs | {name: replace(specs[name], reads="source") for name in ("k", "v")}


def _normed(params: Params, config: ModelConfig, name: str, x: jax.Array) -> jax.Array:
    """Queries or keys [B, T, N, H] after their norm, per head or over all (arXiv:2010.04245)."""
    if config.query_key_norm == "none":
        return x
    rows = x if config.query_key_norm == "head" else x.reshape(*x.shape[:2], -1)
    scale = scale_of(config, params[f"{name}_norm"])
    return rms_norm(rows, scale, config.norm_eps).reshape(x.shape)


def keys_and_values(
    params: Params, config: ModelConfig, x: Float[Array, "B S D"], layout: TokenLayout | None
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]]:
    """[B, S, D] -> [B, S, K, H], [B, S, K, W]; RoPE is applied to keys if `layout` is given."""
    k = _normed(params, config, "k", linear("BTD,DKH->BTKH", params, "k", x))
    v = linear("BTD,DKH->BTKH", params, "v", x)
    if layout is not None:
        k = rotate(config, k, layout.positions, layout.segments)
    return k, v


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
    """Attention to the keys and values in `seen` under `mask`: [B, T, D] -> [B, T, D].

    Dropout needs a key. The second result has the weights [B, N, T, S], before dropout, under
    `name`_weights if the request wants them; with a prefix of P virtual tokens, which are seen
    first, [B, N, T, P + S].
    """
    q = _normed(params, config, "q", linear("BTD,DNH->BTNH", params, "q", x))
    if mask.relative:
        q = rotate(config, q, mask.queries.positions, mask.queries.segments)
    if mask.prefix:
        from jaxformer.layers.prefix import with_prefix  # only where there are virtual tokens

        seen = with_prefix(params, seen)
    scale, soft_cap = config.attention_scale, config.attention_soft_cap
    scoring = Scoring(scale, soft_cap, mask.scoring.bias, params.get("sinks"))
    dropped = (config.dropout, key)
    mask = mask._replace(scoring=scoring, max_segments=config.max_segments, dropout=dropped)
    weights_name = f"{name}_weights"
    captures: Captures = {}
    if request.wants(weights_name):
        weights, captures = request.apply(weights_name, attention_weights(q, seen[0], mask))
        out = weighted_values(dropout(weights, *dropped), seen[1])
    elif config.attention_kernel in ("auto", "xla"):
        out = plain(q, *seen, mask)
    else:
        from jaxformer.layers.kernels import attend  # only where a fused kernel is chosen

        out = attend(config.attention_kernel, q, *seen, mask)
    return linear("BTNH,NHD->BTD", params, "out", out, to=("batch", None, None)), captures
