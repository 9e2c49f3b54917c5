"""`jaxformer evaluate RUN`: a run's loss on its held-out text, or on other text."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Text:
    validation: str = ""  # Text to evaluate on; empty takes what the run held out.


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Loss, perplexity and bits per byte of a trained run."""

    path: Annotated[Path, tyro.conf.Positional]  # Run directory.
    data: Text = dataclasses.field(default_factory=Text)
    step: int | None = None  # Checkpoint to read; the newest where it is not given.


def run(arguments: Sequence[str]) -> int:
    asked = tyro.cli(Arguments, prog="jaxformer evaluate", args=arguments, use_underscores=True)
    from jaxformer.evaluate import evaluate_run

    found = evaluate_run(asked.path, asked.data.validation, asked.step)
    print(
        f"loss {found['val_loss']:.4f} nats per token, perplexity {math.exp(found['val_loss']):,.2f}, "
        f"{found['val_bits_per_byte']:.4f} bits per byte"
    )
    return 0
