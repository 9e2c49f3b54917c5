"""A row of the table of update rules, and what rules share: leaves as arrays and as matrices."""

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax

from jaxformer.arrays.params import Spec, Specs
from jaxformer.config.train import OptimizerConfig

Rule = Callable[[OptimizerConfig, Specs], optax.GradientTransformation]
WidthFactor = Callable[[OptimizerConfig, Spec], float]
# (config, schedule, the rule with decay and learning rate behind it) -> what a step adds.
Around = Callable[
    [OptimizerConfig, optax.Schedule, optax.GradientTransformation], optax.GradientTransformation
]


class UpdateRule(NamedTuple):
    """A row of `OPTIMIZERS`.

    `rule` makes the transformation from gradients to directions, which weight decay is added to and
    the learning rate multiplies. `reads` are the settings of `OptimizerConfig` that this rule reads
    and not every rule. `moments` are the fields of its state that optimizer.moments may round, and
    whether they have a sign. `around` is for rules that need the step itself, with decay and
    learning rate. `width_factor` is the factor of a leaf's directions with which one learning rate
    holds at all widths (`model.parametrization=mup`), by `Spec.growth`; None where none is known.
    """

    rule: Rule
    reads: tuple[str, ...] = ()
    moments: Mapping[str, bool] = MappingProxyType({})
    around: Around | None = None
    width_factor: WidthFactor | None = None


def of_entries(config: OptimizerConfig, spec: Spec) -> float:
    """Return the width factor of directions whose entries have one size whatever the gradient's, as
    Adam's and Lion's: 1 / fan-in (arXiv:2203.03466, table 3 and appendix B.3)."""
    return 1 / spec.growth[0]


# The moments of Adam, and of rules that have such moments.
ADAM = MappingProxyType({"mu": True, "nu": False})


def map_arrays(f: Callable[..., Any], table: Any, *trees: Any) -> Any:
    """Return `f(row, *arrays)` of every leaf: its row in a table of the parameters, and its array
    in each of the trees. Where the first tree has no array, as for leaves that do not learn, that
    stays."""

    def apply(row: Any, *nodes: Any) -> Any:
        if hasattr(nodes[0], "dtype"):
            return f(row, *nodes)
        return nodes[0]

    return jax.tree.map(apply, table, *trees)


class MatrixAxes(NamedTuple):
    """The axes of a leaf: those beside its matrices, of their inputs (left) and outputs (right)."""

    batch: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]

    def matrices(self, x: jax.Array) -> jax.Array:
        """Return a leaf as [matrices, inputs, outputs]."""
        ordered = x.transpose(self.batch + self.left + self.right)
        inputs = math.prod(x.shape[i] for i in self.left)
        outputs = math.prod(x.shape[i] for i in self.right)
        return ordered.reshape(-1, inputs, outputs)

    def leaf(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return matrices as the leaf of this shape."""
        order = self.batch + self.left + self.right
        ordered = matrices.reshape([shape[i] for i in order])
        return ordered.transpose(sorted(range(len(order)), key=lambda i: order[i]))


def matrix_axes(spec: Spec, beside: Collection[str] = ()) -> MatrixAxes:
    """Return the axes of the matrices of a leaf. `beside` are names of axes that count matrices
    too, as the batch axes of the spec do."""
    batch = []
    left = []
    right = []
    for i, axis in enumerate(spec.axes):
        if axis in spec.batch or axis in beside:
            batch.append(i)
        elif axis in spec.inputs:
            left.append(i)
        else:
            right.append(i)
    return MatrixAxes(tuple(batch), tuple(left), tuple(right))
