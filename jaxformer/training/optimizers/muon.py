"""Muon (arXiv:2502.16982) on the table of parameters."""

import optax
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon as optax_muon

from jaxformer.arrays.params import Spec, Specs, map_specs
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.training.optimizers.rule import UpdateRule


def _muon(c: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Muon on the blocks' matrices, a layer, a product and an expert at a time; Adam on embeddings,
    output layer, norms and biases.

    Updates are scaled to the RMS that Adam's have, so one learning rate and decay serve both
    (arXiv:2502.16982).
    """

    def numbers(_: str, spec: Spec) -> MuonDimensionNumbers | None:
        if not (spec.is_matrix and spec.is_stacked):
            return None
        axes = [i for i, axis in enumerate(spec.axes) if axis not in spec.batch]
        shared = tuple(i for i in axes if spec.axes[i] in spec.inputs)
        return MuonDimensionNumbers(shared, tuple(i for i in axes if i not in shared))

    table = map_specs(numbers, specs)
    # At a learning rate of -1 the update is the direction itself.
    return optax_muon(
        -1.0,
        beta=c.b1,
        adam_b1=c.b1,
        adam_b2=c.b2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: table,
    )


muon = UpdateRule(_muon, ("b1", "b2"))
