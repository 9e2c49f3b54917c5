"""The one block: attention, then feed-forward, each with its norm around a residual.

pre    x + f(norm(x))
post   norm(x + f(x))
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from jaxformer.config import ModelConfig
from jaxformer.layers.attention import attention, attention_specs
from jaxformer.layers.cache import Page
from jaxformer.layers.ffn import ffn, ffn_specs
from jaxformer.layers.linear import dropout
from jaxformer.layers.masks import Places
from jaxformer.layers.norm import norm, norm_specs
from jaxformer.params import Params, Specs

Sublayer = Callable[[jax.Array], jax.Array]
PLACEMENTS: dict[str, Callable[[Sublayer, Sublayer, jax.Array], jax.Array]] = {
    "pre": lambda normed, f, x: x + f(normed(x)),
    "post": lambda normed, f, x: normed(x + f(x)),
}


def block_specs(config: ModelConfig) -> Specs:
    return {
        "attention_norm": norm_specs(config),
        "attention": attention_specs(config),
        "ffn_norm": norm_specs(config),
        "ffn": ffn_specs(config),
    }


def block(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    places: Places,
    page: Page | None = None,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B T D"], Page | None]:
    """[B, T, D] -> [B, T, D], and the layer's page of the cache where one is given. A key turns dropout on."""
    weights_key, attention_key, ffn_key = (None,) * 3 if key is None else jax.random.split(key, 3)
    written = page

    def attend(h: jax.Array) -> jax.Array:
        nonlocal written
        out, written = attention(params["attention"], config, h, places, page, weights_key)
        return dropout(out, config.dropout, attention_key)

    def feed(h: jax.Array) -> jax.Array:
        return dropout(ffn(params["ffn"], config, h), config.dropout, ffn_key)

    place = PLACEMENTS[config.norm_placement]
    x = place(lambda h: norm(params["attention_norm"], config, h), attend, x)
    x = place(lambda h: norm(params["ffn_norm"], config, h), feed, x)
    return x, written
