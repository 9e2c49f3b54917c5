"""One layer of a model by itself, for its params and an array: multi-head attention, the block."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.arrays.params import Params, check_params
from jaxformer.config.model import ModelConfig
from jaxformer.config.variants import BIASED_SCORES
from jaxformer.files import ConfigError
from jaxformer.layers.attention import attention, attention_specs, keys_and_values
from jaxformer.layers.biases import score_bias
from jaxformer.layers.block import block, block_specs
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of
from jaxformer.layers.sublayer import Call

TokenNumbers = Int[Array | np.ndarray, "B T"] | None


def multi_head_attention(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    *,
    segment_ids: TokenNumbers = None,
    positions: TokenNumbers = None,
) -> Float[Array, "B T D"]:
    """Apply self-attention with its four projections, without norm and residual: float [B, T, D] ->
    [B, T, D] in the dtype of `x`.

    `params` has q [D, N, H], k [D, K, H], v [D, K, W] and out [N, W, D] (`attention_specs`), with
    N = config.n_heads, K = config.kv_heads, H = config.head_width and W = config.value_width; a
    layer of `jf.init(config, key)["blocks"]["attention"]` is one. Head n is
    softmax(q_n k_n^T / sqrt(H)) v_n with q_n = x q[:, n] and so on, and the heads are multiplied by
    out and added (arXiv:1706.03762, section 3.2.2; with K < N arXiv:2305.13245). A decoder's tokens
    see themselves and those before, an encoder's see both sides. Other settings of `config` that
    attention has apply: RoPE unless positions="none", a window, query-key norms, sinks, biases.
    `segment_ids` and `positions` int [B, T] are as in `jf.forward`. Raises ConfigError for params
    or an `x` that do not fit, and for a config whose layers cannot be computed alone.
    """
    check_params(attention_specs(config), params)
    mask = _mask(config, x, positions, segment_ids)._replace(window=config.window)
    keys_values = keys_and_values(params, config, x, mask.queries)
    return attention(params, config, x, keys_values, Call(mask))[0]


def transformer_block(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    *,
    segment_ids: TokenNumbers = None,
    positions: TokenNumbers = None,
) -> Float[Array, "B T D"]:
    """Apply one block, attention and feed-forward with norms and residuals: float [B, T, D] -> [B,
    T, D] in the dtype of `x`.

    With the norms before the sublayers, the default: y = x + attention(norm(x)), then
    y + ffn(norm(y)); `jaxformer.layers.block` has the other placements. `params` has attention,
    attention_norm, ffn and ffn_norm (`block_specs`); a layer of `jf.init(config, key)["blocks"]` is
    one. The rest is as in `multi_head_attention`.
    """
    check_params(block_specs(config), params)
    return block(params, config, x, Call(_mask(config, x, positions, segment_ids))).x


def _mask(config: ModelConfig, x: jax.Array, positions: Any, segment_ids: Any) -> AttentionMask:
    """Return the mask of a layer's self-attention, causal in a decoder."""
    if config.family == "encoder_decoder" or config.positions in ("t5", "disentangled"):
        raise ConfigError(
            f"model.family={config.family} with model.positions={config.positions}: a layer that"
            " reads a source, or a bias that all layers share, cannot be computed alone: call"
            " jf.forward on the whole model, or take a decoder or an encoder with other positions."
        )
    if x.ndim != 3 or x.shape[-1] != config.d_model:
        raise ConfigError(
            f"x has the shape {list(x.shape)}, and a layer reads [batch, length, d_model] with"
            f" model.d_model={config.d_model}: reshape it, or change model.d_model."
        )
    if positions is not None:
        positions = jnp.asarray(positions)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
    layout = layout_of(x[..., 0], positions, segment_ids)
    mask = AttentionMask(layout, layout, causal=config.family == "decoder")
    if config.positions not in BIASED_SCORES:
        return mask
    return mask._replace(scoring=Scoring(bias=score_bias(None, config, mask)))
