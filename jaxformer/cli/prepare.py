"""`jaxformer prepare CONFIG`: tokenizes a run's text beforehand, in one process or as the tasks of
a job array."""

import dataclasses
import os
import re
import sys

from jaxformer.cli.arguments import PrepareArguments
from jaxformer.config.format import escaped
from jaxformer.config.run import RunConfig
from jaxformer.data.preparing import prepare_share, prepare_text
from jaxformer.files import ConfigError, located
from jaxformer.runs.init_from import with_grown_vocabulary
from jaxformer.runs.objectives import task_of


def run(args: PrepareArguments, config: RunConfig) -> int:
    if args.output is not None and not args.output.strip():
        raise ConfigError("--output is empty: name a directory, or leave the option out.")
    output = None if args.output is None else located(os.path.expanduser(args.output))
    share = None if args.shard is None else _share(args.shard)
    if share and args.verify:
        raise ConfigError("--verify reads the shards of all tasks: leave --shard out.")
    if config.tokenizer.added:
        model = with_grown_vocabulary(config.model, config.tokenizer, config.run.init_from)
        config = dataclasses.replace(config, model=model)
    source = (config.data, config.tokenizer, task_of(config.model, config.data))
    vocab_size = config.model.vocab_size
    if share:
        prepare_share(*source, share, output=output, vocab_size=vocab_size, log=_log)
        _log(
            f"task {share[0]} of {share[1]} is done; when all are, run the same command without"
            " --shard to join their shards"
        )
        return 0
    texts = prepare_text(
        *source, output=output, thorough=args.verify, vocab_size=vocab_size, log=_log
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


def _share(text: str) -> tuple[int, int]:
    """I and N of "I/N"."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard {text!r} must be I/N with I below N, for example 0/8 to 7/8.")
    return int(match[1]), int(match[2])


def _log(line: str) -> None:
    """Prints a note on standard error, apart from the figures of the texts."""
    print(escaped(line), file=sys.stderr, flush=True)
