"""The settings of the optimizer and of its learning rate."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.config.settings import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    TableAt,
    Volatile,
    parsed_groups,
)
from jaxformer.files import ConfigError

OptimizerName = Annotated[
    Literal[
        "adamw", "adafactor", "lion", "sgd", "muon", "normuon", "soap", "sophia", "schedule_free"
    ],
    TableAt("jaxformer.training.optimizers.rule_table.OPTIMIZERS"),
]
Schedule = Annotated[
    Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"],
    TableAt("jaxformer.training.optimizers.schedules.SCHEDULES"),
]
Moments = Annotated[
    Literal["float32", "bfloat16", "int8"], TableAt("jaxformer.training.optimizers.moments.STORES")
]


# What a group of optimizer.groups may give: factors of its learning rate and its weight decay.
GROUP_WORDS = ("lr", "decay")


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    section = "optimizer"

    name: OptimizerName = "adamw"
    """Rule of the update. muon and normuon update the matrices of the layers, and leave all other
    parameters to AdamW. schedule_free wants schedule=constant."""
    learning_rate: NonNegative = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: Natural = 100
    """Number of steps of linear warm-up from 0."""
    decay_steps: Volatile[Natural] = 0
    """Step at which the decay ends; 0 uses train.steps. The rate then stays at its final value."""
    final_fraction: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    wsd_decay_fraction: Rate = 0.2
    """Fraction of the steps after the warm-up in which the wsd schedule decays, at least one step;
    0 is refused, because nothing would decay: that is the schedule constant."""
    weight_decay: NonNegative = 0.1
    """Weight decay, decoupled from the gradient and multiplied by the learning rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters to which weight decay applies: matrices, or all."""
    cautious: bool = False
    """Leave out the numbers of an update whose sign is not that of the gradient, and enlarge the
    others instead."""
    groups: str = ""
    """Factors of the learning rate and the weight decay of some parameters, as in
    'embed: lr 0.3, norm: decay 0'. A pattern is one of matrix, lookup, norm and bias, or a name or
    a pattern of the paths that `jaxformer shapes` lists."""
    muon_unit: Literal["matrix", "head"] = "matrix"
    """What muon and normuon orthogonalize at a time: a matrix, or the part of it that belongs to a
    head of attention."""
    soap_max_side: Count = 10_000
    """Longest side of a matrix for which soap keeps a factor, length x length numbers twice; longer
    sides, such as a vocabulary, have none."""
    moments: Moments = "float32"
    """How the moments of matrices are stored between steps: bfloat16 and int8 (blocks of up to 256
    numbers with a scale) are rounded at random, by the seed and the step."""
    b1: Rate = 0.9
    """Decay rate of the first moment (AdamW, Lion, Muon, and the momentum of SGD)."""
    b2: Rate = 0.95
    """Decay rate of the second moment."""
    eps: NonNegative = 1e-8
    """Constant added to the square root of the second moment."""
    clip_norm: NonNegative = 1.0
    """Maximum global norm of the gradient; 0 disables clipping."""

    def conflicts(self) -> list[str]:
        try:
            parsed_groups(self.groups, GROUP_WORDS)
        except ConfigError as error:
            return [str(error)]
        return []
