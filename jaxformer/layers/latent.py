"""Multi-head latent attention (arXiv:2405.04434, 2412.19437), a mixer: the keys and values of all
heads are products of one latent of each token, beside a rotated key that all heads share.

    c   = norm(x W_C)               [B, S, C]   the latent, C = latent.kv_rank
    k_r = RoPE(x W_R)               [B, S, R]   one key for all heads, R = latent.rope_head_dim
    k_n = (c W_K)_n with k_r        [B, S, H]   of head n: H - R dimensions of its own, then k_r
    v_n = (c W_V)_n                 [B, S, W]
    q_n = (norm(x W_D) W_Q)_n       [B, T, H]   the last R rotated, rank latent.query_rank

The cache has c and k_r alone. Of a few queries the weights are absorbed: q_n W_K^T, of width C, is
multiplied with latents instead of keys, and the weighted sum of latents with W_V.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params, Spec, Specs, contract, scaled, zeros
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.layers.attention import SCORE_BIASES, SELF_ATTENTION, attended, weights_text
from jaxformer.layers.cache import Slots
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import rms_norm, scale_of, scale_spec
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.positions import rotate
from jaxformer.layers.sublayer import Call, Sizes, StoredArray, biased_text

# That of the norms of latents in DeepSeek's models, whatever model.norm_eps is.
LATENT_EPS = 1e-6
POINT = "latent"  # of the products that make latents and the shared key
RESIDUAL_AXES = ("batch", "sequence", None)


def latent_specs(config: ModelConfig) -> Specs:
    """Return the rows q_down, q_down_norm (with a query rank), q, kv_down, kv_down_norm, k_rope, k,
    v, out and biases of the products with x and of the last one, as Hugging Face has them.

    The axis of a latent that a product contracts is named "embed", so that a mesh divides it.
    """
    make = INITIALIZERS[config.init](config)
    d = config.d_model
    n = config.n_heads
    h = config.head_width
    w = config.value_width
    rank = config.latent.kv_rank
    shared = config.latent.rope_head_dim
    query_init = make.weight
    # As in attention.
    if config.attention.scale:
        query_init = scaled(query_init, 1 / (config.attention.scale * h**0.5))
    per_head = ("embed", "heads", "head_dim")
    into = ("embed",)

    def down(width: int) -> Spec:
        return Spec((d, width), ("embed", "latent"), make.weight, inputs=into)

    specs: Specs = {}
    if config.latent.query_rank:
        specs["q_down"] = down(config.latent.query_rank)
        specs["q_down_norm"] = scale_spec(config, (config.latent.query_rank,))
    specs |= {
        "q": Spec((config.latent.query_rank or d, n, h), per_head, query_init, inputs=into),
        "kv_down": down(rank),
        "kv_down_norm": scale_spec(config, (rank,)),
        "k_rope": down(shared),
        "k": Spec((rank, n, h - shared), per_head, make.weight, inputs=into),
        "v": Spec((rank, n, w), per_head, make.weight, inputs=into),
        "out": Spec((n, w, d), (*per_head[1:], "embed"), make.residual, inputs=per_head[1:]),
    }
    if "qkv" in config.biased:
        for name in ("q_down", "kv_down", "k_rope"):
            if name in specs:
                specs[f"{name}_bias"] = Spec(specs[name].shape[1:], ("latent",), zeros)
    if "out" in config.biased:
        specs["out_bias"] = Spec((d,), ("residual",), zeros)
    if config.attention.sinks:
        specs["sinks"] = Spec((n,), ("heads",), zeros)
    return specs


def _normed_latent(params: Params, config: ModelConfig, name: str, x: jax.Array) -> jax.Array:
    """Return the product of x [B, T, D] with the weight of this name, after its norm: [B, T, C]."""
    latent = linear("BTD,DC->BTC", params, name, x, to=RESIDUAL_AXES, point=POINT)
    return rms_norm(latent, scale_of(config, params[f"{name}_norm"]), LATENT_EPS)


def latent_queries(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B T N H"]:
    """Return the queries of all heads, of which the last R dimensions are rotated."""
    read = _normed_latent(params, config, "q_down", x) if config.latent.query_rank else x
    q = linear("BTD,DNH->BTNH", params, "q", read)
    # [B, T, N, H - R] without positions, and [B, T, N, R].
    q, rotated = jnp.split(q, [config.head_width - config.latent.rope_head_dim], axis=-1)
    rotated = rotate(config, rotated, layout.positions, layout.segments)
    return jnp.concatenate([q, rotated], axis=-1)


def latents(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], layout: TokenLayout
) -> Float[Array, "B T 1 C+R"]:
    """Return what the cache has of each token: its normed latent, and the rotated key of all
    heads."""
    latent = _normed_latent(params, config, "kv_down", x)
    key = linear("BTD,DH->BTH", params, "k_rope", x, to=RESIDUAL_AXES, point=POINT)
    key = rotate(config, key[:, :, None], layout.positions, layout.segments)
    # C + R numbers of a token, where keys and values of all heads are N (H + W).
    return jnp.concatenate([latent[:, :, None], key], axis=-1)


def expanded(
    params: Params, config: ModelConfig, tokens: Float[Array, "B S 1 C+R"]
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N W"]]:
    """Return the keys and values of all heads, from the `latents` of tokens."""
    # [B, S, 1, C] and [B, S, 1, R].
    latent, shared = jnp.split(tokens, [config.latent.kv_rank], axis=-1)
    k = linear("BTC,CNH->BTNH", params, "k", latent[:, :, 0])
    v = linear("BTC,CNH->BTNH", params, "v", latent[:, :, 0])
    shared = jnp.broadcast_to(shared, (*k.shape[:-1], config.latent.rope_head_dim))
    shared = constrain(shared, ("batch", "sequence", "heads", None))
    return jnp.concatenate([k, shared], axis=-1), v


def absorbs(config: ModelConfig, queries: int, keys: int) -> bool:
    """Return whether so many queries attend to so many keys with fewer multiplications of a head
    where the weights of keys and values are absorbed than where latents are expanded."""
    rank = config.latent.kv_rank
    width = config.head_width
    value_width = config.value_width
    # Multiplications that make the key and the value of one token from its latent.
    expansion = rank * (width - config.latent.rope_head_dim + value_width)
    # Scores of width C + R and sums of width C for a pair; both matrices once for each query.
    absorbed = queries * (keys * (2 * rank + config.latent.rope_head_dim) + expansion)
    # Scores of width H and sums of width W for a pair; both matrices once for each key.
    return absorbed < queries * keys * (width + value_width) + keys * expansion


def latent_attention(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    """Let each token attend to its own sequence, and with a cache also to the tokens in the
    cache."""
    layout = call.mask.queries
    cache = call.cache
    q = latent_queries(params, config, x, layout)
    tokens = latents(params, config, x, layout)
    if cache is not None:
        cache, tokens = cache.write(tokens)
    # The scale of the heads also where queries are of latents, and so of another width.
    scale = config.score_scale or config.head_width**-0.5
    # In the standard parametrization `score_scale` is this scale, and muP does not change it again.
    config = with_settings(
        config, {"attention.scale": scale, "parametrization": "standard", "mup_base": ""}
    )
    call = call._replace(mask=call.mask._replace(window=config.window))
    # Absorbed weights give other sums.
    absorbed_here = not config.exact and absorbs(config, q.shape[1], tokens.shape[1])
    if cache is not None and absorbed_here:
        # Queries of latents [B, T, N, C + R], from those of keys [B, T, N, H].
        q, rotated = jnp.split(q, [config.head_width - config.latent.rope_head_dim], axis=-1)
        absorbed = contract("BTNH,CNH->BTNC", q, params["k"])
        q = jnp.concatenate([absorbed, rotated], axis=-1)
        # One key head and one value head, [B, S, 1, C + R] and [B, S, 1, C], for all N queries.
        keys_values = tokens, tokens[..., : config.latent.kv_rank]
        out, captures = attended(params, config, q, keys_values, call)  # [B, T, N, C]
        out = contract("BTNC,CNH->BTNH", out, params["v"])  # [B, T, N, W]
    else:
        keys_values = expanded(params, config, tokens)
        out, captures = attended(params, config, q, keys_values, call)
    out = linear("BTNH,NHD->BTD", params, "out", out, to=RESIDUAL_AXES)
    return Output(out, cache, Aux(captures=captures))


def _stored(config: ModelConfig, sizes: Sizes) -> list[StoredArray]:
    """Return the arrays of attention, and latents before and after their norms with the shared
    key."""
    width = config.latent.query_rank + config.latent.kv_rank
    arrays = [
        StoredArray(POINT, sizes.tokens * (width + config.latent.rope_head_dim) * sizes.number),
        StoredArray("normed latent", sizes.tokens * width * sizes.number),
    ]
    return arrays + SELF_ATTENTION.stored(config, sizes)


def _formula(config: ModelConfig) -> tuple[str, ...]:
    bias = "qkv" in config.biased
    latent = f"norm(x W_C{' + b_C' * bias})"
    queries = f"norm(x W_D{' + b_D' * bias})" if config.latent.query_rank else "x"
    rotated = "RoPE" if config.positions == "rope" else ""
    shared = f"{rotated}(x W_R{' + b_R' * bias})"
    last = f", last {config.latent.rope_head_dim} of each head in RoPE" if rotated else ""
    return (
        f"C = {latent},  R = {shared},  Q = {queries} W_Q{last}",
        "K = [C W_K, R] with R in every head,  V = C W_V",
        weights_text(config, SCORE_BIASES.get(config.positions, "")),
        f"latent = A V W_O{biased_text(config, 'out', 'b_O')}",
    )


LATENT_ATTENTION = SELF_ATTENTION._replace(
    specs=latent_specs,
    apply=latent_attention,
    stored=_stored,
    formula=_formula,
    # Keys and values are products of the latents.
    start=lambda config, batch, slots, dtype: Slots.empty(
        batch, slots, 1, config.latent.kv_rank + config.latent.rope_head_dim, dtype
    ),
)
