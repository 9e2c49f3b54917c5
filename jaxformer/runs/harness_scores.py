"""The scores of the last tokens of rows: what the evaluation harness asks of a model.

In the comments, B is the number of rows, T that of their tokens, S that of the tokens of a source,
D the width of the model and V the size of the vocabulary.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import hidden

# The number of scored tokens before a row's last one is rounded up to one of these.
WIDTHS = (0, *(16 * 4**power for power in range(14)))
MAX_LOGITS = 2**23  # about as many are in memory at once


@functools.partial(jax.jit, static_argnums=(1, 2))
def token_scores(
    params: Params,
    config: ModelConfig,
    width: int,
    tokens: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    source: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scores of each row's last tokens: the sum of the log-probabilities of all but the very
    last [B], whether each of these is the likeliest token [B], and the log-probabilities of every
    token of the vocabulary as the very last [B, V].

    `tokens` [B, T] have `lengths` [B] tokens each, without the very last, and padding on the right;
    `counts` [B] tokens are scored, at most `width` + 1. Only their logits are computed, and no more
    than about `MAX_LOGITS` at once. An encoder-decoder reads the tokens of `source` [B, S] with
    their segment ids [B, S].
    """
    segments = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    inputs = Inputs(tokens, layout_of(tokens, None, segments))
    if source is not None:
        source_layout = layout_of(source[0], None, source[1])
        inputs = replace(inputs, source=source[0], source_layout=source_layout)
    x = hidden(params, config, inputs).x  # [B, T, D]

    def logits(index: jax.Array) -> jax.Array:  # [B, n] -> [B, n, V]
        chosen = jnp.take_along_axis(x, index[..., None], axis=1)  # [B, n, D]
        return head(params, config, chosen, TokenLayout(index))

    def tile(distances: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first two results for the tokens at `distances` [n] before the last one."""
        index = jnp.maximum(lengths[:, None] - 1 - distances, 0)  # [B, n]
        tile_logits = logits(index)
        targets = jnp.take_along_axis(tokens, index + 1, axis=1)
        is_scored = distances < counts[:, None]
        scores = jnp.take_along_axis(tile_logits, targets[..., None], axis=-1)[..., 0]
        scores = scores - jax.nn.logsumexp(tile_logits, axis=-1)
        is_likeliest = tile_logits.argmax(-1) == targets
        return jnp.where(is_scored, scores, 0).sum(1), (~is_scored | is_likeliest).all(1)

    # A tile has a power of two of tokens of each row, which divides every width, and at most
    # MAX_LOGITS logits.
    tile_tokens = max(MAX_LOGITS // (len(tokens) * config.vocab_size), 1)
    size = min(width, 1 << (tile_tokens.bit_length() - 1))
    sums, right = jax.lax.map(tile, jnp.arange(1, width + 1).reshape(-1, max(size, 1)))
    final = jax.nn.log_softmax(logits(lengths[:, None] - 1), axis=-1)[:, 0]
    # Every process of a run reads them all.
    return (
        constrain(sums.sum(0), (None,)),
        constrain(right.all(0), (None,)),
        constrain(final, (None, None)),
    )
