"""Leaves as matrices: which of their axes count matrices, and which are inputs and outputs."""

import math
from collections.abc import Collection
from typing import NamedTuple

import jax

from jaxformer.arrays.params import Spec


class MatrixAxes(NamedTuple):
    """The axes of a leaf: those beside its matrices, of their inputs (left) and outputs (right)."""

    batch: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]

    def matrices(self, x: jax.Array) -> jax.Array:
        """A leaf as [matrices, inputs, outputs]."""
        ordered = x.transpose(self.batch + self.left + self.right)
        inputs = math.prod(x.shape[i] for i in self.left)
        outputs = math.prod(x.shape[i] for i in self.right)
        return ordered.reshape(-1, inputs, outputs)

    def leaf(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Matrices as the leaf of this shape."""
        order = self.batch + self.left + self.right
        ordered = matrices.reshape([shape[i] for i in order])
        return ordered.transpose(sorted(range(len(order)), key=lambda i: order[i]))


def matrix_axes(spec: Spec, beside: Collection[str] = ()) -> MatrixAxes:
    """The axes of the matrices of a leaf. `beside` are names of axes that count matrices too, as
    the batch axes of the spec do."""
    names = (*spec.batch, *beside)
    batch = tuple(i for i, axis in enumerate(spec.axes) if axis in names)
    single = [i for i in range(len(spec.axes)) if i not in batch]
    left = tuple(i for i in single if spec.axes[i] in spec.inputs)
    return MatrixAxes(batch, left, tuple(i for i in single if i not in left))
