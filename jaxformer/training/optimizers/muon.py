"""Muon (arXiv:2502.16982) and NorMuon (arXiv:2510.05491) on the table of parameters."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonState, scale_by_muon

from jaxformer.arrays.params import NamedAxes, Spec, Specs, map_specs
from jaxformer.arrays.sharding import HEAD_AXES, PARAMETERS, explicit_axes, free_axes
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.update_rule import (
    ADAM,
    MatrixAxes,
    UpdateRule,
    map_arrays,
    matrix_axes,
    of_entries,
)

# The root mean square of an update, as of Adam's (arXiv:2502.16982).
UPDATE_RMS = 0.2
# f(x) = a x + b x^3 + c x^5 of Newton-Schulz, and how often it is applied.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def _muon(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return Muon on the blocks' matrices, a layer, a product and an expert at a time, and with
    optimizer.muon_unit head a head at a time; Adam on embeddings, output layer, norms and biases.

    Updates are scaled to the RMS that Adam's have, so one learning rate and decay serve both
    (arXiv:2502.16982).
    """

    # At a learning rate of -1 the update is the direction itself. A chain of one names its state in
    # checkpoints as optax's own rule does.
    adam = optax.adamw(-1.0, c.b1, c.b2, weight_decay=0.0, nesterov=True)
    rules = {"muon": optax.chain(_scale_by_muon(c, specs)), "adam": adam}
    return optax.partition(rules, _labels(c, specs, "muon"))


