"""The table of update rules. Those of optax stand here, the others in the files that it names."""

import optax

from jaxformer.config.settings import ImportedRow, Table
from jaxformer.config.train import OptimizerConfig, OptimizerName
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.update_rule import ADAM, RULE_SETTINGS, UpdateRule, of_entries


def _schedule_free(
    c: OptimizerConfig, schedule: optax.Schedule, base: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Schedule-free learning (arXiv:2405.15682). The parameters of the train state are y; the state
    of the optimizer holds z and b1, and the weights to evaluate are x = (y - (1 - b1) z) / b1.

    The average takes the place of Adam's first moment.
    z -= r (g / sqrt(v) + d y), x = (1 - c) x + c z, y = (1 - b1) z + b1 x, with c = r^2 / sum r^2,
    in which r is the largest rate so far.
    """
    if not c.b1:
        raise ConfigError(
            "optimizer.b1=0.0: schedule_free divides by b1, the part of the average in the weights"
            " at which gradients are taken. Set it above 0, such as 0.9."
        )
    # optax counts the steps of its weights from 1, and those of the rate from 0.
    return optax.contrib.schedule_free(base, lambda count: schedule(count - 1), b1=c.b1)


OPTIMIZERS: Table[UpdateRule] = Table(
    OptimizerName,
    {
        "adamw": UpdateRule(
            lambda c, specs: optax.scale_by_adam(c.b1, c.b2, c.eps),
            ("b1", "b2", "eps"),
            ADAM,
            width_factor=of_entries,
        ),
        "adafactor": ImportedRow("jaxformer.training.optimizers.adafactor:adafactor"),
        "lion": UpdateRule(
            lambda c, specs: optax.scale_by_lion(c.b1, c.b2),
            ("b1", "b2"),
            {"mu": True},
            width_factor=of_entries,
        ),
        "sgd": UpdateRule(lambda c, specs: optax.trace(c.b1), ("b1",), {"trace": True}),
        "muon": ImportedRow("jaxformer.training.optimizers.muon:muon"),
        "normuon": ImportedRow("jaxformer.training.optimizers.muon:normuon"),
        "soap": ImportedRow("jaxformer.training.optimizers.soap:soap"),
        "sophia": ImportedRow("jaxformer.training.optimizers.sophia:sophia"),
        "schedule_free": UpdateRule(
            lambda c, specs: optax.scale_by_rms(
                c.b2, c.eps, eps_in_sqrt=False, bias_correction=True
            ),
            ("b1", "b2", "eps"),
            {"nu": False},
            _schedule_free,
        ),
    },
)


def unread(config: OptimizerConfig) -> list[str]:
    """The settings of rules, with their values, that differ from the default and that the chosen
    rule does not read."""
    default = OptimizerConfig()
    return [
        f"optimizer.{name}={value}"
        for name in RULE_SETTINGS
        if name not in OPTIMIZERS[config.name].reads
        for value in [getattr(config, name)]
        if value != getattr(default, name)
    ]
