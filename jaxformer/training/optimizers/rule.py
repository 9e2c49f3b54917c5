"""A row of the table of update rules."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import optax

from jaxformer.arrays.params import Specs
from jaxformer.config.optimizer import OptimizerConfig

Rule = Callable[[OptimizerConfig, Specs], optax.GradientTransformation]
# (config, schedule, the rule with decay and learning rate behind it) -> what a step adds.
Around = Callable[
    [OptimizerConfig, optax.Schedule, optax.GradientTransformation], optax.GradientTransformation
]


class UpdateRule(NamedTuple):
    """A row of `OPTIMIZERS`.

    `rule` makes the transformation from gradients to directions, which weight decay is added to and
    the learning rate multiplies. `reads` are those of `RULE_SETTINGS` that it reads. `moments` are
    the fields of its state that optimizer.moments may round, and whether they have a sign. `around`
    is for rules that need the step itself, with decay and learning rate.
    """

    rule: Rule
    reads: tuple[str, ...] = ()
    moments: Mapping[str, bool] = MappingProxyType({})
    around: Around | None = None


# The moments of Adam, and of rules that have such moments.
ADAM = MappingProxyType({"mu": True, "nu": False})
# The settings of rules; the rest of `OptimizerConfig` holds for every row.
RULE_SETTINGS = (
    "b1",
    "b2",
    "eps",
    "muon_unit",
    "soap_every",
    "soap_max_side",
    "sophia_every",
    "sophia_gamma",
)