def _scale_by_muon(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return optax's rule of the same name, whose matrices are divided among the devices of a mesh
    by `newton_schulz`, with updates of Adam's RMS."""
    b1 = c.b1

    def direction(spec: Spec, mean: jax.Array, coefficients: jax.Array) -> jax.Array:
        axes: Any = _axes(c, spec)
        matrices = newton_schulz(axes.matrices(mean), coefficients, _dividing(c, spec))
        scale = jnp.sqrt(jnp.maximum(*matrices.shape[1:])) * UPDATE_RMS
        return axes.leaf(scale * matrices, mean.shape)

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        # Nesterov's: the mean as the next step would have it with the same gradient.
        ahead = jax.tree.map(
            lambda mean, gradient: b1 * mean + (1 - b1) * gradient,
            optax.tree.bias_correction(mu, b1, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, b1, count),
        )
        directions = map_arrays(
            lambda spec, mean: direction(spec, mean, state.ns_coeffs), specs, ahead
        )
        return directions, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(scale_by_muon(COEFFICIENTS).init, update)


def _labels(config: OptimizerConfig, specs: Specs, name: str) -> Any:
    """Return `name` for the leaves that have matrices to orthogonalize, "adam" for all others."""

    def label(_: str, spec: Spec) -> str:
        if _axes(config, spec) is None:
            return "adam"
        return name

    return map_specs(label, specs)


def _axes(config: OptimizerConfig, spec: Spec) -> MatrixAxes | None:
    """Return the axes of the matrices that are orthogonalized; None for a leaf that has none."""
    if not (spec.is_matrix and spec.is_stacked):
        return None
    return matrix_axes(spec, HEAD_AXES if config.muon_unit == "head" else ())


def _normuon(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return NorMuon on the leaves that Muon takes, Adam on all others."""

    rules = {"normuon": scale_by_normuon(c, specs), "adam": optax.scale_by_adam(c.b1, c.b2, c.eps)}
    return optax.partition(rules, _labels(c, specs, "normuon"))


class NorMuonState(NamedTuple):
    """`mu` is the mean of gradients; `nu` has one number for each output of a matrix."""

    mu: Any
    nu: Any


def scale_by_normuon(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return Muon whose directions are normalized by the mean square of each neuron
    (arXiv:2510.05491).

    With the gradient G [inputs, outputs] and Newton-Schulz NS:
    M = b1 M + (1 - b1) G, O = NS(M), v = b2 v + (1 - b2) mean(O^2 over inputs),
    U = O / (sqrt(v) + eps), and U -> 0.2 U / rms(U), of which the RMS is that of Adam's updates.
    The optimizer keeps M and the vector v.
    """
    b1 = config.b1
    b2 = config.b2
    eps = config.eps

    def init(params: Any) -> NorMuonState:
        return NorMuonState(optax.tree.zeros_like(params), map_arrays(of_neurons, specs, params))

    def of_neurons(spec: Spec, parameter: jax.Array) -> NamedAxes:
        """Return v of a leaf, whose axes of inputs have length 1."""
        inputs = axes_of(spec).left
        axes = list[str | None](spec.axes)
        for i in inputs:
            axes[i] = None
        zeros = jnp.zeros_like(parameter).mean(inputs, keepdims=True)
        return NamedAxes(zeros, tuple(axes))

    def axes_of(spec: Spec) -> Any:
        return _axes(config, spec)

    def orthogonal(spec: Spec, mean: jax.Array) -> jax.Array:
        axes = axes_of(spec)
        matrices = newton_schulz(axes.matrices(mean), COEFFICIENTS, _dividing(config, spec))
        return axes.leaf(matrices, mean.shape)

    def of_squares(spec: Spec, direction: jax.Array, nu: NamedAxes) -> NamedAxes:
        squares = jnp.mean(direction**2, axes_of(spec).left, keepdims=True)
        return NamedAxes(b2 * nu.value + (1 - b2) * squares, nu.axes)

    def normalized(spec: Spec, direction: jax.Array, nu: NamedAxes) -> jax.Array:
        direction = direction / (jnp.sqrt(nu.value) + eps)
        axes = axes_of(spec)
        squares = jnp.mean(direction**2, axes.left + axes.right, keepdims=True)
        # Of a gradient that is zero the direction is zero.
        return UPDATE_RMS * direction / jnp.sqrt(jnp.where(squares > 0, squares, 1))

    def update(updates: Any, state: NorMuonState, params: Any = None) -> tuple[Any, NorMuonState]:
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        directions = map_arrays(orthogonal, specs, mu)
        nu = map_arrays(of_squares, specs, directions, state.nu)
        return map_arrays(normalized, specs, directions, nu), NorMuonState(mu, nu)

    return optax.GradientTransformation(init, update)


def _dividing(config: OptimizerConfig, spec: Spec) -> tuple[str, ...]:
    """Return the axes of the mesh in force that divide the width of weights, among whose devices
    the matrices of a leaf are divided; none where the mesh divides experts or heads, which have
    matrices too, and none with explicit axes, where types say what is placed."""
    if explicit_axes():
        return ()
    sizes = {name: size for name, size in free_axes().items() if size > 1}
    axes = _axes(config, spec)
    for axis in () if axes is None else axes.batch:
        if sizes.keys() & {*PARAMETERS.get(spec.axes[axis], ())}:
            return ()
    return tuple(name for name in PARAMETERS["embed"] if name in sizes)


def newton_schulz(
    matrices: jax.Array, coefficients: Any = COEFFICIENTS, dividing: tuple[str, ...] = ()
) -> jax.Array:
    """Return each of [matrices, inputs, outputs] with its singular values near 1: five iterations
    of a x + b x^3 + c x^5 on them, which begin with a Frobenius norm of 1.

    Each device of the axes `dividing` of the mesh has some of the matrices as a whole: they are
    exchanged before and after: an update of llama_1b with fsdp 8 sends and receives 0.98 GiB a
    device. Where each has a part of all, products gather them 12 times, 40 GiB.
    """
    if dividing:
        number = len(matrices)
        devices = math.prod(free_axes()[name] for name in dividing)
        # Zeros stay zeros.
        padded = jnp.pad(matrices, ((0, -number % devices), (0, 0), (0, 0)))
        divided = PartitionSpec(dividing)
        whole = jax.lax.with_sharding_constraint(padded, divided)
        whole = newton_schulz(whole, coefficients)
        return jax.lax.with_sharding_constraint(whole, divided)[:number]
    a, b, c = coefficients
    # The products below are of the shorter side: a wide matrix costs less than a tall one.
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.swapaxes(1, 2) if is_tall else matrices
    # No singular value is above 1, from where the iterations converge.
    # [matrices, short, long]
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-8)
    # Singular values are then within about 30 % of 1, at the price of 15 products; equal ones would
    # need an SVD, which accelerators are slow at.
    for _ in range(ITERATIONS):
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    if is_tall:
        return x.swapaxes(1, 2)
    return x


def of_orthogonal(config: OptimizerConfig, spec: Spec) -> float:
    """Return the width factor of Muon's directions of the matrices of blocks, whose spectral norm,
    0.2 sqrt(max(fan-in, fan-out)), has to grow as sqrt(fan-out / fan-in) does (the spectral
    condition, arXiv:2310.17813): 1 / sqrt(m) for a square matrix m times as wide."""
    if not (spec.is_matrix and spec.is_stacked):
        return of_entries(config, spec)
    if config.muon_unit == "head":
        raise ConfigError(
            "optimizer.muon_unit='head' has no rule by which its learning rate holds at all widths,"
            " as model.parametrization='mup' asks: use 'matrix', or the parametrization 'standard'."
        )
    grown_in, grown_out = spec.growth
    longest = max(spec.fan_in, spec.fan_out) / max(spec.scale_fans)
    return math.sqrt(grown_out / (grown_in * longest))


muon = UpdateRule(_muon, ("b1", "b2", "muon_unit"), ADAM, width_factor=of_orthogonal)
normuon = UpdateRule(_normuon, ("b1", "b2", "eps", "muon_unit"), ADAM, width_factor=of_orthogonal)
