"""`jaxformer evaluate RUN`: the loss of a model on held-out or other text, or the BLEU of its
translations."""

import math
import sys

from jaxformer.cli.arguments import EvaluateArguments, check_output
from jaxformer.config.run import RunSettings
from jaxformer.files import ConfigError, write_text
from jaxformer.report import ProgressBar
from jaxformer.report.banner import result_lines
from jaxformer.runs.run_evaluation import bleu_metric, evaluate_run, translate_run
from jaxformer.training.compiler_options import keep_compiled


def run(args: EvaluateArguments) -> int:
    if args.output is not None and not args.beams:
        raise ConfigError("--output is for translations: add --beams, for example --beams 5.")
    check_output(args.output)
    keep_compiled(RunSettings().compilation_cache)
    if args.beams:
        # First, since translating takes minutes and sacrebleu may be missing.
        metric = bleu_metric(args.bleu_tokenizer)
        translations = translate_run(
            args.path,
            args.validation,
            args.step,
            args.cache_dir,
            args.train,
            args.init_from,
            quantize=args.quantize,
            weights=args.weights,
            search={"beams": args.beams, "length_penalty": args.length_penalty},
        )
        outputs = translations.outputs
        score = metric.corpus_score(outputs, [translations.references]).score
        print(
            f"BLEU {score:.2f} of {len(outputs):,} texts with {args.beams} beams"
            f" ({metric.get_signature()})"
        )
        if args.output is not None:
            # One translation a line, as sacrebleu reads them.
            lines = (" ".join(text.split()) + "\n" for text in outputs)
            write_text(args.output, "".join(lines))
            print(f"{args.output}: the translations, one per line")
    # Both, because the loss that quantization costs is what one wants to know.
    for kind in (None, args.quantize) if args.quantize else (None,):
        with ProgressBar(0, stream=sys.stderr) as progress:
            metrics = evaluate_run(
                args.path,
                args.validation,
                args.step,
                args.objective,
                args.cache_dir,
                quantize=kind,
                weights=args.weights,
                watch=progress.evaluation,
                train=args.train,
                init_from=args.init_from,
            )
        line = ", ".join(f"{name} {text}" for name, text in result_lines(metrics).items())
        if args.quantize:
            line = f"{kind or 'unquantized'}: {line}"
        print(line)
        if not math.isfinite(metrics["val_loss"]):
            print(
                f"not finite: the loss of {args.path} is {metrics['val_loss']}; evaluate an earlier"
                " checkpoint with --step.",
                file=sys.stderr,
            )
            return 1
    return 0
