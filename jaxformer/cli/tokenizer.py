"""`jaxformer tokenizer train | encode | inspect`: trains a tokenizer, encodes a text, or shows how
it is split."""

import codecs
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxformer.cli.arguments import (
    EncodeArguments,
    InspectArguments,
    TrainTokenizerArguments,
    check_output,
)
from jaxformer.config.format import escaped
from jaxformer.data.sources import find_source
from jaxformer.data.sources.records import RecordField
from jaxformer.data.sources.source_files import READ_BYTES, read_blocks
from jaxformer.data.tokenizing import ProgressNotes
from jaxformer.files import ConfigError, located, replacing
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.bpe import blocks_of, train_on
from jaxformer.tokenizer.metadata import ROLES, TOKENIZER_FILE

IDS_PER_BLOCK = 1 << 14  # token ids written at a time
SHOWN_ENTRIES = 10
COMPRESSED = (".gz", ".zst")


def run(args: TrainTokenizerArguments | EncodeArguments | InspectArguments) -> int:
    if isinstance(args, TrainTokenizerArguments):
        _train(args)
    elif isinstance(args, EncodeArguments):
        _encode(args)
    else:
        _inspect(args)
    return 0


def _train(args: TrainTokenizerArguments) -> None:
    file = args.output / TOKENIZER_FILE
    if file.exists():
        raise ConfigError(f"{file} already exists: choose another --output.")
    if args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"{args.output} already exists: choose another --output.")
    parent = next(path for path in args.output.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"{args.output} cannot be created, because {parent} is not a writable directory: choose"
            " another --output."
        )
    start = time.perf_counter()
    vocab, merges = _trained(args)
    Tokenizer.from_bpe(vocab, merges, args.special_tokens, args.pattern).save(file)
    entries = f"{len(vocab):,} entries"
    if len(vocab) < args.vocab_size:
        entries += f" (the text has no pairs left for {args.vocab_size:,})"
    seconds = time.perf_counter() - start
    print(f"{file}: {entries}, including {len(merges):,} merges, {seconds:.1f} s")


def _trained(args: TrainTokenizerArguments) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """The entries of the vocabulary by their ids, and the merges in their order."""
    field = RecordField("--text_field", args.text_field, "text")
    source = find_source(args.source, "SOURCE", (field,))
    file = source.files[0]
    compressed = file.path.suffix.lower() in COMPRESSED
    texts: Iterable[Iterable[str]]
    if len(source.files) == 1 and file.format == "text" and not compressed:
        texts, size = [blocks_of(file.path)], _size(str(file.path))
    else:
        documents = itertools.groupby(source.pieces(), lambda piece: piece.document)
        texts, size = ((piece.text for piece in document) for _, document in documents), 0
    return train_on(
        _with_progress(texts, size),
        args.vocab_size,
        special_tokens=args.special_tokens,
        pattern=args.pattern,
    )


def _encode(args: EncodeArguments) -> None:
    check_output(args.output)
    tokenizer, reader = Tokenizer.load(args.tokenizer), TextReader(args.file)
    ids = tokenizer.encode_iterable(reader, args.special_tokens)
    count = _write_array(args.output, ids, tokenizer) if args.output else _print_ids(ids)
    rate = f", {reader.bytes / count:.3f} bytes per token" if count else ""
    print(f"{count:,} tokens of {reader.bytes:,} bytes{rate}", file=sys.stderr)


class TextReader:
    """The text of a file or of standard input, a block at a time; `bytes` counts what was read."""

    def __init__(self, name: str) -> None:
        self._name, self.bytes = name, 0

    def __iter__(self) -> Iterator[str]:
        # A pipe is read with os.read, which returns as soon as there is anything.
        piped = iter(lambda: os.read(sys.stdin.fileno(), READ_BYTES), b"")
        blocks: Iterable[bytes] = piped if self._name == "-" else read_blocks(located(self._name))
        notes = ProgressNotes(_log, _size(self._name), f"{self._name}: encoded")
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in itertools.chain(blocks, [b""]):
            start = self.bytes - len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                name = "standard input" if self._name == "-" else self._name
                raise ConfigError(
                    f"{name} is not UTF-8 text at offset {start + error.start} ({error.reason}):"
                    " convert it to UTF-8."
                ) from None
            self.bytes += len(block)
            notes.done = self.bytes
            notes.tell()


def _size(name: str) -> int:
    """The bytes of text in a file; 0 for a compressed one or a stream, where they are not known."""
    compressed = name.lower().endswith(COMPRESSED)
    return os.path.getsize(name) if os.path.isfile(name) and not compressed else 0


def _with_progress(texts: Iterable[Iterable[str]], size: int) -> Iterator[Iterator[str]]:
    """The same texts, with notes of how much of `size` bytes (0: unknown) has been read."""
    notes = ProgressNotes(_log, size, "read")

    def counted(blocks: Iterable[str]) -> Iterator[str]:
        for block in blocks:
            notes.done += len(block.encode("utf-8", "replace"))
            notes.tell()
            yield block

    return map(counted, texts)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_ids(ids: Iterator[int]) -> int:
    """Prints ids with spaces between them as they come, and returns their number."""
    count = 0
    while block := [*itertools.islice(ids, IDS_PER_BLOCK)]:
        if count:
            print(end=" ")
        print(*block, end="", flush=True)
        count += len(block)
    print()
    return count


def _write_array(path: Path, ids: Iterator[int], tokenizer: Tokenizer) -> int:
    """Writes ids as they come, and returns their number. NumPy's header has space for the length,
    which is known only at the end."""
    dtype, count = tokenizer.dtype, 0
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with replacing(path, "choose another --output") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (0,)})
        while block := [*itertools.islice(ids, IDS_PER_BLOCK)]:
            file.write(np.array(block, dtype).tobytes())
            count += len(block)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
    return count


def _inspect(args: InspectArguments) -> None:
    tokenizer = Tokenizer.load(args.tokenizer)
    sizes, ordinary = tokenizer.token_bytes(), tokenizer.ordinary()
    role_tokens = {role: tokenizer.special(role) for role in ROLES}
    print(f"{args.tokenizer}: {tokenizer.vocab_size:,} ids, {len(ordinary):,} of them for text")
    print("special tokens")
    for token in np.setdiff1d(np.arange(tokenizer.vocab_size), ordinary).tolist():
        roles = ", ".join(role for role, role_token in role_tokens.items() if role_token == token)
        print(f"{token:8d}  {escaped(tokenizer.shown(token))}  {roles}".rstrip())
    print("longest entries")
    longest = sorted(ordinary.tolist(), key=lambda token: (-sizes[token], token))[:SHOWN_ENTRIES]
    print("\n".join(f"{token:8d}  {tokenizer.shown(token)!r}" for token in longest))
    if args.text:
        ids, size = tokenizer.encode(args.text, args.special_tokens), len(args.text.encode())
        rate = size / max(1, len(ids))
        print(f"text: {size:,} bytes in {len(ids):,} tokens, {rate:.3f} bytes per token")
        print("\n".join(f"{token:8d}  {tokenizer.shown(token)!r}" for token in ids))
