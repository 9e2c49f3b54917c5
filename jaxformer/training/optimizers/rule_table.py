"""The table of update rules. Those of optax stand here, the others in the files that it names."""

import optax

from jaxformer.config.settings import ImportedRow, Table
from jaxformer.config.train import OptimizerConfig, OptimizerName
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.update_rule import ADAM, RULE_SETTINGS, UpdateRule, of_entries

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
        "schedule_free": ImportedRow("jaxformer.training.optimizers.schedule_free:schedule_free"),
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


def require_moments(config: OptimizerConfig) -> None:
    """Raises ConfigError for optimizer.moments that the chosen rule does not have."""
    if not OPTIMIZERS[config.name].moments:
        rules = ", ".join(name for name in OPTIMIZERS if OPTIMIZERS[name].moments)
        raise ConfigError(
            f"optimizer.moments={config.moments!r} rounds moments of the shape of a parameter, and"
            f" optimizer.name={config.name!r} has none: choose one of {rules}, or float32."
        )
