"""The settings of the optimizer and of its learning rate."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.config.settings import (
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    TableAt,
    Volatile,
)

OptimizerName = Annotated[
    Literal["adamw", "adafactor", "lion", "sgd", "muon"],
    TableAt("jaxformer.training.optimizers.rules.OPTIMIZERS"),
]
Schedule = Annotated[
    Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"],
    TableAt("jaxformer.training.optimizers.schedules.SCHEDULES"),
]


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    section = "optimizer"

    name: OptimizerName = "adamw"
    """Optimizer from optax. muon updates matrices and leaves all other parameters to AdamW."""
    learning_rate: NonNegative = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: Natural = 100
    """Number of steps of linear warm-up from 0."""
    decay_steps: Volatile[Natural] = 0
    """Step at which the decay ends; 0 uses train.steps. The rate then stays at its final value,
    unless rewarm_steps is set."""
    rewarm_steps: Volatile[Natural] = 0
    """Steps after decay_steps in which the rate rises to its peak again, linearly, before the
    schedule decays once more until train.steps; 0: it stays at its final value."""
    final_fraction: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    wsd_decay_fraction: Rate = 0.2
    """Fraction of the steps in which the wsd schedule decays."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters to which weight decay applies: matrices, or all."""
    b1: Rate = 0.9
    """Decay rate of the first moment (AdamW, Lion, Muon, and the momentum of SGD)."""
    b2: Rate = 0.95
    """Decay rate of the second moment."""
    eps: NonNegative = 1e-8
    """Constant added to the square root of the second moment."""
    clip_norm: NonNegative = 1.0
    """Maximum global norm of the gradient; 0 disables clipping."""
