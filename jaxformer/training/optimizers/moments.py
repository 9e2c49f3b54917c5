"""Moments of optimizers in 16 or 8 bits, rounded at random so that small changes are not lost."""

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.arrays.params import NamedAxes, Spec, Specs, dotted
from jaxformer.config.settings import Table
from jaxformer.config.train import Moments

# Numbers of a matrix that share a scale, at most (arXiv:2110.02861 has 2048 of a flattened tensor).
MOMENT_BLOCK = 256

# (key, moment, spec, has_sign) -> what is stored of a moment of float32.
Store = Callable[[jax.Array, jax.Array, Spec, bool], Any]


class RoundedState(NamedTuple):
    """The number of updates, of which the random bits are made, and the state of the rule with its
    moments as they are stored."""

    steps: jax.Array
    rule: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["has_sign"]
)
@dataclass(frozen=True)
class BlockCodes:
    """A moment in 8 bits: codes (uint8) of the shape of its matrix, and the number of the
    largest magnitude of each block of successive numbers of the last axis (float32)."""

    codes: NamedAxes
    scales: NamedAxes
    has_sign: bool


def with_stored_moments(
    rule: optax.GradientTransformation,
    moments: Mapping[str, bool],
    kind: Moments,
    specs: Specs,
    seed: int,
) -> optax.GradientTransformationExtraArgs:
    """Return the rule, with the moments of matrices stored as `kind` between two steps.

    Args:
      rule: any rule that computes in float32.
      moments: the fields of its state that are moments, and whether they have a sign.
      kind: a row of `STORES`.
      specs: the table of parameters. Vectors keep float32: they are small.
      seed: with the number of the update it gives the random bits, so that a run that continues is
          bitwise the one that was not interrupted.
    """
    rule = optax.with_extra_args_support(rule)
    store = STORES[kind]
    rows_of = {path: spec for path, spec in jax.tree.leaves_with_path(specs) if spec.is_matrix}
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"moments"))

    def stored(state: Any, steps: jax.Array) -> Any:
        step_key = jax.random.fold_in(key, steps)

        def of_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
            for i, entry in enumerate(path):
                name = getattr(entry, "name", "")
                spec = rows_of.get(path[i + 1 :])
                if name in moments and spec is not None and spec.shape == leaf.shape:
                    # By the path, so that leaves of one shape are not rounded by the same bits.
                    leaf_key = jax.random.fold_in(step_key, zlib.crc32(dotted(path).encode()))
                    return store(leaf_key, leaf, spec, moments[name])
            return leaf

        return jax.tree.map_with_path(of_leaf, state)

    def init(params: Any) -> RoundedState:
        return RoundedState(jnp.int32(0), stored(rule.init(params), jnp.int32(0)))

    def update(
        updates: Any, state: RoundedState, params: Any = None, **extra: Any
    ) -> tuple[Any, RoundedState]:
        steps = optax.safe_increment(state.steps)
        # The rule computes in float32: only what stays between two steps is rounded, at the price
        # of one pass over the moments in a step.
        directions, after = rule.update(updates, restored(state.rule), params, **extra)
        return directions, RoundedState(steps, stored(after, steps))

    return optax.GradientTransformationExtraArgs(init, update)


def restored(state: Any) -> Any:
    """Return the state of a rule with its moments in float32."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, BlockCodes):
            codes = leaf.codes.value
            scales = leaf.scales.value
            numbers = jnp.asarray(code_book(leaf.has_sign))[codes]
            blocks = numbers.reshape(*scales.shape, -1) * scales[..., None]
            return blocks.reshape(codes.shape)
        if leaf.dtype == jnp.bfloat16:
            return leaf.astype(jnp.float32)
        return leaf

    return jax.tree.map(of_leaf, state, is_leaf=lambda node: isinstance(node, BlockCodes))


def _bfloat16(key: jax.Array, moment: jax.Array, spec: Spec, has_sign: bool) -> jax.Array:
    """Round up or down, to each with the probability that keeps its mean: 16 random bits are added
    to the float32 before its lower 16 bits are cut."""
    noise = jax.random.bits(key, moment.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(moment.astype(jnp.float32), jnp.uint32)
    upper = ((bits + noise) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(moment), rounded, moment.astype(jnp.bfloat16))


def _int8(key: jax.Array, moment: jax.Array, spec: Spec, has_sign: bool) -> BlockCodes:
    """Return the code of one of the two neighbors in `code_book` of each number over the largest
    number of its block, drawn with the probability that keeps its mean.

    A second moment that is not zero is not rounded to it, because updates are divided by its root.
    """
    book = jnp.asarray(code_book(has_sign))
    blocks = moment.reshape(*moment.shape[:-1], -1, block_length(moment.shape[-1]))
    # With its sign, so that the largest number of a block is not rounded.
    largest = jnp.abs(blocks).argmax(-1, keepdims=True)
    scales = jnp.take_along_axis(blocks, largest, -1)[..., 0]
    fractions = blocks / jnp.where(scales != 0, scales, 1)[..., None]
    # The code below each number, and how far it is on the way to the next one.
    below = jnp.clip(jnp.searchsorted(book, fractions, side="right") - 1, 0, len(book) - 2)
    share = (fractions - book[below]) / (book[below + 1] - book[below])
    codes = below + (jax.random.uniform(key, share.shape) < share)
    if not has_sign:
        codes = jnp.where(fractions > 0, jnp.maximum(codes, 1), codes)
    codes = codes.astype(jnp.uint8).reshape(moment.shape)
    return BlockCodes(NamedAxes(codes, spec.axes), NamedAxes(scales, spec.axes), has_sign)


def block_length(length: int) -> int:
    """Return the longest block of at most `MOMENT_BLOCK` numbers that divides an axis."""
    return next(size for size in range(min(length, MOMENT_BLOCK), 0, -1) if length % size == 0)


@functools.cache
def code_book(has_sign: bool) -> np.ndarray:
    """Return the 256 numbers of dynamic tree quantization (arXiv:2110.02861), ascending, float32:
    0, 1 and, for each power of ten from 1e-6 to 1, the centers of equal parts of [0.1, 1] of it,
    twice as many as for the power before. With a sign, half as many, each with both signs."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent
        if not has_sign:
            parts *= 2
        edges = np.linspace(0.1, 1, parts + 1)
        centers = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [*centers]
        if has_sign:
            numbers += [*-centers]
    return np.sort(np.array(numbers, np.float32))


STORES: Table[Store] = Table(Moments, {"bfloat16": _bfloat16, "int8": _int8}, besides=("float32",))
