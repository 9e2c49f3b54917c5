"""The one block: a mixer (self-attention), cross-attention to an encoder if there is one, and a
feed-forward, each with a residual connection. Each is a row of the tables below.

With sequential residuals each sublayer reads the sum before it; with parallel ones all read x, or
where they share their norm, all read norm(x).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer.arrays.exact import rounded
from jaxformer.arrays.params import Params, Specs
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import ImportedRow, Table
from jaxformer.config.variants import FeedForward, Mixer
from jaxformer.layers.attention import CROSS_ATTENTION, SELF_ATTENTION
from jaxformer.layers.cache import Cache
from jaxformer.layers.ffn import FEED_FORWARD
from jaxformer.layers.linear import dropout
from jaxformer.layers.masks import TokenLayout
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.output import Aux, Output, merged
from jaxformer.layers.pattern import layer_configs
from jaxformer.layers.sublayer import Call, Sublayer

MIXERS: Table[Sublayer] = Table(
    Mixer,
    {
        "attention": SELF_ATTENTION,
        "latent": ImportedRow("jaxformer.layers.latent:LATENT_ATTENTION"),
        "delta": ImportedRow("jaxformer.layers.delta:GATED_DELTA"),
        "mamba2": ImportedRow("jaxformer.layers.mamba2:MAMBA2"),
    },
)
FEED_FORWARDS: Table[Sublayer] = Table(
    FeedForward, {"ffn": FEED_FORWARD, "experts": ImportedRow("jaxformer.layers.experts:EXPERTS")}
)
CROSS = "cross"


class Placement(NamedTuple):
    """Where the norms of a sublayer f stand (before it, on its output, after the sum), and what it
    does to the residual stream as text."""

    norms: frozenset[str]
    formula: str


PLACEMENTS = {
    "pre": Placement(frozenset({"before"}), "x ← x + {}(norm(x))"),
    "post": Placement(frozenset({"after"}), "x ← norm(x + {}(x))"),
    "sandwich": Placement(frozenset({"before", "output"}), "x ← x + norm({}(norm(x)))"),
    "output": Placement(frozenset({"output"}), "x ← x + norm({}(x))"),
}


def shared_norm(config: ModelConfig) -> str:
    """Return the name of the norm that all sublayers of a block read; empty where each has its
    own."""
    return f"{config.mixer}_norm" if config.residual == "parallel_shared" else ""


def sublayers_of(config: ModelConfig, cross: bool = False) -> dict[str, Sublayer]:
    """Return the rows of a layer, in their order; with `cross` there is one that reads an
    encoder."""
    sublayers: dict[str, Sublayer] = {config.mixer: MIXERS[config.mixer]}
    if cross:
        sublayers[CROSS] = CROSS_ATTENTION
    sublayers[config.feed_forward] = FEED_FORWARDS[config.feed_forward]
    return sublayers


def all_sublayers() -> dict[str, Sublayer]:
    """Return the rows of every kind of layer by their names, which are those of their
    parameters."""
    mixers = {name: MIXERS[name] for name in MIXERS}
    feed_forwards = {name: FEED_FORWARDS[name] for name in FEED_FORWARDS}
    return {**mixers, CROSS: CROSS_ATTENTION, **feed_forwards}


def empty_cache(config: ModelConfig, batch: int, slots: int, dtype: DTypeLike) -> Cache:
    """Return a cache of all layers for `slots` tokens in each row, in `dtype`."""
    layers = layer_configs(config, config.n_layers)
    kept = tuple(MIXERS[layer.mixer].start(layer, batch, slots, dtype) for layer in layers)
    blank = jnp.zeros((batch, slots), jnp.int32)
    return Cache(kept, TokenLayout(blank, blank), jnp.int32(0), (None,) * len(layers))


def normed_before(config: ModelConfig, name: str) -> bool:
    """Return whether a sublayer of a layer reads the residual stream behind a norm."""
    # The mixer of a first layer reads embeddings, which may be normed already (ModernBERT).
    if config.unnormed_layers > 0 and name == config.mixer:
        return False
    return "before" in PLACEMENTS[config.norm_placement].norms


def block_specs(config: ModelConfig, cross: bool = False) -> Specs:
    """Return the rows of each sublayer by its name, and of its norms beside it."""
    norms = PLACEMENTS[config.norm_placement].norms
    shared = shared_norm(config)
    specs: Specs = {}
    for name, sublayer in sublayers_of(config, cross).items():
        # The norm that all share is that of the first sublayer.
        has_norm = normed_before(config, name) or "after" in norms
        if has_norm and shared in ("", f"{name}_norm"):
            specs[f"{name}_norm"] = norm_specs(config)
        specs[name] = sublayer.specs(config)
        if "output" in norms:
            specs[f"{name}_output_norm"] = norm_specs(config)
    return specs


@jax.named_scope("layer")
def block(params: Params, config: ModelConfig, x: Float[Array, "B T D"], call: Call) -> Output:
    """Apply one layer, [B, T, D] -> [B, T, D], with its cache if the call has one.

    Every sublayer returns an `Output`, whose `Aux` holds what the request captures.
    """
    sublayers = sublayers_of(config, cross=call.source is not None)
    norms = PLACEMENTS[config.norm_placement].norms

    def normed(x: jax.Array, name: str) -> jax.Array:
        return norm(params[name], config, x)

    shared = shared_norm(config)
    # What parallel sublayers read: x, or its norm if they share one.
    source = x
    if shared:
        source = normed(x, shared)
    inner_keys, outer_keys = _dropout_keys(call.key, sublayers)
    total = x  # the residual stream
    auxes: list[Aux] = []
    for name, sublayer in sublayers.items():
        read = source
        if config.residual == "sequential":
            read = total
        if normed_before(config, name) and not shared:
            read = normed(read, f"{name}_norm")
        with jax.named_scope(name):
            call = call._replace(key=inner_keys[name])
            out, cache, aux = sublayer.apply(params[name], config, read, call)
        call = call._replace(cache=cache)
        out, captured = call.request.apply(sublayer.capture or name, out)
        auxes += [aux, Aux(captures=captured)]
        if "output" in norms:
            out = normed(out, f"{name}_output_norm")
        if config.residual_multiplier != 1:
            out = out * config.residual_multiplier
        total = total + dropout(out, config.dropout, outer_keys[name])
        if config.exact:
            total = rounded(total)
        if "after" in norms:
            total = normed(total, f"{name}_norm")
    total, captured = call.request.apply("residual", total)
    return Output(total, call.cache, merged([*auxes, Aux(captures=captured)]))


DropoutKeys = dict[str, jax.Array | None]


def _dropout_keys(
    key: jax.Array | None, sublayers: dict[str, Sublayer]
) -> tuple[DropoutKeys, DropoutKeys]:
    """Return a key for the inside of each sublayer that draws, and one for the output of each."""
    inner: DropoutKeys = dict.fromkeys(sublayers)
    outer: DropoutKeys = dict.fromkeys(sublayers)
    if key is not None:
        drawing = [name for name, sublayer in sublayers.items() if sublayer.draws]
        # One split for all: the keys of the outputs depend on how many sublayers draw inside.
        keys = iter(jax.random.split(key, len(drawing) + len(sublayers)))
        inner |= {name: next(keys) for name in drawing}
        outer = {name: next(keys) for name in sublayers}
    return inner, outer
