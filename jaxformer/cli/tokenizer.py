"""`jaxformer tokenizer train | encode`: trains a tokenizer, or encodes a text."""

import codecs
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.cli.arguments import EncodeArguments, TrainTokenizerArguments, check_output
from jaxformer.data.documents import PACKED, READ_BYTES, read_blocks
from jaxformer.data.records import RecordField
from jaxformer.data.source import find_source
from jaxformer.data.store import ProgressNotes
from jaxformer.files import ConfigError, replacing, store_of
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.bpe import blocks_of, train_on
from jaxformer.tokenizer.metadata import TOKENIZER_FILE

IDS_PER_BLOCK = 1 << 14  # token ids written at a time


@functools.singledispatch
def run(args: Any) -> int:
    """Each of the commands has arguments of its own type."""
    raise TypeError(args)


@run.register
def _train(args: TrainTokenizerArguments) -> int:
    # What is wrong with the output is said before hours of reading.
    target = args.output / TOKENIZER_FILE
    if target.exists():
        raise ConfigError(f"{target} already exists: choose another --output.")
    store_of(args.output).require_writable()
    began = time.perf_counter()
    field = RecordField("--text_field", args.text_field, "text")
    source = find_source(args.source, "SOURCE", (field,))
    file = source.files[0]
    texts: Iterable[Iterable[str]]
    size = 0  # not known of several files, and of the text in a compressed one
    if len(source.files) == 1 and file.format == "text" and file.path.suffix.lower() not in PACKED:
        texts = [blocks_of(file.path)]
        size = _size(file.path)
    else:
        documents = itertools.groupby(source.pieces(), lambda piece: piece.document)
        texts = ((piece.text for piece in document) for _, document in documents)
    notes = ProgressNotes(_log, size, "read")

    def counted(blocks: Iterable[str]) -> Iterator[str]:
        for block in blocks:
            notes.done += len(block.encode("utf-8", "replace"))
            notes.tell()
            yield block

    vocab, merges = train_on(
        map(counted, texts),
        args.vocab_size,
        special_tokens=args.special_tokens,
        pattern=args.pattern,
    )
    Tokenizer.from_bpe(vocab, merges, args.special_tokens, args.pattern).save(target)
    entries = f"{len(vocab):,} entries"
    # A small text has no pairs left to merge.
    if len(vocab) < args.vocab_size:
        entries += f" (the text has no pairs left for {args.vocab_size:,})"
    seconds = time.perf_counter() - began
    print(f"{target}: {entries}, including {len(merges):,} merges, {seconds:.1f} s")
    return 0


def _size(path: Path) -> int:
    """Return the bytes of a file of text; 0 for a pipe, whose size is not known."""
    if path.is_file():
        return path.stat().st_size
    return 0


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@run.register
def _encode(args: EncodeArguments) -> int:
    check_output(args.output)
    tokenizer = Tokenizer.load(args.tokenizer)
    blocks: Iterable[bytes]
    total = 0
    if str(args.file) == "-":
        # A pipe is read with os.read, which returns as soon as there is anything.
        blocks = iter(lambda: os.read(sys.stdin.fileno(), READ_BYTES), b"")
    else:
        blocks = read_blocks(args.file)
        if args.file.suffix.lower() not in PACKED:
            total = _size(args.file)
    notes = ProgressNotes(_log, total, f"{args.file}: encoded")

    def counted() -> Iterator[bytes]:
        for block in blocks:
            notes.done += len(block)
            notes.tell()
            yield block

    def texts() -> Iterator[str]:
        try:
            yield from codecs.iterdecode(counted(), "utf-8")
        except UnicodeDecodeError as error:
            name = "standard input" if str(args.file) == "-" else args.file
            offset = notes.done - len(error.object) + error.start
            raise ConfigError(
                f"{name} is not UTF-8 text at offset {offset} ({error.reason}): convert it to"
                " UTF-8."
            ) from None

    # Block by block: a text may be larger than memory.
    ids = tokenizer.encode_iterable(texts(), args.special_tokens)
    # An empty text has an empty array, with its dtype.
    arrays = [np.zeros(0, tokenizer.dtype)]
    count = 0
    while block := list(itertools.islice(ids, IDS_PER_BLOCK)):
        if args.output:
            arrays.append(np.array(block, tokenizer.dtype))
        else:
            print(" " if count else "", end="")
            print(*block, end="", flush=True)
        count += len(block)
    if args.output:
        with replacing(args.output, "choose another --output") as file:
            np.save(file, np.concatenate(arrays))
    else:
        print()
    rate = ""
    if count:
        rate = f", {notes.done / count:.3f} bytes per token"
    print(f"{count:,} tokens of {notes.done:,} bytes{rate}", file=sys.stderr)
    return 0
