"""`jaxformer prepare CONFIG`: tokenizes a run's text beforehand."""

import dataclasses
import os
import sys

from jaxformer.cli.arguments import PrepareArguments
from jaxformer.config.format import escaped
from jaxformer.config.run import RunConfig
from jaxformer.data.preparing import prepare_text
from jaxformer.files import ConfigError, located
from jaxformer.runs.init_from import with_grown_vocabulary
from jaxformer.runs.objectives import task_of


def run(args: PrepareArguments, config: RunConfig) -> int:
    if args.output is not None and not args.output.strip():
        raise ConfigError("--output is empty: name a directory, or leave the option out.")
    output = None if args.output is None else located(os.path.expanduser(args.output))
    if config.tokenizer.added:
        model = with_grown_vocabulary(config.model, config.tokenizer, config.run.init_from)
        config = dataclasses.replace(config, model=model)
    texts = prepare_text(
        config.data,
        config.tokenizer,
        task_of(config.model, config.data),
        output=output,
        thorough=args.verify,
        vocab_size=config.model.vocab_size,
        log=_log,
    )
    for text in texts:
        rate = text.bytes / max(1, text.tokens - text.documents)
        print(
            f"{escaped(text.name)}: {text.documents:,} documents, {text.tokens:,} tokens,"
            f" {rate:.3f} bytes per token, longest document {text.longest:,} tokens"
        )
        for line in text.skipped:
            print(f"  {escaped(line)}")
    if args.verify:
        print("all checksums match")
    if output:
        print(f"to train on these tokens: --data.train {output}")
    return 0


def _log(line: str) -> None:
    """Prints a note on standard error, apart from the figures of the texts."""
    print(escaped(line), file=sys.stderr, flush=True)
