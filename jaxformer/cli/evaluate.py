"""`jaxformer evaluate RUN`: the loss of a model on held-out or other text, or the BLEU of its
translations."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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
    environment variable JAXFORMER_DATA_CACHE, or else ~/.cache/jaxformer/data; never the one that
    the run names."""
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


def run(argv: Sequence[str]) -> int:
    args = parse(EvaluateArguments, "evaluate", argv)
    if args.output is not None and not args.beams:
        raise ConfigError("--output is for translations: add --beams, for example --beams 5.")
    check_output(args.output)
    from jaxformer.report import ProgressBar
    from jaxformer.runs.run_evaluation import evaluate_run

    if args.beams:
        _translate(args)
    for kind in (None, args.quantize) if args.quantize else (None,):
        with ProgressBar(0, stream=sys.stderr) as progress:
            metrics = evaluate_run(
                args.path,
                args.validation,
                args.step,
                args.objective,
                args.cache_dir,
                quantize=kind,
                watch=progress.evaluation,
            )
        line = _metrics_line(metrics)
        print(f"{kind or 'unquantized'}: {line}" if args.quantize else line)
        if not math.isfinite(metrics["val_loss"]):
            print(
                f"not finite: the loss of {args.path} is {metrics['val_loss']}; evaluate an earlier"
                " checkpoint with --step.",
                file=sys.stderr,
            )
            return 1
    return 0


def _metrics_line(metrics: dict[str, float]) -> str:
    """The metrics of an evaluation in one line."""
    loss = metrics["val_loss"]
    if "val_reward_margin" in metrics:
        texts = [f"loss {loss:.4f} per pair"]
    elif "val_accuracy" in metrics:
        texts = [f"loss {loss:.4f} nats per target"]
    else:
        texts = [f"loss {loss:.4f} nats per token", f"perplexity {math.exp(min(loss, 700)):,.2f}"]
    for name, text in METRIC_FORMATS.items():
        if name in metrics:
            texts.append(text.format(metrics[name]))
    return ", ".join(texts)


def _translate(args: EvaluateArguments) -> None:
    """Prints the BLEU of the translations, and writes them to --output."""
    from jaxformer.runs.run_evaluation import translate_run
    from jaxformer.runs.translate import bleu_metric

    bleu_metric((), args.bleu_tokenizer)  # raises now rather than after the translation
    translations = translate_run(
        args.path,
        args.validation,
        args.step,
        args.cache_dir,
        quantize=args.quantize,
        beams=args.beams,
        length_penalty=args.length_penalty,
    )
    references, outputs = translations.references, translations.outputs
    metric = bleu_metric(references, args.bleu_tokenizer)
    score = metric.corpus_score(outputs, [references]).score
    print(
        f"BLEU {score:.2f} of {len(outputs):,} texts with {args.beams} beams"
        f" ({metric.get_signature()})"
    )
    if args.output is not None:
        lines = (" ".join(text.split()) + "\n" for text in outputs)
        write_text(args.output, "".join(lines))
        print(f"{args.output}: the translations, one per line")
