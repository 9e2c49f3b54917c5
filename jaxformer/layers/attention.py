"""Grouped-query attention (K = N is multi-head, K = 1 multi-query), and its two sublayers:
self-attention, and cross-attention to the output of an encoder."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params, Spec, Specs, ones, scaled, zeros
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.layers.biases import (
    disentangled_bias,
    has_layer_bias,
    is_disentangled,
    relative_bias_specs,
    score_bias,
)
from jaxformer.layers.cache import Slots
from jaxformer.layers.dot_product import attention_weights, weighted_values
from jaxformer.layers.exact import exact_attention
from jaxformer.layers.exchange import on_each_device
from jaxformer.layers.kernels import attend
from jaxformer.layers.linear import INITIALIZERS, dropout, linear
from jaxformer.layers.masks import Scoring, TokenLayout
from jaxformer.layers.norm import layer_norm, rms_norm, scale_of, scale_spec
from jaxformer.layers.output import Aux, Captures, Output
from jaxformer.layers.positions import rotate, tempered
from jaxformer.layers.sublayer import Call, Sizes, StoredArray, Sublayer, biased_text


def attention_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    d = config.d_model
    n = config.n_heads
    k = config.kv_heads
    h = config.head_width
    w = config.value_width
    query_init = make.weight
    # Scores keep the variance that they have with the scale 1/sqrt(H); T5's scale is 1.
    if config.attention.scale:
        query_init = scaled(query_init, 1 / (config.attention.scale * math.sqrt(h)))
    query = ("heads", "head_dim")
    key = ("kv_heads", "head_dim")
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
    if config.attention.query_key_norm == "layer":
        specs["q_norm"] = Spec((n, h), query, ones)
        specs["k_norm"] = Spec((k, h), key, ones)
    elif config.attention.query_key_norm == "head":
        specs["q_norm"] = scale_spec(config, (h,))
        specs["k_norm"] = scale_spec(config, (h,))
    elif config.attention.query_key_norm == "width":
        specs["q_norm"] = scale_spec(config, (n * h,))
        specs["k_norm"] = scale_spec(config, (k * h,))
    if config.attention.sinks:
        specs["sinks"] = Spec((n,), ("heads",), zeros)
    if config.attention.output_gate:
        specs["gate"] = Spec((d, n, w), ("embed", *query), make.weight, inputs=("embed",))
        if "qkv" in config.biased:
            specs["gate_bias"] = Spec((n, w), query, zeros)
    return specs


def self_attention_specs(config: ModelConfig) -> Specs:
    """Return the rows of `attention_specs`, and the layer's table of relative positions if it has
    one."""
    table = relative_bias_specs(config) if has_layer_bias(config) else {}
    return attention_specs(config) | table


def cross_attention_specs(config: ModelConfig) -> Specs:
    """Return the rows of `attention_specs`, with keys and values that read the source."""
    specs = attention_specs(config)
    return specs | {name: replace(specs[name], reads="source") for name in ("k", "v")}


def _normed(params: Params, config: ModelConfig, name: str, x: jax.Array) -> jax.Array:
    """Return queries or keys [B, T, N, H] after their norm, per head or over the width N H of all
    heads (arXiv:2010.04245)."""
    if config.attention.query_key_norm == "none":
        return x
    if config.attention.query_key_norm == "layer":
        return layer_norm(x, params[f"{name}_norm"], eps=config.norm_eps)
    # [B, T, N, H], or [B, T, N H].
    rows = x if config.attention.query_key_norm == "head" else x.reshape(*x.shape[:2], -1)
    scale = scale_of(config, params[f"{name}_norm"])
    return rms_norm(rows, scale, config.norm_eps).reshape(x.shape)


def keys_and_values(
    params: Params, config: ModelConfig, x: Float[Array, "B S D"], layout: TokenLayout | None
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]]:
    """Map [B, S, D] -> [B, S, K, H], [B, S, K, W]; RoPE is applied to keys if `layout` is given."""
    k = _normed(params, config, "k", linear("BTD,DKH->BTKH", params, "k", x))
    v = linear("BTD,DKH->BTKH", params, "v", x)
    if layout is not None:
        k = rotate(config, k, layout.positions, layout.segments)
    return k, v


def attention(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    keys_values: tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]],
    call: Call,
    name: str = "attention",
) -> tuple[Float[Array, "B T D"], Captures]:
    """Attend to the keys and values in `keys_values` under the mask of the call: [B, T, D] -> [B,
    T, D].

    The second result has the weights before dropout, [B, N, T, S], under `name`_weights if the
    request wants them. With P leading keys they are [B, N, T, P + S].
    """
    mask = call.mask
    q = _normed(params, config, "q", linear("BTD,DNH->BTNH", params, "q", x))
    # Between two sequences there are no distances, and nothing is rotated.
    if mask.relative:
        q = rotate(config, q, mask.queries.positions, mask.queries.segments)
        q = tempered(config, q, mask.queries.positions)
    if mask.leading:
        # Joined behind norms and rotations: a prefix is used as it is, and the keys of a prompt
        # were rotated when they were computed.
        k, v = keys_values
        keys_values = _with_leading(params["prefix_k"], k), _with_leading(params["prefix_v"], v)
    relative_rows = mask.scoring.relative_rows
    if mask.relative and relative_rows is not None:
        # Queries and keys that the layer makes of the rows of relative positions [1, R, D].
        # [1, R, N, H] and [1, R, K, H], by the matrices of the content, as in DeBERTa-v2 and v3.
        rows_q = linear("BTD,DNH->BTNH", params, "q", relative_rows)
        rows_k = linear("BTD,DNH->BTNH", params, "k", relative_rows)
        rows = (_normed(params, config, "q", rows_q), _normed(params, config, "k", rows_k))
        bias = disentangled_bias(config, (q, keys_values[0]), rows, mask)
        call = call._replace(mask=mask._replace(scoring=mask.scoring._replace(bias=bias)))
    out, captures = attended(params, config, q, keys_values, call, name)
    if config.attention.output_gate:
        gate = linear("BTD,DNH->BTNH", params, "gate", x)
        out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    return linear("BTNH,NHD->BTD", params, "out", out, to=("batch", "sequence", None)), captures


def attended(
    params: Params,
    config: ModelConfig,
    q: Float[Array, "B T N H"],
    keys_values: tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]],
    call: Call,
    name: str = "attention",
) -> tuple[Float[Array, "B T N W"], Captures]:
    """Apply `attention` between its projections: queries [B, T, N, H] -> [B, T, N, W]."""
    mask = call.mask
    scale = config.score_scale
    soft_cap = config.attention.soft_cap
    scoring = Scoring(scale, soft_cap, mask.scoring.bias, params.get("sinks"))
    dropped = (config.attention_dropout_rate, call.key)
    mask = mask._replace(
        scoring=scoring, max_segments=config.attention.max_segments, dropout=dropped
    )
    weights_name = f"{name}_weights"
    captures: Captures = {}
    # Weights have to be made where they are asked for: 4 bytes for each pair of tokens and head.
    if call.request.wants(weights_name):
        weights = attention_weights(q, keys_values[0], mask)
        weights, captures = call.request.apply(weights_name, weights)
        out = weighted_values(dropout(weights, *dropped), keys_values[1])
    elif config.exact and (call.key is None or not config.attention_dropout_rate):
        out = on_each_device(exact_attention, q, *keys_values, mask)
    else:
        out = attend(config.attention.kernel, q, *keys_values, mask)
    return out, captures


def _with_leading(leading: jax.Array, x: jax.Array) -> jax.Array:
    """Join keys [P, K, H] and [B, S, K, H] -> [B, P + S, K, H], the leading ones first in each
    row, and values likewise."""
    rows = jnp.broadcast_to(leading.astype(x.dtype), (x.shape[0], *leading.shape))
    rows = constrain(rows, ("batch", "sequence", "kv_heads", None))
    return jnp.concatenate([rows, x], axis=1)


def self_attention(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    """Let each token attend to its own sequence, and with a cache also to the tokens in the
    cache."""
    cache = call.cache
    keys_values = keys_and_values(params, config, x, call.mask.queries)
    if cache is not None:
        cache, keys_values = cache.write(keys_values)
    scoring = call.mask.scoring
    if "relative_bias" in params:
        bias = score_bias(params["relative_bias"], config, call.mask)
        scoring = scoring._replace(bias=bias)
    call = call._replace(mask=call.mask._replace(window=config.window, scoring=scoring))
    out, weights = attention(params, config, x, keys_values, call)
    return Output(out, cache, Aux(captures=weights))


def cross_attention(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    """Let each token attend to the encoder's output. A cache has its keys and values from the first
    call on."""
    # A layer with these parameters always has a source.
    assert call.source is not None
    cache = call.cache
    if call.source.x is not None:
        keys_values = keys_and_values(params, config, call.source.x, None)
        cache = None if cache is None else cache._replace(source=keys_values)
    else:
        assert cache is not None and cache.source is not None
        keys_values = cache.source
    call = call._replace(mask=call.source.mask)
    out, weights = attention(params, config, x, keys_values, call, "cross")
    return Output(out, cache, Aux(captures=weights))


def start_keys_and_values(
    config: ModelConfig, batch: int, slots: int, dtype: DTypeLike
) -> tuple[Slots, Slots]:
    """Return what attention keeps: the keys [B, S, K, H] and values [B, S, K, W] of all key
    heads."""
    keys = Slots.empty(batch, slots, config.kv_heads, config.head_width, dtype)
    return keys, Slots.empty(batch, slots, config.kv_heads, config.value_width, dtype)


def score_flops(config: ModelConfig, keys: int | float) -> int | float:
    """Return FLOPs per token of q k^T and of the product of the weights with the values."""
    return 2 * config.n_heads * (config.head_width + config.value_width) * keys


def _self_score_flops(config: ModelConfig, keys: int | float) -> int | float:
    """Return `score_flops`, and those of queries and keys with the rows of disentangled
    positions."""
    # All R rows: a query is multiplied by the keys of all, and a key by the queries of all.
    rows = 2 * config.relative.buckets if is_disentangled(config) else 0
    return score_flops(config, keys) + 2 * config.n_heads * 2 * config.head_width * rows


def _stored(config: ModelConfig, sizes: Sizes) -> list[StoredArray]:
    """Return the arrays that the backward pass of attention reads, in bytes on one device."""
    heads = sizes.share(config.n_heads)
    # Of all heads the keys of a device, or of some heads all keys, which takes as much.
    kv_heads = sizes.key_heads(config.n_heads, config.kv_heads) / sizes.context
    width = sizes.padded(config.head_width)
    value_width = sizes.padded(config.value_width)
    # cuDNN reads and makes values as wide as keys.
    value_width = max(width, value_width) if config.attention.kernel == "cudnn" else value_width
    q = sizes.tokens * heads * width * sizes.number
    k = sizes.rows * sizes.keys * kv_heads * width * sizes.number
    v = sizes.rows * sizes.keys * kv_heads * value_width * sizes.number
    out = sizes.tokens * heads * value_width * sizes.number
    arrays = [StoredArray("q", q), StoredArray("k", k), StoredArray("v", v)]
    if config.attention.output_gate:
        # And the output before it.
        arrays += [StoredArray("gate", out), StoredArray("gated", out)]
    if config.attention.query_key_norm != "none" or config.positions == "rope":
        # After the norm or RoPE, beside the products of the matrices.
        arrays += [StoredArray("changed q", q), StoredArray("changed k", k)]
    if sizes.exchange == "gather":
        # The keys and values of all tokens, `context` times those of one device.
        arrays += [StoredArray("gathered", sizes.context * (k + v))]
    if config.attention.kernel == "xla":
        # The weights in float32, and those cast to the compute dtype for the product with the
        # values if that is another dtype; with dropout also a mask of one byte, and the dropped
        # weights.
        dropped = 1 + sizes.number if config.attention_dropout_rate else 0
        scores = sizes.tokens * heads * sizes.keys
        weights = scores * (4 + sizes.number % 4 + dropped)
        return [*arrays, StoredArray("weights", weights), StoredArray("attended", out)]
    # cuDNN has a log-sum-exp for each segment that a row may have.
    sums = max(config.attention.max_segments, 1) if config.attention.kernel == "cudnn" else 1
    log_sums = sizes.tokens * heads * 4 * sums
    return [*arrays, StoredArray("attention", out), StoredArray("attention", log_sums)]


def _projections(config: ModelConfig, read: str, rotated: bool) -> str:
    """Return the formulas of queries, and of keys and values, which read the rows named `read`."""
    queries = f"x W_Q{biased_text(config, 'qkv', 'b_Q')}"
    keys = f"{read} W_K{biased_text(config, 'qkv', 'b_K')}"
    values = f"{read} W_V{biased_text(config, 'qkv', 'b_V')}"
    if config.attention.query_key_norm != "none":
        queries = f"norm({queries})"
        keys = f"norm({keys})"
    if rotated and config.positions == "rope":
        queries = f"RoPE({queries})"
        keys = f"RoPE({keys})"
    if rotated and config.attention.temperature:
        length = config.original_length
        slope = config.attention.temperature
        queries += f" · (1 + {slope:g} ln(1 + ⌊position / {length}⌋))"
    return f"Q = {queries},  K = {keys},  V = {values}"


SCORE_BIASES = {
    "alibi": " - slope · distance",
    "t5": " + bias[distance]",
    "disentangled": " + (Q K_r[distance] + K Q_r[distance]) · the same factor",
}


def weights_text(config: ModelConfig, score_bias: str) -> str:
    """Return the formula of the attention weights A."""
    scale = f"· {config.score_scale:g}" if config.score_scale else "/ √H"
    scores = f"Q Kᵀ {scale}"
    if config.attention.soft_cap:
        cap = f"{config.attention.soft_cap:g}"
        scores = f"{cap} tanh(({scores}) / {cap})"
    sinks = ", with a learned logit beside the keys" if config.attention.sinks else ""
    return f"A = softmax({scores}{score_bias} + mask){sinks}"


def _out_text(config: ModelConfig) -> str:
    gate = ""
    if config.attention.output_gate:
        gate = f" · sigmoid(x W_G{biased_text(config, 'qkv', 'b_G')})"
    return f"A V{gate} W_O{biased_text(config, 'out', 'b_O')}"


def _self_formula(config: ModelConfig) -> tuple[str, ...]:
    weights = weights_text(config, SCORE_BIASES.get(config.positions, ""))
    out = f"attention = {_out_text(config)}"
    return _projections(config, "x", rotated=True), weights, out


def _cross_formula(config: ModelConfig) -> tuple[str, ...]:
    projections = f"{_projections(config, 'm', rotated=False)},  m = encoder output"
    out = f"cross = {_out_text(config)}"
    return projections, weights_text(config, ""), out


SELF_ATTENTION = Sublayer(
    specs=self_attention_specs,
    apply=self_attention,
    product="out",
    stored=_stored,
    gradients=("q", "k", "v", "gate", "gathered", "attention", "attended", "weights"),
    formula=_self_formula,
    scores=_self_score_flops,
    start=start_keys_and_values,
    draws=True,
    capture="attention_out",
)
CROSS_ATTENTION = SELF_ATTENTION._replace(
    specs=cross_attention_specs,
    apply=cross_attention,
    formula=_cross_formula,
    scores=score_flops,
    reads_source=True,
    capture="cross_out",
)
