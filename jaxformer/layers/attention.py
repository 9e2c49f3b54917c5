"""Causal grouped-query attention; multi-head (K = N) and multi-query attention (K = 1) are its two ends."""

import jax
from jaxtyping import Array, Float

from jaxformer.config import ModelConfig
from jaxformer.layers.cache import Page
from jaxformer.layers.kernels import KERNELS, dot_product_attention
from jaxformer.layers.linear import INITIALIZERS, dropout, linear
from jaxformer.layers.masks import Places, causal_mask
from jaxformer.layers.positions import rotate
from jaxformer.params import Params, Spec, Specs, zeros

__all__ = ["attention", "attention_specs", "dot_product_attention"]


def attention_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    d, n, k, h = config.d_model, config.n_heads, config.kv_heads, config.head_width
    keys = Spec((d, k, h), ("embed", "kv_heads", "head_dim"), make.weight, inputs=("embed",))
    specs: Specs = {
        "q": Spec((d, n, h), ("embed", "heads", "head_dim"), make.weight, inputs=("embed",)),
        "k": keys,
        "v": keys,
        "out": Spec((n, h, d), ("heads", "head_dim", "embed"), make.residual, inputs=("heads", "head_dim")),
    }
    if config.bias == "all":
        specs["q_bias"] = Spec((n, h), ("heads", "head_dim"), zeros)
        specs |= {f"{name}_bias": Spec((k, h), ("kv_heads", "head_dim"), zeros) for name in ("k", "v")}
        specs["out_bias"] = Spec((d,), ("residual",), zeros)
    return specs


def attention(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    places: Places,
    page: Page | None = None,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B T D"], Page | None]:
    """Self attention: [B, T, D] -> [B, T, D], and the layer's page of the cache with this call's keys and values in it.

    With a page, queries look at all its slots; without, at the T tokens themselves. A key turns dropout on.
    """
    q = rotate(config, linear("BTD,DNH->BTNH", params, "q", x), places.positions)
    k = rotate(config, linear("BTD,DKH->BTKH", params, "k", x), places.positions)
    v = linear("BTD,DKH->BTKH", params, "v", x)
    if page is not None:
        page = page.write(k, v)
        out = dot_product_attention(q, page.k, page.v, causal_mask(places, page.places))
    elif key is not None and config.dropout > 0:
        mask = causal_mask(places, places)
        out = dot_product_attention(q, k, v, mask, drop=lambda weights: dropout(weights, config.dropout, key))
    else:
        kernel = "xla" if config.attention_kernel == "auto" else config.attention_kernel
        out = KERNELS[kernel].run(q, k, v, places, places)
    return linear("BTNH,NHD->BTD", params, "out", out, to=("batch", None, None)), page
