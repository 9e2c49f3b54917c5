"""Log-probabilities of the last tokens of each row, from no more logits than they need."""

import functools

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import hidden

LOGITS = 2**23  # about as many are in memory at once, at most


@functools.partial(jax.jit, static_argnums=(1, 2))
def scores(
    params: Params,
    config: ModelConfig,
    width: int,
    tokens: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scores of each row's last tokens: the sum of the log-probabilities of all but the last
    [B], whether each of these is the likeliest token [B], and the log-probabilities of every token
    in the last place [B, V].

    `tokens` [B, T] are padded on the right to `lengths` [B], without the last token; `counts` [B]
    tokens are scored, at most `width` + 1. Only their logits are computed, and no more than about
    `LOGITS` at once.
    """
    segments = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    x = hidden(params, config, Inputs(tokens, layout_of(tokens, None, segments))).x  # [B, T, D]

    def logits(spots: jax.Array) -> jax.Array:  # [B, n] -> [B, n, V]
        chosen = jnp.take_along_axis(x, spots[..., None], axis=1)
        return head(params, config, chosen, TokenLayout(spots))

    def tile(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first two results for the tokens `at` [n] places before the last one."""
        spots = jnp.maximum(lengths[:, None] - 1 - at, 0)  # [B, n]
        found, target = logits(spots), jnp.take_along_axis(tokens, spots + 1, axis=1)
        asked = at < counts[:, None]
        chosen = jnp.take_along_axis(found, target[..., None], axis=-1)[..., 0]
        chosen = chosen - jax.nn.logsumexp(found, axis=-1)
        return jnp.where(asked, chosen, 0).sum(1), (~asked | (found.argmax(-1) == target)).all(1)

    # Tiles of a power of two places, which divides every width, with at most LOGITS logits.
    places = max(LOGITS // (len(tokens) * config.vocab_size), 1)
    size = min(width, 1 << (places.bit_length() - 1))
    sums, right = jax.lax.map(tile, jnp.arange(1, width + 1).reshape(-1, max(size, 1)))
    final = jax.nn.log_softmax(logits(lengths[:, None] - 1), axis=-1)[:, 0]
    return sums.sum(0), right.all(0), final
