"""The one block: attention, attention to a source where the params have it, and feed-forward, each
around a residual.

pre        x + f(norm(x))            sandwich   x + norm(f(norm(x)))
post       norm(x + f(x))            output     x + norm(f(x))

In sequence each sublayer reads the sum that the one before it left; in parallel all read x, and x
gets the sum of all.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxformer.config_model import ModelConfig
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
from jaxformer.params import Params, Specs


class Placement(NamedTuple):
    """Where norms stand: before the sublayer, on what it gives, on the sum."""

    before: bool = False
    output: bool = False
    after: bool = False


PLACEMENTS = {
    "pre": Placement(before=True),
    "post": Placement(after=True),
    "sandwich": Placement(before=True, output=True),
    "output": Placement(output=True),
}


class EncoderOutput(NamedTuple):
    """What cross-attention looks at: the encoder's output [B, S, D] (None where a page has its
    keys), and how."""

    x: jax.Array | None
    mask: AttentionMask


def block_specs(config: ModelConfig, cross: bool = False) -> Specs:
    place = PLACEMENTS[config.norm_placement]
    specs: Specs = {}
    sublayers = (
        {"attention": attention_specs}
        | ({"cross": cross_attention_specs} if cross else {})
        | {"ffn": ffn_specs}
    )
    for name, make in sublayers.items():
        specs |= {f"{name}_norm": norm_specs(config)} if place.before or place.after else {}
        specs[name] = make(config)
        specs |= {f"{name}_output_norm": norm_specs(config)} if place.output else {}
    return specs


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
    """[B, T, D] -> [B, T, D], and the layer's page of the cache where one is given. A key turns
    dropout on.

    Every sublayer returns its result and an `Aux`; what the request asks for is captured in it.
    """
    keys = iter((None,) * 5 if key is None else jax.random.split(key, 5 if source else 3))
    attention_key, cross_key = next(keys), next(keys) if source else None
    written, near = layer_cache, mask._replace(window=config.window)

    def attend(h: jax.Array) -> tuple[jax.Array, Aux]:
        nonlocal written
        seen = keys_and_values(params["attention"], config, h, mask.queries.positions)
        if layer_cache is not None:
            written = layer_cache.write(*seen)
            seen = written.k, written.v
        out, weights = attention(
            params["attention"], config, h, seen, near, attention_key, request, "attention"
        )
        return out, Aux(captures=weights)

    def attend_to_source(h: jax.Array) -> tuple[jax.Array, Aux]:
        known = layer_cache.source if layer_cache is not None else None
        seen = known or keys_and_values(params["cross"], config, source.x, None)  # type: ignore[union-attr, arg-type]
        to_source: AttentionMask = source.mask  # type: ignore[union-attr]
        out, weights = attention(
            params["cross"], config, h, seen, to_source, cross_key, request, "cross"
        )
        return out, Aux(captures=weights)

    sublayers: dict[str, Callable[[jax.Array], tuple[jax.Array, Aux]]] = {
        "attention": attend,
        **({"cross": attend_to_source} if "cross" in params else {}),
        "ffn": lambda h: (ffn(params["ffn"], config, h), Aux()),
    }
    place, total = PLACEMENTS[config.norm_placement], x
    parts: list[Aux] = []
    for name, sublayer in sublayers.items():
        read = x if config.residual == "parallel" else total
        out, aux = sublayer(norm(params[f"{name}_norm"], config, read) if place.before else read)
        out, captured = request.apply(f"{'mlp' if name == 'ffn' else name}_out", out)
        parts += [aux, Aux(captures=captured)]
        out = norm(params[f"{name}_output_norm"], config, out) if place.output else out
        total = total + dropout(out, config.dropout, next(keys))
        total = norm(params[f"{name}_norm"], config, total) if place.after else total
    total, captured = request.apply("residual", total)
    return Output(total, written, merged([*parts, Aux(captures=captured)]))
