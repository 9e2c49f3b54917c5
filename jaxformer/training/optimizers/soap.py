"""SOAP (arXiv:2409.11321): Adam in the eigenbasis of Shampoo's preconditioners."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.arrays.params import NamedAxes, Spec, Specs, map_specs
from jaxformer.config.train import OptimizerConfig
from jaxformer.training.optimizers.update_rule import ADAM, UpdateRule, map_arrays, matrix_axes

# Steps from one improvement of the eigenvectors to the next, as in the paper.
BASIS_EVERY = 10


class SoapState(NamedTuple):
    """The number of steps, the means of the gradient and, in the basis, of its square; and for the
    left and the right side of a matrix its factor, L and R of the paper, with the basis of its
    eigenvectors. These are None for a side that is longer than optimizer.soap_max_side."""

    steps: jax.Array
    mu: Any
    nu: Any
    factors: tuple[Any, ...]
    bases: tuple[Any, ...]


def _soap(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return SOAP on matrices, embeddings among them; Adam on norms and biases."""
    rules = {"soap": scale_by_soap(c, specs), "adam": optax.scale_by_adam(c.b1, c.b2, c.eps)}
    return optax.partition(
        rules, map_specs(lambda _, spec: "soap" if spec.is_matrix else "adam", specs)
    )


# The products with the left and the right basis, into the eigenbasis, and those back.
ROTATION = ("bmi,bmn->bin", "bmn,bnj->bmj")
INVERSE_ROTATION = ("bmi,bin->bmn", "bmj,bnj->bmn")
# G G^T and G^T G.
SQUARES = ("bmn,bkn->bmk", "bmn,bmk->bnk")


def scale_by_soap(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return Adam in the eigenbasis Q of the means L of G G^T and R of G^T G, for each matrix.

    G' = Q_L^T G Q_R, M = b1 M + (1 - b1) G, V = b2 V + (1 - b2) G'^2, and the direction is
    Q_L (M' / (sqrt(V) + eps)) Q_R^T with M' = Q_L^T M Q_R, both without their bias. Then L and R
    take up G, by b2, and every tenth step Q becomes the orthogonal factor of L Q.
    The first step moves nothing: it makes L and R, and their eigenvectors.
    """
    b1 = config.b1
    b2 = config.b2
    eps = config.eps

    def zeros(spec: Spec, side: int) -> NamedAxes | None:
        """Return zeros for a factor [batch, *side, length], divided along its own axes."""
        length = math.prod(spec.shape[i] for i in matrix_axes(spec)[side])
        # A basis takes the square of a side in memory and its cube in time: the side of a
        # vocabulary stays as it is.
        if length > config.soap_max_side:
            return None
        axes = (*matrix_axes(spec).batch, *matrix_axes(spec)[side])
        shape = (*(spec.shape[i] for i in axes), length)
        return NamedAxes(jnp.zeros(shape), (*(spec.axes[i] for i in axes), None))

    def init(params: Any) -> SoapState:
        # Arrays of their own for all, because a step donates them. The sides of `MatrixAxes` are
        # its entries 1 and 2.
        left, right, left_basis, right_basis = (
            map_arrays(lambda spec, _, side=side: zeros(spec, side), specs, params)
            for side in (1, 2, 1, 2)
        )
        return SoapState(
            jnp.int32(0),
            mu=optax.tree.zeros_like(params),
            nu=optax.tree.zeros_like(params),
            factors=(left, right),
            bases=(left_basis, right_basis),
        )

    def next_factor(
        equation: str, spec: Spec, gradient: jax.Array, factor: NamedAxes | None
    ) -> NamedAxes | None:
        if factor is None:
            return None
        g = matrix_axes(spec).matrices(gradient)  # [matrices, m, n]
        square = jnp.einsum(equation, g, g).reshape(factor.value.shape)
        return NamedAxes((1 - b2) * square + b2 * factor.value, factor.axes)

    def next_basis(
        steps: jax.Array, spec: Spec, gradient: jax.Array, factor: Any, basis: NamedAxes | None
    ) -> NamedAxes | None:
        if basis is None:
            return None
        # As it is; a step of the power method with a QR decomposition, which is cheaper than the
        # eigenvectors and near them after so few steps; the eigenvectors themselves.
        branches = [
            lambda matrix, vectors: vectors,
            lambda matrix, vectors: jnp.linalg.qr(matrix @ vectors)[0],
            lambda matrix, vectors: jnp.linalg.eigh(matrix)[1],
        ]
        branch = jnp.where(steps == 0, 2, jnp.where(steps % BASIS_EVERY == 0, 1, 0))
        vectors = jax.lax.switch(branch, branches, _square(factor), _square(basis))
        return NamedAxes(vectors.reshape(basis.value.shape), basis.axes)

    def update(updates: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        steps = state.steps
        gradients = map_arrays(_rotated(ROTATION), specs, updates, *state.bases)
        # The first moment stays in the basis of the weights, since the eigenbasis turns; only the
        # second one is kept in it.
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(gradients, state.nu, b2, 2)
        mu, nu = optax.tree.where(steps > 0, (mu, nu), (state.mu, state.nu))
        # The first step only makes the factors, so that the moments begin with the second.
        number = jnp.maximum(steps, 1)
        mean = optax.tree.bias_correction(mu, b1, number)
        means = map_arrays(_rotated(ROTATION), specs, mean, *state.bases)
        squares = optax.tree.bias_correction(nu, b2, number)
        # Adam in the eigenbasis, then back.
        directions = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), means, squares)
        directions = map_arrays(_rotated(INVERSE_ROTATION), specs, directions, *state.bases)
        factors: list[Any] = []
        bases: list[Any] = []
        for equation, factor, basis in zip(SQUARES, state.factors, state.bases, strict=True):
            of_side = functools.partial(next_factor, equation)
            factors.append(map_arrays(of_side, specs, updates, factor))
            of_basis = functools.partial(next_basis, steps)
            bases.append(map_arrays(of_basis, specs, updates, factors[-1], basis))
        steps = optax.safe_increment(steps)
        return directions, SoapState(steps, mu, nu, tuple(factors), tuple(bases))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _rotated(equations: tuple[str, str]) -> Callable[..., jax.Array]:
    """Return the function that multiplies each matrix X of a leaf by its bases: Q_L^T X Q_R with
    `ROTATION`, Q_L X Q_R^T with `INVERSE_ROTATION`."""

    def rotated(spec: Spec, leaf: jax.Array, left: Any, right: Any) -> jax.Array:
        x = matrix_axes(spec).matrices(leaf)
        if left is not None:
            x = jnp.einsum(equations[0], _square(left), x)
        if right is not None:
            x = jnp.einsum(equations[1], x, _square(right))
        return matrix_axes(spec).leaf(x, leaf.shape)

    return rotated


def _square(factor: NamedAxes) -> jax.Array:
    """Return a factor as [matrices, length, length]."""
    length = factor.value.shape[-1]
    return factor.value.reshape(-1, length, length)


soap = UpdateRule(_soap, ("b1", "b2", "eps", "soap_max_side"), ADAM)
