"""`jaxformer prepare CONFIG`: tokenizes a run's text beforehand, in one go or as the tasks of a job
array."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxformer.config import ConfigError
from jaxformer.config_file import read_config
from jaxformer.runs.config import parse_arguments

USAGE = """\
usage: jaxformer prepare CONFIG [--output DIR] [--shard I/N] [--verify] [--section.field VALUE]

Tokenizes the data of a config before training: into data.cache_dir, where train.py finds it, or
into the directory --output, which --data.train accepts in place of the text. Shards that an earlier
call finished are kept.

  --shard I/N   Tokenize only the part of task I (counted from 0) of N tasks, for example of a job
                array. The tasks share nothing but the directory. A last call without --shard joins
                their shards and builds those that are missing.
  --verify      Read all that was tokenized, compare it with its checksums, and write nothing.

CONFIG --help lists every field of the config."""


def run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(
            USAGE, file=sys.stdout if arguments and arguments[0] in ("-h", "--help") else sys.stderr
        )
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    usage = USAGE.partition("\n")[0].removeprefix("usage: ")
    parser = argparse.ArgumentParser("jaxformer prepare", usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=_folder)
    parser.add_argument("--shard", default="")
    parser.add_argument("--verify", action="store_true")
    asked, rest = parser.parse_known_args(arguments[1:])
    config = parse_arguments(
        read_config(arguments[0]), rest, program=f"jaxformer prepare {arguments[0]}"
    )
    share = _share(asked.shard) if asked.shard else None
    if share and asked.verify:
        raise ConfigError("--verify reads what all tasks have made: leave --shard out.")
    from jaxformer.data.preparing import TextSummary, prepare_share, prepare_text
    from jaxformer.objectives import task_of

    task, size = task_of(config.model, config.data), config.model.vocab_size
    what = (config.data, config.tokenizer, task)
    if share:
        prepare_share(*what, share, output=asked.output, vocab_size=size, log=_log)
        _log(
            f"task {share[0]} of {share[1]} is done; when all are, the same line without --shard"
            " joins them"
        )
        return 0
    found: list[TextSummary] = prepare_text(
        *what, output=asked.output, thorough=asked.verify, vocab_size=size, log=_log
    )
    for text in found:
        rate = text.bytes / max(1, text.tokens - text.documents)
        print(
            f"{text.name}: {text.documents:,} documents, {text.tokens:,} tokens, {rate:.3f} bytes a"
            f" token, longest document {text.longest:,} tokens"
        )
        for line in text.skipped:
            print(f"  {line}")
    if asked.verify:
        print("every byte is as it was written")
    if asked.output:
        print(f"{asked.output} can be trained on: --data.train {asked.output}")
    return 0


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: name a directory, or leave --output out")
    return Path(os.path.expanduser(text))


def _share(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ConfigError(
            f"--shard {text!r} is no share: write I/N, as in 0/8 to 7/8 for eight tasks."
        )
    return int(found[1]), int(found[2])


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
