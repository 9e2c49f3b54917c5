"""`jaxformer evaluate RUN`: a run's loss on its held-out text, or on other text, and the BLEU of
what it translates."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxformer.config import ConfigError, ObjectiveName


@dataclasses.dataclass(frozen=True)
class Text:
    validation: str = ""
    """Text to evaluate on; empty takes what the run held out."""
    objective: ObjectiveName = "auto"
    """What a model directory is asked; auto: pairs of an encoder-decoder, else as its head has it.

    """


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """The loss of a trained run, perplexity and bits per byte or accuracy; with --beams the BLEU of
    its translations."""

    path: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a Hugging Face model directory."""
    data: Text = dataclasses.field(default_factory=Text)
    beams: int = 0
    """Translate the sources by a beam search of this width, and compare with the targets; 0 does
    not."""
    length_penalty: float = 0.6
    """Of the beam search; 0 favours short texts."""
    output: Path | None = None
    """A file for the translations, one on each line."""
    step: int | None = None
    """Checkpoint to read; the newest where it is not given."""


def run(arguments: Sequence[str]) -> int:
    asked = tyro.cli(
        EvaluateArguments, prog="jaxformer evaluate", args=arguments, use_underscores=True
    )
    if asked.output is not None and not asked.beams:
        raise ConfigError(
            "--output takes translations, which are made with --beams 5, for example."
        )
    if asked.output is not None and not asked.output.absolute().parent.is_dir():
        raise ConfigError(
            f"{asked.output} cannot be written: there is no directory"
            f" {asked.output.absolute().parent}."
        )
    from jaxformer.evaluation import evaluate_run

    if asked.beams:
        _translate(asked)
    print(told(evaluate_run(asked.path, asked.data.validation, asked.step, asked.data.objective)))
    return 0


def told(found: dict[str, float]) -> str:
    """An evaluation in one line."""
    loss = found["val_loss"]
    if "val_accuracy" in found:
        parts = [f"loss {loss:.4f} nats per target"]
    else:
        parts = [f"loss {loss:.4f} nats per token", f"perplexity {math.exp(min(loss, 700)):,.2f}"]
    return ", ".join(
        parts + [text.format(found[name]) for name, text in METRIC_FORMATS.items() if name in found]
    )


def _translate(asked: EvaluateArguments) -> None:
    """Prints the BLEU of the translations, and writes them where they are asked for."""
    from jaxformer.evaluation import translate_run
    from jaxformer.generation.translate import bleu_metric

    metric = bleu_metric()
    made = translate_run(
        asked.path,
        asked.data.validation,
        asked.step,
        beams=asked.beams,
        length_penalty=asked.length_penalty,
    )
    score = metric.corpus_score(made.outputs, [made.references]).score
    print(
        f"BLEU {score:.2f} of {len(made.outputs):,} texts with {asked.beams} beams"
        f" ({metric.get_signature()})"
    )
    if asked.output is not None:
        asked.output.write_text(
            "".join(" ".join(text.split()) + "\n" for text in made.outputs), encoding="utf-8"
        )
        print(f"{asked.output}: the translations, one on each line")


METRIC_FORMATS = {
    "val_bits_per_byte": "{:.4f} bits per byte",
    "val_accuracy": "accuracy {:.2%}",
    "val_next_sentence_accuracy": "next-sentence accuracy {:.2%}",
}
