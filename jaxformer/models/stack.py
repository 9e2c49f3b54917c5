"""A stack: blocks one after the other under one rule of who sees whom, and the norm behind them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.config import ModelConfig
from jaxformer.layers.block import Source, block, block_specs
from jaxformer.layers.cache import KVCache, Page
from jaxformer.layers.masks import FAR, View
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.positions import relative_bias_specs, score_bias
from jaxformer.layers.probe import SILENT, Probe
from jaxformer.params import Params, Specs, stack, unstack

REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def compute_dtype(config: ModelConfig) -> Any:
    """The dtype of the products: `model.dtype`, where "auto" is bfloat16 on GPU and TPU and float32 on CPU."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def stack_specs(config: ModelConfig, layers: int, cross: bool = False) -> Specs:
    """Rows named blocks (stacked by layer), relative_bias and final_norm, those that the config has."""
    final = norm_specs(config) if config.norm_placement != "post" else {}
    table = {"blocks": stack(block_specs(config, cross), layers), **relative_bias_specs(config), "final_norm": final}
    return {name: rows for name, rows in table.items() if rows}


def run_stack(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    view: View,
    *,
    cache: KVCache | None = None,
    source: Source | None = None,
    key: jax.Array | None = None,
    probe: Probe = SILENT,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """[B, T, D] -> [B, T, D], and the cache with these tokens in it where one, advanced to them, is given."""
    bias = score_bias(params.get("relative_bias"), config, view.queries, view.keys, view.causal)
    view = view._replace(bias=bias)
    if cache is not None:
        x, cache = _with_cache(params["blocks"], config, x, view, cache, source)
    elif config.layer_loop == "scan" and not probe:
        x = _scanned(params["blocks"], config, x, view, source, key)
    else:
        x = _unrolled(params["blocks"], config, x, view, source, key, probe)
    if config.norm_placement != "post":
        x = norm(params.get("final_norm", {}), config, x)
    return x, cache


def windows(config: ModelConfig, layers: int) -> list[int]:
    """The window of each layer, 0 where it sees all."""
    pattern = config.window_pattern
    return [config.window if pattern[i % len(pattern)] == "w" else 0 for i in range(layers)]


def layers_of(blocks: Params | list[Params]) -> list[Params]:
    """The params of each layer; a list is what they are already."""
    return blocks if isinstance(blocks, list) else unstack(blocks, jax.tree.leaves(blocks)[0].shape[0])


def _with_cache(
    blocks: Params | list[Params], config: ModelConfig, x: jax.Array, view: View, cache: KVCache, source: Source | None
) -> tuple[jax.Array, KVCache]:
    pages: list[Page] = []
    layers = layers_of(blocks)
    for i, (layer, window) in enumerate(zip(layers, windows(config, len(layers)), strict=True)):
        x, page = block(layer, config, x, view._replace(window=window), cache.page(i, view.queries), source)
        pages.append(page)  # type: ignore[arg-type]
    return x, cache.with_pages(pages)


def _recomputed(config: ModelConfig, view: View, source: Source | None, probe: Probe = SILENT) -> Any:
    """A layer as a function of (x, params, key), with what the backward pass recomputes said."""

    def run(x: jax.Array, layer: Params, key: jax.Array | None) -> jax.Array:
        return block(layer, config, x, view, source=source, key=key, probe=probe)[0]

    return run if config.remat == "none" or probe else jax.checkpoint(run, policy=REMAT[config.remat])


def _unrolled(
    blocks: Params,
    config: ModelConfig,
    x: jax.Array,
    view: View,
    source: Source | None,
    key: jax.Array | None,
    probe: Probe,
) -> jax.Array:
    layers = layers_of(blocks)
    for i, (layer, window) in enumerate(zip(layers, windows(config, len(layers)), strict=True)):
        run = _recomputed(config, view._replace(window=window), source, probe.within(str(i)))
        x = run(x, layer, None if key is None else jax.random.fold_in(key, i))
    return x


def _scanned(
    blocks: Params, config: ModelConfig, x: jax.Array, view: View, source: Source | None, key: jax.Array | None
) -> jax.Array:
    depth = jax.tree.leaves(blocks)[0].shape[0]
    each = windows(config, depth)
    alike = len(set(each)) == 1

    def body(x: jax.Array, item: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        layer, i, window = item
        run = _recomputed(config, view._replace(window=each[0] if alike else window), source)
        return run(x, layer, None if key is None else jax.random.fold_in(key, i)), None

    return jax.lax.scan(body, x, (blocks, jnp.arange(depth), jnp.array([window or FAR for window in each])))[0]
