"""`jaxformer evaluate RUN`: the loss of a model on held-out or other text, or the BLEU of its
translations."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxformer.cli.arguments import ModelArguments, check_output, parse
from jaxformer.config.run import ObjectiveName
from jaxformer.files import ConfigError, write_text

METRIC_FORMATS = {
    "val_bits_per_byte": "{:.4f} bits per byte",
    "val_accuracy": "accuracy {:.2%}",
    "val_next_sentence_accuracy": "next-sentence accuracy {:.2%}",
    "val_reward_margin": "reward margin {:.4f}",
    "val_reward_accuracy": "reward accuracy {:.2%}",
    "val_kl": "KL to the reference {:.4f}",
}


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(ModelArguments):
    """Prints the loss of a model, with perplexity and bits per byte or with accuracy; with
    --quantize also that of the quantized model, and with --beams the BLEU of its translations."""

    validation: Annotated[str, tyro.conf.arg(name="data.validation")] = ""
    """Text to evaluate on, as data.validation takes it. If empty, the held-out text of the run."""
    objective: Annotated[ObjectiveName, tyro.conf.arg(name="data.objective")] = "auto"
    """Objective of a Hugging Face model; auto selects pairs for an encoder-decoder, and the
    objective of its head otherwise."""
    cache_dir: Annotated[str, tyro.conf.arg(name="data.cache_dir")] = ""
    """Directory in which tokenized text is stored and found again. If empty, that of the
    environment variable JAXFORMER_DATA_CACHE, or else ~/.cache/jaxformer/data; never that which the
    run names."""
    beams: int = 0
    """Beam width for translating the sources, which are compared with the targets; 0 translates
    nothing."""
    length_penalty: float = 0.6
    """Length penalty of the beam search; 0 prefers short texts."""
    bleu_tokenizer: str = "auto"
    """Tokenizer of sacrebleu that splits translations and targets for BLEU, such as 13a, intl, zh,
    ja-mecab, ko-mecab or char; auto chooses by the script of the targets."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Text file for the translations, one per line."""


def run(arguments: Sequence[str]) -> int:
    asked = parse(EvaluateArguments, "evaluate", arguments)
    if asked.output is not None and not asked.beams:
        raise ConfigError("--output is for translations: add --beams, for example --beams 5.")
    check_output(asked.output)
    from jaxformer.report import ProgressBar
    from jaxformer.runs.run_evaluation import evaluate_run

    if asked.beams:
        _translate(asked)
    place = (asked.path, asked.validation, asked.step)
    for kind in (None, asked.quantize) if asked.quantize else (None,):
        with ProgressBar(0, stream=sys.stderr) as progress:
            options: dict[str, Any] = {"quantize": kind, "watch": progress.evaluation}
            found = evaluate_run(*place, asked.objective, asked.cache_dir, **options)
        print(f"{kind or 'unquantized'}: {told(found)}" if asked.quantize else told(found))
        if not math.isfinite(found["val_loss"]):
            print(
                f"not finite: the loss of {asked.path} is {found['val_loss']}; evaluate an earlier"
                " checkpoint with --step.",
                file=sys.stderr,
            )
            return 1
    return 0


def told(found: dict[str, float]) -> str:
    """An evaluation in one line."""
    loss = found["val_loss"]
    if "val_reward_margin" in found:
        parts = [f"loss {loss:.4f} per pair"]
    elif "val_accuracy" in found:
        parts = [f"loss {loss:.4f} nats per target"]
    else:
        parts = [f"loss {loss:.4f} nats per token", f"perplexity {math.exp(min(loss, 700)):,.2f}"]
    parts += [text.format(found[name]) for name, text in METRIC_FORMATS.items() if name in found]
    return ", ".join(parts)


def _translate(asked: EvaluateArguments) -> None:
    """Prints the BLEU of the translations, and writes them to --output."""
    from jaxformer.runs.run_evaluation import translate_run
    from jaxformer.runs.translate import bleu_metric

    bleu_metric((), asked.bleu_tokenizer)  # raises now rather than after the translation
    search: dict[str, Any] = {
        "quantize": asked.quantize,
        "beams": asked.beams,
        "length_penalty": asked.length_penalty,
    }
    made = translate_run(asked.path, asked.validation, asked.step, asked.cache_dir, **search)
    metric = bleu_metric(made.references, asked.bleu_tokenizer)
    score = metric.corpus_score(made.outputs, [made.references]).score
    print(
        f"BLEU {score:.2f} of {len(made.outputs):,} texts with {asked.beams} beams"
        f" ({metric.get_signature()})"
    )
    if asked.output is not None:
        lines = (" ".join(text.split()) + "\n" for text in made.outputs)
        write_text(asked.output, "".join(lines))
        print(f"{asked.output}: the translations, one per line")
