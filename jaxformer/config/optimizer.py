"""The settings of the optimizer and of its learning rate."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from jaxformer.config.settings import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    TableAt,
    Volatile,
)
from jaxformer.files import ConfigError

OptimizerName = Annotated[
    Literal[
        "adamw",
        "adafactor",
        "lion",
        "sgd",
        "muon",
        "normuon",
        "soap",
        "sophia",
        "schedule_free",
        "prodigy",
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


class Group(NamedTuple):
    """Leaves that a pattern names, and the factors of their learning rate and weight decay."""

    pattern: str
    rate: float = 1.0
    decay: float = 1.0


# The words of optimizer.groups, and the field of `Group` that each sets.
FACTORS = {"lr": "rate", "decay": "decay"}


def parsed_groups(text: str) -> list[Group]:
    """The groups of optimizer.groups, as in "embed: lr 0.3, norm: lr 2 decay 0"."""
    groups = []
    for entry in filter(str.strip, text.split(",")):
        pattern, _, settings = (piece.strip() for piece in entry.partition(":"))
        words, numbers = settings.split()[::2], settings.split()[1::2]
        factors = {FACTORS.get(w, ""): _factor(n) for w, n in zip(words, numbers, strict=False)}
        complete = 0 < len(words) == len(numbers) == len(factors)
        if not (pattern and complete and "" not in factors and None not in factors.values()):
            raise ConfigError(
                f"optimizer.groups: {entry.strip()!r} is not of the form 'PATTERN: lr FACTOR decay"
                " FACTOR' with lr, decay or both, each with a finite factor of at least 0."
                " Groups are separated by commas, as in 'embed: lr 0.3, norm: decay 0'."
            )
        groups.append(Group(pattern, **factors))  # type: ignore[arg-type]
    return groups


def _factor(text: str) -> float | None:
    """A finite number of at least 0; None for any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    section = "optimizer"

    name: OptimizerName = "adamw"
    """Rule of the update. muon and normuon update the matrices of the layers, and leave all other
    parameters to AdamW. schedule_free wants schedule=constant, and prodigy learning_rate=1."""
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
            parsed_groups(self.groups)
        except ConfigError as error:
            return [str(error).removeprefix("optimizer.")]
        return []
