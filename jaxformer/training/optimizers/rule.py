"""A row of the table of update rules."""

from collections.abc import Callable
from typing import NamedTuple

import optax

from jaxformer.arrays.params import Specs
from jaxformer.config.optimizer import OptimizerConfig

Rule = Callable[[OptimizerConfig, Specs], optax.GradientTransformation]


class UpdateRule(NamedTuple):
    """A row of `OPTIMIZERS`.

    `rule` makes the transformation from gradients to directions, which weight decay is added to and
    the learning rate multiplies. `reads` are those of `RULE_SETTINGS` that it reads.
    """

    rule: Rule
    reads: tuple[str, ...] = ()


# The settings of rules; the rest of `OptimizerConfig` holds for every row.
RULE_SETTINGS = ("b1", "b2", "eps", "muon_unit")
