"""The table of update rules, from optax and of this folder."""

from collections.abc import Callable

import optax

from jaxformer.arrays.params import Specs
from jaxformer.config.optimizer import OptimizerConfig, OptimizerName
from jaxformer.config.settings import Table
from jaxformer.training.optimizers.muon import muon

Rule = Callable[[OptimizerConfig, Specs], optax.GradientTransformation]


def _adafactor(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Factored second moments and clipped updates, at the schedule's own rate (arXiv:1804.04235).

    Moments are factored over the two longest axes of a leaf: those of the matrix of each layer and
    expert, unless there are more experts than the matrix has rows or columns. The updates of all
    layers and experts of a leaf are clipped together.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


OPTIMIZERS: Table[Rule] = Table(
    OptimizerName,
    {
        "adamw": lambda c, specs: optax.scale_by_adam(c.b1, c.b2, c.eps),
        "adafactor": _adafactor,
        "lion": lambda c, specs: optax.scale_by_lion(c.b1, c.b2),
        "sgd": lambda c, specs: optax.trace(c.b1),
        "muon": muon,
    },
)
