"""The table of update rules. Those of optax stand here, the others in the files that it names."""

import optax

from jaxformer.arrays.params import Specs
from jaxformer.config.settings import ImportedRow, Table
from jaxformer.config.train import OptimizerConfig, OptimizerName
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.update_rule import ADAM, RULE_SETTINGS, UpdateRule, of_entries


def _adafactor(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Factored second moments and clipped updates, at the schedule's own rate (arXiv:1804.04235).

    Moments are factored over the two longest axes of a leaf: those of the matrix of each layer and
    expert, unless there are more experts than the matrix has rows or columns. The updates of all
    layers and experts of a leaf are clipped together.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


OPTIMIZERS: Table[UpdateRule] = Table(
    OptimizerName,
    {
        "adamw": UpdateRule(
            lambda c, specs: optax.scale_by_adam(c.b1, c.b2, c.eps),
            ("b1", "b2", "eps"),
            ADAM,
            width_factor=of_entries,
        ),
        "adafactor": UpdateRule(_adafactor),
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
