"""How likely the last tokens of each row are, from no more logits than that takes."""

import functools

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import hidden
from jaxformer.params import Params

LOGITS = 2**23  # at most about as many are in memory at once


@functools.partial(jax.jit, static_argnums=(1, 2))
def scores(
    params: Params,
    config: ModelConfig,
    width: int,
    tokens: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each row's last predictions are worth: the sum of the log-probabilities of all but the
    last [B], whether each of these is the likeliest token [B], and the log-probabilities of every
    token in the last place [B, V].

    `tokens` [B, T] are padded on the right to `lengths` [B]; `counts` [B] predictions are asked
    for, at most `width` + 1. Only their logits are computed, and no more than about `LOGITS` at
    once.
    """
    segments = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    x = hidden(params, config, Inputs(tokens, layout_of(tokens, None, segments))).x

    def logits(spots: jax.Array) -> jax.Array:
        return head(
            params, config, jnp.take_along_axis(x, spots[..., None], axis=1), TokenLayout(spots)
        )

    def tile(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The same for the predictions that stand `at` places before the last one."""
        spots = jnp.maximum(lengths[:, None] - 1 - at, 0)
        found, target = logits(spots), jnp.take_along_axis(tokens, spots + 1, axis=1)
        asked = at < counts[:, None]
        chosen = jnp.take_along_axis(found, target[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(
            found, axis=-1
        )
        return jnp.where(asked, chosen, 0).sum(1), (~asked | (found.argmax(-1) == target)).all(1)

    size = min(width, 1 << (max(LOGITS // (len(tokens) * config.vocab_size), 1).bit_length() - 1))
    sums, right = jax.lax.map(tile, jnp.arange(1, width + 1).reshape(-1, max(size, 1)))
    return (
        sums.sum(0),
        right.all(0),
        jax.nn.log_softmax(logits(lengths[:, None] - 1), axis=-1)[:, 0],
    )
