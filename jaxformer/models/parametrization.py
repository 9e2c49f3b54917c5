"""Parametrizations: how the initial values and the learning rates of a model follow its width.

In the standard one nothing follows it but what an initializer reads from the shape. In the maximal
update parametrization, muP (Tensor Programs V, arXiv:2203.03466, table 3), the settings are those
of a base model, `model.mup_base`, and each leaf is scaled by how many times its fan-in (m) and its
fan-out are those of its row in the base:

                                    initial scale   Adam's rate   what it is
    fan-in as in the base           1               1             embeddings, norms, biases
    fan-in and fan-out grow         1 / sqrt(m)     1 / m         matrices of blocks
    fan-in alone grows              1 / m           1 / m         output layers, routers

The rates are applied by the optimizer (`training/optimizers/run_optimizer.py`). Scores of attention
fall as 1 / head_width (`ModelConfig.score_scale`), and the logits of a tied head are divided by m
(`layers/head.total_divisor`). Where all widths are those of the base all factors are 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from jaxformer.arrays.params import Spec, Specs, map_specs, rows, scaled
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import Parametrization
from jaxformer.files import ConfigError, first_of

SpecsOf = Callable[[ModelConfig], Specs]


def _standard(specs_of: SpecsOf, config: ModelConfig) -> Specs:
    return specs_of(config)


def _mup(specs_of: SpecsOf, config: ModelConfig) -> Specs:
    """The table of the config, each row with the fans and the initial scale of the base's row.

    Raises ConfigError where the two models have different parameters.
    """
    table, base = specs_of(config), rows(specs_of(config.base_model))
    different = sorted(rows(table).keys() ^ base.keys())
    if different:
        raise ConfigError(
            f"model.mup_base={config.mup_base!r} and this model differ in"
            f" {first_of(different, between=', ')}: name widths there with which both have the same"
            " parameters."
        )
    return map_specs(lambda path, spec: _widened(spec, base[path]), table)


def _widened(spec: Spec, base: Spec) -> Spec:
    """The row `spec`, which begins as its row in the base does but for the factor of table 3."""
    widened = replace(spec, init=base.init, base_fans=(base.fan_in, base.fan_out))
    grown_in, grown_out = widened.growth
    factor = 1 / grown_in if grown_out == 1 else 1 / math.sqrt(grown_in)
    return widened if factor == 1 else replace(widened, init=scaled(base.init, factor))


PARAMETRIZATIONS: Table[Callable[[SpecsOf, ModelConfig], Specs]] = Table(
    Parametrization, {"standard": _standard, "mup": _mup}
)
