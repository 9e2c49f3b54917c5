"""Sophia-H (arXiv:2305.14342): steps by an estimate of the diagonal of the Hessian."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.arrays.params import Specs
from jaxformer.config.train import OptimizerConfig
from jaxformer.training.optimizers.update_rule import UpdateRule

# Steps from one estimate of the Hessian to the next, as in the paper: an estimate takes about as
# long as two gradients.
CURVATURE_EVERY = 10
# Factor of the Hessian by which steps are divided, the paper's for GPT-2: a larger one clips fewer.
GAMMA = 0.01


class SophiaState(NamedTuple):
    """The number of steps, the mean of gradients, and that of estimates of the diagonal."""

    steps: jax.Array
    mu: Any
    nu: Any


def _sophia(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """Return the rule m = b1 m + (1 - b1) g; every tenth step, from the first on,
    h = b2 h + (1 - b2) s * (H s) with signs s drawn at random and the Hessian H of the loss of the
    batch (Hutchinson's estimate); and the direction is m / max(gamma h, eps), clipped to [-1, 1].

    `make_step` gives the arguments `hessian_product`, from s to H s, and `key`, by seed and step.
    The paper draws s from a normal distribution; signs have the same mean and a smaller variance.
    """
    b1 = config.b1
    b2 = config.b2
    eps = config.eps

    def init(params: Any) -> SophiaState:
        zeros = optax.tree.zeros_like
        return SophiaState(jnp.int32(0), zeros(params), zeros(params))

    def update(
        updates: Any,
        state: SophiaState,
        params: Any = None,
        *,
        hessian_product: Callable[[Any], Any],
        key: jax.Array,
        **extra: Any,
    ) -> tuple[Any, SophiaState]:
        def estimated(nu: Any) -> Any:
            of_rule = jax.random.fold_in(key, zlib.crc32(b"sophia"))
            signs = optax.tree.random_like(of_rule, nu, jax.random.rademacher, jnp.float32)
            products = jax.tree.leaves(hessian_product(signs))
            leaves, structure = jax.tree.flatten(signs)
            diagonal = [sign * product for sign, product in zip(leaves, products, strict=True)]
            return optax.tree.update_moment(jax.tree.unflatten(structure, diagonal), nu, b2, 1)

        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = jax.lax.cond(state.steps % CURVATURE_EVERY == 0, estimated, lambda nu: nu, state.nu)

        def direction(m: jax.Array, h: jax.Array) -> jax.Array:
            return jnp.clip(m / jnp.maximum(GAMMA * h, eps), -1, 1)

        return jax.tree.map(direction, mu, nu), SophiaState(
            optax.safe_increment(state.steps), mu, nu
        )

    return optax.GradientTransformationExtraArgs(init, update)


sophia = UpdateRule(_sophia, ("b1", "b2", "eps"), {"mu": True, "nu": True})
