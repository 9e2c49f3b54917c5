"""Schedule-free AdamW (arXiv:2405.15682), which needs no schedule."""

import optax
from optax.contrib import schedule_free as optax_schedule_free

from jaxformer.arrays.params import Specs
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.update_rule import UpdateRule


def _mean_square(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Adam without its first moment: the average of the weights takes its place."""
    return optax.scale_by_rms(c.b2, c.eps, eps_in_sqrt=False, bias_correction=True)


def _averaged(
    c: OptimizerConfig, schedule: optax.Schedule, base: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Schedule-free learning (arXiv:2405.15682). The parameters of the train state are y; the state
    of the optimizer holds z and b1, and the weights to evaluate are x = (y - (1 - b1) z) / b1.

    z -= r (g / sqrt(v) + d y), x = (1 - c) x + c z, y = (1 - b1) z + b1 x, with c = r^2 / sum r^2,
    in which r is the largest rate so far.
    """
    if not c.b1:
        raise ConfigError(
            "optimizer.b1=0.0: schedule_free divides by b1, the part of the average in the weights"
            " at which gradients are taken. Set it above 0, such as 0.9."
        )
    # optax counts the steps of its weights from 1, and those of the rate from 0.
    return optax_schedule_free(base, lambda count: schedule(count - 1), b1=c.b1)


schedule_free = UpdateRule(_mean_square, ("b1", "b2", "eps"), {"nu": False}, _averaged)
