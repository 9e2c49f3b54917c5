"""The cross-entropy of logits by themselves, for a loss of your own."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.files import ConfigError
from jaxformer.losses.logits import Extras, sums_of_logits


def softmax_cross_entropy(
    logits: Float[Array, "... V"],
    targets: Int[Array | np.ndarray, "..."],
    weights: Float[Array | np.ndarray, "..."] | None = None,
    **extras: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The cross-entropy of logits as (sum, weight), an entry of what a loss returns: [..., V] of
    any float dtype, int [...], float [...] -> two float32 scalars; their quotient is the mean.

    The sum is that of w (lse - logit_y), in nats, with lse = log sum exp of the logits of a token,
    y its target in 0 .. V - 1 and w its weight (default: 1); the weight is the sum of w. The
    largest logit is subtracted before the exponential, so that no finite logit overflows. `extras`
    are label_smoothing (arXiv:1512.00567), z_loss (arXiv:2204.02311) and soft_cap, as in
    `losses.cross_entropy.cross_entropy`, which does not hold all logits in memory. Raises
    ConfigError for shapes that do not fit, and TypeError for another name.
    """
    shapes = {targets.shape, logits.shape[:-1] if weights is None else weights.shape}
    if shapes != {logits.shape[:-1]}:
        given = "" if weights is None else f" and weights {list(weights.shape)}"
        raise ConfigError(
            f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}{given}: give a"
            f" target, and a weight, for each row of logits: {list(logits.shape[:-1])}."
        )
    each = jnp.ones(targets.shape) if weights is None else jnp.asarray(weights, jnp.float32)
    more = Extras(**{name: float(value) for name, value in extras.items()})
    total, _, _ = sums_of_logits(logits.astype(jnp.float32), jnp.asarray(targets), each, more)
    return total, jnp.sum(each)
