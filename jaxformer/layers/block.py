"""The one block: attention, cross-attention if the params have it, and feed-forward, each with a
residual connection.

pre        x + f(norm(x))            sandwich   x + norm(f(norm(x)))
post       norm(x + f(x))            output     x + norm(f(x))

With sequential residuals each sublayer reads the sum before it; with parallel ones all read x.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params, Specs
from jaxformer.config.model import ModelConfig
from jaxformer.layers.attention import (
    attention,
    attention_specs,
    cross_attention_specs,
    keys_and_values,
)
from jaxformer.layers.cache import LayerCache
from jaxformer.layers.capture import NOTHING, Request
from jaxformer.layers.ffn import ffn, ffn_specs
from jaxformer.layers.linear import dropout
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.layers.output import Aux, Output, merged

PLACEMENTS = {  # norms before the sublayer, on its output, after the sum
    "pre": {"before"},
    "post": {"after"},
    "sandwich": {"before", "output"},
    "output": {"output"},
}


class EncoderOutput(NamedTuple):
    """The encoder's output [B, S, D] (None if a layer cache has its keys), and the mask to it."""

    x: jax.Array | None
    mask: AttentionMask


def block_specs(config: ModelConfig, cross: bool = False) -> Specs:
    place = PLACEMENTS[config.norm_placement]
    specs: Specs = {}
    sublayers = {"attention": attention_specs, "cross": cross_attention_specs, "ffn": ffn_specs}
    if not cross:
        del sublayers["cross"]
    for name, make in sublayers.items():
        if place & {"before", "after"}:
            specs[f"{name}_norm"] = norm_specs(config)
        specs[name] = make(config)
        if "output" in place:
            specs[f"{name}_output_norm"] = norm_specs(config)
    return specs


@jax.named_scope("layer")
def block(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    mask: AttentionMask,
    layer_cache: LayerCache | None = None,
    source: EncoderOutput | None = None,
    key: jax.Array | None = None,
    request: Request = NOTHING,
) -> Output:
    """[B, T, D] -> [B, T, D], with the layer's cache if one is given. Dropout needs a key.

    Every sublayer returns its output and an `Aux`, which holds what the request captures.
    """
    keys = iter((None,) * 5 if key is None else jax.random.split(key, 5 if source else 3))
    attention_key, cross_key = next(keys), next(keys) if source else None
    written, near = layer_cache, mask._replace(window=config.window)

    def attend(h: jax.Array) -> tuple[jax.Array, Aux]:
        nonlocal written
        own = params["attention"]
        seen = keys_and_values(own, config, h, mask.queries)
        if layer_cache is not None:
            written = layer_cache.write(*seen)
            seen = written.k, written.v
        out, weights = attention(own, config, h, seen, near, attention_key, request)
        return out, Aux(captures=weights)

    def attend_to_source(h: jax.Array) -> tuple[jax.Array, Aux]:
        own = params["cross"]
        known = layer_cache.source if layer_cache is not None else None
        encoded: Any = source  # given where the params have cross-attention
        seen = known or keys_and_values(own, config, encoded.x, None)
        out, weights = attention(own, config, h, seen, encoded.mask, cross_key, request, "cross")
        return out, Aux(captures=weights)

    sublayers: dict[str, Callable[[jax.Array], tuple[jax.Array, Aux]]] = {
        "attention": attend,
        **({"cross": attend_to_source} if "cross" in params else {}),
        "ffn": lambda h: (ffn(params["ffn"], config, h), Aux()),
    }
    place, total, parts = PLACEMENTS[config.norm_placement], x, list[Aux]()
    for name, sublayer in sublayers.items():
        read = x if config.residual == "parallel" else total
        read = norm(params[f"{name}_norm"], config, read) if "before" in place else read
        with jax.named_scope(name):
            out, aux = sublayer(read)
        out, captured = request.apply(f"{'mlp' if name == 'ffn' else name}_out", out)
        parts += [aux, Aux(captures=captured)]
        out = norm(params[f"{name}_output_norm"], config, out) if "output" in place else out
        total = total + dropout(out, config.dropout, next(keys))
        total = norm(params[f"{name}_norm"], config, total) if "after" in place else total
    total, captured = request.apply("residual", total)
    return Output(total, written, merged([*parts, Aux(captures=captured)]))
