"""A row of the table of update rules, and what rules share: leaves as arrays and as matrices."""

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax

from jaxformer.arrays.params import Spec, Specs
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError

Rule = Callable[[OptimizerConfig, Specs], optax.GradientTransformation]
WidthFactor = Callable[[OptimizerConfig, Spec], float]
# (config, schedule, the rule with decay and learning rate behind it) -> what a step adds.
Around = Callable[
    [OptimizerConfig, optax.Schedule, optax.GradientTransformation], optax.GradientTransformation
]


class UpdateRule(NamedTuple):
    """A row of `OPTIMIZERS`.

    `rule` makes the transformation from gradients to directions, which weight decay is added to and
    the learning rate multiplies. `reads` are those of `RULE_SETTINGS` that it reads. `moments` are
    the fields of its state that optimizer.moments may round, and whether they have a sign. `around`
    is for rules that need the step itself, with decay and learning rate. `width_factor` is the
    factor of a leaf's directions with which one learning rate holds at all widths
    (`model.parametrization=mup`), by `Spec.growth`; None where none is known.
    """

    rule: Rule
    reads: tuple[str, ...] = ()
    moments: Mapping[str, bool] = MappingProxyType({})
    around: Around | None = None
    width_factor: WidthFactor | None = None


def of_entries(config: OptimizerConfig, spec: Spec) -> float:
    """The width factor of directions whose entries have one size whatever the gradient's, as Adam's
    and Lion's: 1 / fan-in (arXiv:2203.03466, table 3 and appendix B.3)."""
    return 1 / spec.growth[0]


def of_orthogonal(config: OptimizerConfig, spec: Spec) -> float:
    """The width factor of Muon's directions of the matrices of blocks, whose spectral norm, 0.2
    sqrt(max(fan-in, fan-out)), has to grow as sqrt(fan-out / fan-in) does (the spectral condition,
    arXiv:2310.17813): 1 / sqrt(m) for a square matrix m times as wide."""
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


# The moments of Adam, and of rules that have such moments.
ADAM = MappingProxyType({"mu": True, "nu": False})
# The settings of rules; the rest of `OptimizerConfig` holds for every row.
RULE_SETTINGS = ("b1", "b2", "eps", "muon_unit", "soap_max_side")


def map_arrays(f: Callable[..., Any], table: Any, *trees: Any) -> Any:
    """`f(row, *arrays)` of every leaf: its row in a table of the parameters, and its array in each
    of the trees. Where the first tree has no array, as for leaves that do not learn, that stays.
    """

    def apply(row: Any, *nodes: Any) -> Any:
        return f(row, *nodes) if hasattr(nodes[0], "dtype") else nodes[0]

    return jax.tree.map(apply, table, *trees)


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
