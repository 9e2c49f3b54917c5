"""Scores of a text: the log-probability of each of its tokens, and the likeliest tokens in its
place."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer.arrays.exact import log_softmax
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.models.transformer import logits_of


class Scores(NamedTuple):
    """`log_probs` [B, T] float32 of each token in nats, where `is_scored` [B, T] bool, and 0
    elsewhere; and of the `top` likeliest tokens in its place, likeliest first, the ids
    `alternatives` [B, T, top] int32 and their log-probabilities `alternative_log_probs`."""

    log_probs: jax.Array
    is_scored: jax.Array
    alternatives: jax.Array
    alternative_log_probs: jax.Array


def score(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    top: int = 0,
    **inputs: Any,
) -> Scores:
    """Return the log-probability of each token after those before it: tokens [B, T] int ->
    `Scores`.

    log p_t = log softmax(logits of position t - 1) at token t, with nothing of `jf.generate`'s
    rules. The first token of a row or of a segment, and padding, is not scored. `inputs` are the
    other keywords of `jf.forward`: segment_ids, positions, and the source of an encoder-decoder,
    whose target is `tokens` with its start token. The sum of a row is the log-probability of its
    text. All logits [B, T, V] are in memory at once. A pure function, to be jitted with
    `static_argnums=1, static_argnames="top"`."""
    if config.output != "language":
        raise ConfigError(
            f"a model with the head {config.output!r} does not write text: scores need the head"
            " 'language'."
        )
    tokens = jnp.asarray(tokens)
    logits, _ = logits_of(params, config, {"tokens": tokens} | inputs)
    segments = inputs.get("segment_ids")
    if segments is None:
        segments = jnp.ones_like(tokens)
    segments = jnp.asarray(segments)
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)  # [B, T - 1]
    if not 0 <= top <= logits.shape[-1]:
        raise ConfigError(f"top={top} must be from 0 to the {logits.shape[-1]} tokens there are.")
    # [B, T - 1, V]: the logits of a position are of the token after it.
    logs = log_softmax(logits[:, :-1].astype(jnp.float32), config.exact)
    log_probs = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]  # [B, T - 1]
    best, ids = jax.lax.top_k(logs, top)  # [B, T - 1, top]
    following = Scores(jnp.where(follows, log_probs, 0.0), follows, ids.astype(jnp.int32), best)
    # Each array begins with the first tokens, which nothing predicts.
    return jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (1, 0), *[(0, 0)] * (a.ndim - 2))), following)
