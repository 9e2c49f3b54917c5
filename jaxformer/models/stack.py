"""A stack: blocks in sequence under one attention mask, and the final norm.

The parameters of the blocks are one tree of stacked leaves [L, ...]. If the tables of the layers
differ by a pattern (`layers/pattern.py`), there is one such tree for each of the layers before the
pattern and for each of its P positions, named "0", "1", ...: after a lead of K layers, layer K + i
is entry i // P of the tree K + i % P. With model.layer_groups the leaves are [G, ...], and layer i
reads entry i // (L / G).
"""

import functools
import math
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.exact import rounded
from jaxformer.arrays.params import Params, Specs, is_custom, map_specs, rows, stack, unstack
from jaxformer.arrays.sharding import platform
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.biases import has_layer_bias, stack_bias_specs, stack_scoring
from jaxformer.layers.block import MIXERS, block, block_specs
from jaxformer.layers.cache import Cache
from jaxformer.layers.exchange import balanced, in_order
from jaxformer.layers.kernels import reads_balanced
from jaxformer.layers.masks import AttentionMask, TokenLayout
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.output import Aux, Output, merged
from jaxformer.layers.pattern import layer_configs, repetition_of
from jaxformer.layers.sublayer import Call
from jaxformer.models.remat import recomputed

# The most layers that auto unrolls on a platform; any number where it has no entry. Compiled for an
# H100, the step of llama_1b has a bound of 159 ms unrolled and 176 scanned, since a scan copies its
# stacks (234 and 286 GiB of traffic). For a TPU the compiler takes minutes for unrolled layers.
MOST_UNROLLED = {"gpu": 40, "tpu": 0}


