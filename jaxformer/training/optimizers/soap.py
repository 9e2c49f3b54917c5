"""SOAP (arXiv:2409.11321): Adam in the eigenbasis of Shampoo's preconditioners."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.arrays.params import NamedAxes, Spec, Specs, map_specs
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.training.optimizers.update_rule import ADAM, UpdateRule, map_arrays, matrix_axes

# Steps from one improvement of the eigenvectors to the next, as in the paper.
BASIS_EVERY = 10


class SoapState(NamedTuple):
    """The number of steps, the means of the gradient and, in the basis, of its square; and for each
    side of a matrix its `factor`, L or R of the paper, with the `basis` of its eigenvectors. These
    are None for a side that is longer than optimizer.soap_max_side."""

    steps: jax.Array
    mu: Any
    nu: Any
    left_factor: Any
    right_factor: Any
    left_basis: Any
    right_basis: Any


def _soap(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """SOAP on matrices, embeddings among them; Adam on norms and biases."""
    rules = {"soap": scale_by_soap(c, specs), "adam": optax.scale_by_adam(c.b1, c.b2, c.eps)}
    return optax.partition(
        rules, map_specs(lambda _, spec: "soap" if spec.is_matrix else "adam", specs)
    )


def scale_by_soap(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Adam in the eigenbasis Q of the means L of G G^T and R of G^T G, for each matrix.

    G' = Q_L^T G Q_R, M = b1 M + (1 - b1) G, V = b2 V + (1 - b2) G'^2, and the direction is
    Q_L (M' / (sqrt(V) + eps)) Q_R^T with M' = Q_L^T M Q_R, both without their bias. Then L and R
    take up G, by b2, and every tenth step Q becomes the orthogonal factor of L Q.
    The first step moves nothing: it makes L and R, and their eigenvectors.
    """
    b1, b2, eps = config.b1, config.b2, config.eps
    longest = config.soap_max_side

    def init(params: Any) -> SoapState:
        moments = (optax.tree.zeros_like(params) for _ in range(2))
        # Arrays of their own for the bases, because a step donates all of them.
        factors = (
            map_arrays(lambda spec, _, of=of: _zeros(spec, of(spec), longest), specs, params)
            for of in (_left, _right, _left, _right)
        )
        return SoapState(jnp.int32(0), *moments, *factors)

    def update(updates: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        steps, bases = state.steps, (state.left_basis, state.right_basis)
        gradients = map_arrays(_rotated, specs, updates, *bases)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(gradients, state.nu, b2, 2)
        mu, nu = optax.tree.where(steps > 0, (mu, nu), (state.mu, state.nu))
        number = jnp.maximum(steps, 1)
        means = map_arrays(_rotated, specs, optax.tree.bias_correction(mu, b1, number), *bases)
        squares = optax.tree.bias_correction(nu, b2, number)
        directions = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), means, squares)
        directions = map_arrays(_rotated_back, specs, directions, *bases)
        left, right = (
            jax.tree.map(lambda new, old: (1 - b2) * new + b2 * old, products, means_before)
            for products, means_before in (
                (map_arrays(_left_product, specs, updates, state.left_factor), state.left_factor),
                (
                    map_arrays(_right_product, specs, updates, state.right_factor),
                    state.right_factor,
                ),
            )
        )
        left_basis = _next_bases(left, state.left_basis, steps)
        right_basis = _next_bases(right, state.right_basis, steps)
        steps = optax.safe_increment(steps)
        return directions, SoapState(steps, mu, nu, left, right, left_basis, right_basis)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _left(spec: Spec) -> tuple[int, ...]:
    return matrix_axes(spec).left


def _right(spec: Spec) -> tuple[int, ...]:
    return matrix_axes(spec).right


def _zeros(spec: Spec, side: tuple[int, ...], longest: int) -> NamedAxes | None:
    """Zeros for a factor [batch, *side, length], divided along the axes it belongs to; None for a
    side that is too long."""
    length = math.prod(spec.shape[i] for i in side)
    if length > longest:
        return None
    axes = (*matrix_axes(spec).batch, *side)
    shape = (*(spec.shape[i] for i in axes), length)
    return NamedAxes(jnp.zeros(shape), (*(spec.axes[i] for i in axes), None))


def _rotated(spec: Spec, leaf: jax.Array, left: Any, right: Any) -> jax.Array:
    """Q_L^T X Q_R of each matrix X of a leaf."""
    x = matrix_axes(spec).matrices(leaf)
    x = x if left is None else jnp.einsum("bmi,bmn->bin", _square(left), x)
    x = x if right is None else jnp.einsum("bmn,bnj->bmj", x, _square(right))
    return matrix_axes(spec).leaf(x, leaf.shape)


def _rotated_back(spec: Spec, leaf: jax.Array, left: Any, right: Any) -> jax.Array:
    """Q_L X Q_R^T of each matrix X of a leaf."""
    x = matrix_axes(spec).matrices(leaf)
    x = x if left is None else jnp.einsum("bmi,bin->bmn", _square(left), x)
    x = x if right is None else jnp.einsum("bmj,bnj->bmn", x, _square(right))
    return matrix_axes(spec).leaf(x, leaf.shape)


def _left_product(spec: Spec, gradient: jax.Array, factor: NamedAxes | None) -> NamedAxes | None:
    """G G^T, as the factor L is stored."""
    g = matrix_axes(spec).matrices(gradient)
    return _like(factor, jnp.einsum("bmn,bkn->bmk", g, g)) if factor else None


def _right_product(spec: Spec, gradient: jax.Array, factor: NamedAxes | None) -> NamedAxes | None:
    """G^T G, as the factor R is stored."""
    g = matrix_axes(spec).matrices(gradient)
    return _like(factor, jnp.einsum("bmn,bmk->bnk", g, g)) if factor else None


def _like(factor: NamedAxes, matrices: jax.Array) -> NamedAxes:
    return NamedAxes(matrices.reshape(factor.value.shape), factor.axes)


def _square(factor: NamedAxes) -> jax.Array:
    """A factor as [matrices, length, length]."""
    length = factor.value.shape[-1]
    return factor.value.reshape(-1, length, length)


def _next_bases(factors: Any, bases: Any, steps: jax.Array) -> Any:
    """The eigenvectors of the factors: computed in the first step, improved by a step of the power
    method with a QR decomposition each `BASIS_EVERY` steps, and else as they are."""

    def next_basis(factor: NamedAxes, basis: NamedAxes) -> NamedAxes:
        branches = [
            lambda matrix, vectors: vectors,
            lambda matrix, vectors: jnp.linalg.qr(matrix @ vectors)[0],
            lambda matrix, vectors: jnp.linalg.eigh(matrix)[1],
        ]
        branch = jnp.where(steps == 0, 2, jnp.where(steps % BASIS_EVERY == 0, 1, 0))
        vectors = jax.lax.switch(branch, branches, _square(factor), _square(basis))
        return _like(basis, vectors)

    return jax.tree.map(
        next_basis, factors, bases, is_leaf=lambda node: isinstance(node, NamedAxes)
    )


soap = UpdateRule(_soap, ("b1", "b2", "eps", "soap_max_side"), ADAM)
