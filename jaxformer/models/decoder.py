"""The decoder-only family: embedding, blocks, final norm, output layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.layers.block import block, block_specs
from jaxformer.layers.cache import KVCache, Page
from jaxformer.layers.embed import Tokens, embed, embed_specs, head, head_specs
from jaxformer.layers.masks import Places, places_of
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.params import Params, Specs, init_params, stack, unstack

REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def specs(config: ModelConfig) -> Specs:
    """The table of parameters: embed, blocks (stacked by layer), final_norm, head."""
    if not config.vocab_size:
        raise ConfigError(
            "model.vocab_size=0 takes the tokenizer's size, and there is no tokenizer here: give the number of tokens."
        )
    table = {
        "embed": embed_specs(config),
        "blocks": stack(block_specs(config), config.n_layers),
        "final_norm": norm_specs(config) if config.norm_placement == "pre" else {},
        "head": head_specs(config),
    }
    return {name: rows for name, rows in table.items() if rows}


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Initial parameters: a nested dict of float32 arrays, those of the blocks stacked by a leading layer axis."""
    return init_params(specs(config), key)


def compute_dtype(config: ModelConfig) -> Any:
    """The dtype of the products: `model.dtype`, where "auto" is bfloat16 on GPU and TPU and float32 on CPU."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    *,
    segment_ids: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of the next token: tokens [B, T] int -> [B, T, V] float32.

    `segment_ids` [B, T] int: tokens attend only within their own number, 0 is padding. `positions` [B, T] int default to
    counting from the start of each segment. A pure function: jit (with `static_argnums=1`), grad, jvp, vmap and the rest
    apply to it.
    """
    if tokens.ndim != 2 or (config.positions == "learned" and positions is None and tokens.shape[1] > config.max_length):
        raise ConfigError(
            f"tokens of shape {list(tokens.shape)} must be [batch, length], and with learned positions no longer than "
            f"model.max_length={config.max_length}: cut them, or make the model with a larger table."
        )
    row, place, segment = (None if a is None else jnp.asarray(a) for a in (tokens, positions, segment_ids))
    x, _ = hidden(params, config, row, places_of(row, place, segment))  # type: ignore[arg-type]
    return head(params, config, x)


def hidden(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    places: Places,
    cache: KVCache | None = None,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """The residual stream before the output layer [B, T, D], and the cache with these tokens in it where one is given."""
    keys = (None, None) if key is None else jax.random.split(key)
    x = embed(params["embed"], config, tokens, places, compute_dtype(config), keys[0])
    if cache is not None:
        cache = cache.advance(places)
        x, cache = _with_cache(params, config, x, places, cache)
    else:
        loop = _scanned if config.layer_loop == "scan" else _unrolled
        x = loop(params["blocks"], config, x, places, keys[1])
    if config.norm_placement == "pre":
        x = norm(params.get("final_norm", {}), config, x)
    return x, cache


def _with_cache(
    params: Params, config: ModelConfig, x: jax.Array, places: Places, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    pages: list[Page] = []
    blocks = params["blocks"]
    for i, layer in enumerate(blocks if isinstance(blocks, list) else unstack(blocks, config.n_layers)):
        x, page = block(layer, config, x, places, cache.page(i, places))
        pages.append(page)  # type: ignore[arg-type]
    return x, cache.with_pages(pages)


def _layer(config: ModelConfig, places: Places, x: jax.Array, layer: Params, key: jax.Array | None) -> jax.Array:
    return block(layer, config, x, places, key=key)[0]


def _recomputed(config: ModelConfig, places: Places) -> Any:
    run = functools.partial(_layer, config, places)
    return run if config.remat == "none" else jax.checkpoint(run, policy=REMAT[config.remat])


def _unrolled(blocks: Params, config: ModelConfig, x: jax.Array, places: Places, key: jax.Array | None) -> jax.Array:
    run = _recomputed(config, places)
    for i, layer in enumerate(unstack(blocks, config.n_layers)):
        x = run(x, layer, None if key is None else jax.random.fold_in(key, i))
    return x


def _scanned(blocks: Params, config: ModelConfig, x: jax.Array, places: Places, key: jax.Array | None) -> jax.Array:
    run = _recomputed(config, places)

    def body(x: jax.Array, item: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
        layer, i = item
        return run(x, layer, None if key is None else jax.random.fold_in(key, i)), None

    return jax.lax.scan(body, x, (blocks, jnp.arange(config.n_layers)))[0]