def compute_dtype(config: ModelConfig, on: str = "") -> Any:
    """Return the dtype of the products: `model.dtype`, or with "auto" float32 on CPU, else
    bfloat16. `on` is the platform if not that of the mesh in force."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if (on or platform()) == "cpu":
        return jnp.dtype("float32")
    return jnp.dtype("bfloat16")


def layer_loop_of(config: ModelConfig, on: str = "") -> Literal["unroll", "scan"]:
    """Return `model.layer_loop`, "auto" resolved: by the deeper stack of an encoder-decoder, and by
    the platform `on` if that is not the one of the mesh in force."""
    if config.layer_loop != "auto":
        return config.layer_loop
    depth = max(config.n_layers, config.encoder_layers)
    device = on or platform()
    if config.feed_forward == "experts" and device == "gpu":
        # Unrolled, XLA computes the rows of all layers again before the first backward pass needs
        # them: four layers of olmoe_1b_7b on 8 H100s with mesh.expert 8 take 36 GiB instead of 24.
        return "scan"
    if depth > MOST_UNROLLED.get(device, math.inf):
        return "scan"
    return "unroll"


def stack_specs(config: ModelConfig, layers: int, cross: bool = False) -> Specs:
    """Return rows named blocks (stacked by layer), and relative_bias and final_norm if there are
    any."""
    configs = layer_configs(config, layers)
    lead, period = repetition_of(configs)
    tables = [block_specs(layer_config, cross) for layer_config in configs[: lead + period]]
    if all(_shapes(table) == _shapes(tables[0]) for table in tables):
        blocks = stack(tables[0], config.layer_groups or layers)
        if config.layers_in_group > 1:
            # A token is multiplied by the parameters of a group once for each of its layers.
            uses = config.layers_in_group
            blocks = map_specs(lambda _, spec: replace(spec, active=spec.active * uses), blocks)
    elif config.layer_groups:
        raise ConfigError(
            f"model.layer_groups={config.layer_groups}: layers share their parameters only if all"
            " have the same ones, and here a pattern or first layers differ: set it to 0."
        )
    else:
        counts = [1] * lead + [len(configs[lead + p :: period]) for p in range(period)]
        stacked = zip(tables, counts, strict=True)
        blocks = {str(p): stack(table, count) for p, (table, count) in enumerate(stacked)}
    table = {"blocks": blocks} | stack_bias_specs(config)
    if config.norm_placement != "post":
        table["final_norm"] = norm_specs(config)
    return {name: rows for name, rows in table.items() if rows}


def _shapes(table: Specs) -> dict[str, Any]:
    return {path: (spec.shape, spec.axes) for path, spec in rows(table).items()}


def stacks_of(blocks: Params) -> list[Params]:
    """Return the stacked trees of the leading layers and of the pattern's positions; one where all
    layers have equal tables."""
    if "0" not in blocks:
        return [blocks]
    return [blocks[str(p)] for p in range(len(blocks))]


def layer_order(counts: list[int]) -> list[tuple[int, int]]:
    """Return for each layer the number of its stacked tree and its index there, from the numbers of
    layers of the trees. The trees of one layer before a longer one are the lead; the others take
    turns."""
    depth = sum(counts)
    lead = next((p for p, count in enumerate(counts) if count > 1), 0)
    period = len(counts) - lead
    turns = [(lead + i % period, i // period) for i in range(depth - lead)]
    return [(p, 0) for p in range(lead)] + turns


def layers_of(blocks: Params | list[Params]) -> list[Params]:
    """Return the params of each layer, or of each group that shares them; a list of them is
    returned as it is."""
    if isinstance(blocks, list):
        return blocks
    stacks = [unstack(stacked) for stacked in stacks_of(blocks)]
    return [stacks[p][i] for p, i in layer_order([len(layers) for layers in stacks])]


def stacked_as(blocks: Params, layers: list[Params]) -> Params:
    """Return trees of all layers, stacked as the params of blocks are."""
    counts = [_depth(stacked) for stacked in stacks_of(blocks)]
    members: list[list[Params]] = [[] for _ in counts]
    for layer, (p, _) in zip(layers, layer_order(counts), strict=True):
        members[p].append(layer)
    trees = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *group) for group in members]
    if len(trees) == 1:
        return trees[0]
    return {str(p): tree for p, tree in enumerate(trees)}


def _depth(stacked: Params) -> int:
    return len(jax.tree.leaves(stacked)[0])


def stack_mask(
    blocks: Params | list[Params],
    layout: TokenLayout,
    cache: Cache | None = None,
    causal: bool = True,
) -> tuple[AttentionMask, Cache | None]:
    """Return the mask of the self-attention of a stack, and the cache, if given, with slots for the
    tokens at `layout`. An adapter may give each layer keys `prefix_k` [L, P, K, H] (and values)
    that come before those of all tokens, which then begin at the position P."""
    layer = blocks[0] if isinstance(blocks, list) else stacks_of(blocks)[0]
    leading = 0
    if "prefix_k" in layer.get("attention", {}):
        # [L, P, K, H], or of a list of layers [P, K, H].
        leading = int(layer["attention"]["prefix_k"].shape[-3])
    layout = layout.after(leading)
    keys = layout
    if cache is not None:
        # The queries see the slots, in which their own keys are too.
        cache = cache.advance(layout)
        keys = cache.layout
    return AttentionMask(layout, keys, causal, leading=leading), cache


def run_stack(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    call: Call,
    cache: Cache | None = None,
) -> Output:
    """Map [B, T, D] -> [B, T, D] in the compute dtype, with the mask and the cache of `stack_mask`.
    All layers share the call."""
    x = x.astype(compute_dtype(config))
    if config.exact:
        x = rounded(x)
    scoring = stack_scoring(params, config, call.mask, x.dtype)
    call = call._replace(mask=call.mask._replace(scoring=scoring))
    # The bias of a layer is of tokens in order, as is that of a stack.
    balanced_call = None
    if cache is None and not has_layer_bias(config):
        balanced_call = _balanced_call(params, config, call)
    if balanced_call is not None:
        x = balanced(x)
        call = balanced_call
    if cache is None:
        # A backward pass may follow, for which XLA compiles one layer of a scan.
        scans = layer_loop_of(config) == "scan"
    else:
        scans = loops_when_cached(params["blocks"], config) and not call.request
    out = _run_layers(params["blocks"], config, x, call, cache, scans)
    if balanced_call is not None:
        out = out._replace(x=in_order(out.x))
    if config.norm_placement != "post":
        out = out._replace(x=norm(params.get("final_norm", {}), config, out.x))
    return out


def _balanced_call(params: Params, config: ModelConfig, call: Call) -> Call | None:
    """Return the call with the tokens of each row as `exchange.balanced` arranges them; None where
    the layers read them in order. Captures and what is dropped go by the index of a token."""
    leaves = jax.tree.leaves(params["blocks"], is_leaf=is_custom)
    drops = any(getattr(leaf, "key", None) is not None for leaf in leaves)
    if call.request or drops or (config.has_dropout and call.key is not None):
        return None
    if any(MIXERS[layer.mixer].in_order for layer in layer_configs(config, config.n_layers)):
        return None
    if not reads_balanced(config.attention.kernel, call.mask, config.n_heads):
        return None
    mask = call.mask
    source = call.source
    # Their positions no longer grow along the row, by which kernels would skip blocks.
    queries = replace(jax.tree.map(balanced, mask.queries), ordered=False)
    if source is not None:
        source = source._replace(mask=source.mask._replace(queries=queries))
    mask = mask._replace(queries=queries, keys=queries, balanced=True)
    return call._replace(mask=mask, source=source)


def layer_of(config: ModelConfig, call: Call, scanned: bool = False) -> Any:
    """Return a layer as a function of (x, params, its number), under the policy of
    `model.remat`."""

    def run(x: jax.Array, params: Params, key: jax.Array | None, i: Any) -> Output:
        if i is not None:
            params = cast_in_loop(params, i)
        return block(params, config, x, call._replace(key=key))

    layer = run
    if call.cache is None and (config.remat != "none" or platform() != "cpu"):
        layer = recomputed(run, config, scanned)

    def numbered(x: jax.Array, params: Params, i: Any) -> Output:
        # By the number of the layer, so that a loop and unrolled layers drop the same elements.
        key = None if call.key is None else jax.random.fold_in(call.key, i)
        casts = scanned and call.cache is None and platform() == "tpu"
        return layer(x, params, key, i if casts else None)

    return numbered


def cast_in_loop(params: Params, i: jax.Array) -> Params:
    """Return the params of layer `i` of a loop, unchanged: XLA for TPUs does not know that `i` is
    never negative. It would cast those of all layers before the loop, and keep both: the copies
    take a sixth of the memory of parameters and moments."""

    def minus_zero(w: jax.Array) -> jax.Array:
        if w.dtype != jnp.float32:
            return w
        return w - (i < 0).astype(w.dtype)

    return jax.tree.map(minus_zero, params)  # type: ignore[no-any-return]


def loops_when_cached(blocks: Params | list[Params], config: ModelConfig) -> bool:
    """Return whether one loop serves all layers of a decoder under a cache: with
    model.layer_loop=scan, where they are equal and share no parameters. Auto unrolls them, since a
    loop copies the weights of each layer before it reads them."""
    if config.layer_loop != "scan" or config.family != "decoder":
        return False
    if isinstance(blocks, list) or "0" in blocks or config.layers_in_group > 1:
        return False
    return len({*layer_configs(config, config.n_layers)}) == 1


def _run_layers(
    blocks: Params | list[Params],
    config: ModelConfig,
    x: jax.Array,
    call: Call,
    cache: Cache | None,
    scans: bool,
) -> Output:
    """Run all layers in sequence. With `scans` the whole periods of their pattern are one loop, and
    the layers before and behind them are unrolled."""
    uses = config.layers_in_group
    if scans:
        stacks = stacks_of(blocks)  # type: ignore[arg-type]
        order = layer_order([_depth(stacked) for stacked in stacks])
        depth = uses * len(order)
    else:
        unstacked = layers_of(blocks)
        depth = uses * len(unstacked)
    configs = layer_configs(config, depth)
    # The first layer of the loop, and the first behind it.
    first = depth
    end = depth
    if scans:
        first, period = repetition_of(configs)
        end = depth - (depth - first) % period
    caches: list[Any] = [
        None if cache is None else cache.layer(i, x.shape[1]) for i in range(depth)
    ]
    auxes: list[Aux] = []

    @functools.cache
    def cached_layer(config: ModelConfig) -> Any:
        # JAX traces it once for all layers of a config, which saves the start of a command a second
        # for 30 layers. XLA inlines it.
        return jax.jit(
            lambda x, params, layer_cache: block(
                params, config, x, call._replace(cache=layer_cache)
            )
        )

    def run_layer(i: int, x: jax.Array) -> jax.Array:
        if scans:
            p, entry = order[i // uses]
            params = _entry(stacks[p], entry)
        else:
            params = unstacked[i // uses]
        if cache is not None and not call.request:
            x, caches[i], aux = cached_layer(configs[i])(x, params, caches[i])
        else:
            layer_call = call._replace(cache=caches[i], request=call.request.at((i,)))
            x, caches[i], aux = layer_of(configs[i], layer_call)(x, params, i)
        auxes.append(replace(aux, captures=call.request.named(aux.captures, i)))
        return x

    for i in range(first):
        x = run_layer(i, x)
    if first < end:
        # The numbers of the layers at each position of the pattern.
        numbers = [range(p, end, period) for p in range(first, first + period)]

        def body(x: jax.Array, items: list[Any]) -> tuple[jax.Array, list[Any]]:
            """Run one period, of each of whose layers `items` has params, number and cache."""
            results = []
            for layers, (params, i, layer_cache) in zip(numbers, items, strict=True):
                params = _entry(blocks, i // uses) if params is None else params
                request = call.request.at(layers, i)
                layer_call = call._replace(cache=layer_cache, request=request)
                run = layer_of(configs[layers.start], layer_call, scanned=True)
                x, layer_cache, aux = run(x, params, i)
                results.append((layer_cache, aux))
            return x, results

        items = []
        for p, layers in enumerate(numbers):
            if uses > 1:
                # Layers of a group read the entry that they share: no copies of it are made.
                params = None
            elif len(stacks) == first + period:
                # A stack for each position, of which layers behind the loop have later entries.
                params = _entry(stacks[first + p], slice(len(layers)))
            else:
                # All layers have equal tables and one stack, of which this position has every P-th.
                params = _entry(stacks[0], slice(layers.start, end, period))
            of_layers = [caches[i] for i in layers]
            # A first axis of layers, as that of the params; without a cache there are no arrays.
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers)
            items.append((params, jnp.arange(layers.start, end, period), stacked))
        x, results = jax.lax.scan(body, x, items)
        for layers, (layer_caches, aux) in zip(numbers, results, strict=True):
            for entry, i in enumerate(layers):
                caches[i] = _entry(layer_caches, entry)
                captures = call.request.named(aux.captures, i)
                auxes.append(_entry(replace(aux, captures=captures), entry))
    for i in range(end, depth):
        x = run_layer(i, x)
    return Output(x, None if cache is None else cache.with_layers(caches), merged(auxes))


def _entry(stacked: Any, i: Any) -> Any:
    """Return entry `i` on the first axis of every leaf, or several."""
    return jax.tree.map(lambda leaf: leaf[i], stacked)
