"""`jaxformer tokenizer train | encode | inspect`: trains a tokenizer, encodes a text, or shows how
it is split."""

import codecs
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from jaxformer.cli.arguments import OPTIONS, check_output
from jaxformer.files import ConfigError

if TYPE_CHECKING:
    from jaxformer.tokenizer import Tokenizer

IDS_PER_BLOCK = 1 << 14  # token ids written at a time
SHOWN_ENTRIES = 10


@dataclass(frozen=True, kw_only=True)
class Train:
    """Trains a byte-level BPE. The ids are special tokens, then the 256 bytes, then merges in the
    order in which they are learned."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Text file, read as it is, or another source that data.train takes."""
    vocab_size: int
    """Number of entries, including special tokens and bytes."""
    output: Path
    """Directory for tokenizer.json."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Tokens at which the text is split and which are never merged."""
    pattern: str = "gpt2"
    """Rule by which text is split into words: gpt2, or llama3, which splits numbers into groups of
    three digits."""
    text_field: str = "text"
    """Field or column of the records that holds the text."""


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    tokenizer: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TOKENIZER")]
    """tokenizer.json, a directory with one, or a run directory."""
    special_tokens: bool = False
    """Read names of special tokens in the text as these tokens, and add those with which the
    tokenizer begins and ends a text."""


@dataclass(frozen=True, kw_only=True)
class Encode(TokenizerArguments):
    """Writes the token ids of a text to standard output or a file, and their number to standard
    error."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = "-"
    """UTF-8 text, plain, .gz or .zst; - is standard input."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """.npy file for the ids, uint16 or uint32, instead of standard output."""


@dataclass(frozen=True, kw_only=True)
class Inspect(TokenizerArguments):
    """Shows the entries of a tokenizer, and how it splits a text."""

    text: str = ""
    """Text to split."""


def run(arguments: Sequence[str]) -> int:
    kinds: dict[Any, Any] = {Train: _train, Encode: _encode, Inspect: _inspect}
    asked: Any = tyro.extras.subcommand_cli_from_dict(
        {kind.__name__.lower(): kind for kind in kinds},
        prog="jaxformer tokenizer",
        description="Trains a tokenizer, encodes a text, or shows how a tokenizer splits it.",
        args=arguments,
        **OPTIONS,
    )
    kinds[type(asked)](asked)
    return 0


def _train(asked: Train) -> None:
    from jaxformer.tokenizer import Tokenizer
    from jaxformer.tokenizer.metadata import TOKENIZER_FILE

    file = asked.output / TOKENIZER_FILE
    if file.exists() or (asked.output.exists() and not asked.output.is_dir()):
        there = file if file.exists() else asked.output
        raise ConfigError(f"{there} already exists: choose another --output.")
    above = next(path for path in asked.output.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(
            f"{asked.output} cannot be created, because {above} is not a writable directory: choose"
            " another --output."
        )
    began = time.perf_counter()
    vocab, merges = _trained(asked)
    Tokenizer.from_bpe(vocab, merges, asked.special_tokens, asked.pattern).save(file)
    few = f" (the text has no pairs left for {asked.vocab_size:,})"
    few *= len(vocab) < asked.vocab_size
    seconds = time.perf_counter() - began
    print(f"{file}: {len(vocab):,} entries{few}, including {len(merges):,} merges, {seconds:.1f} s")


def _trained(asked: Train) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    from jaxformer.data.sources import find_source
    from jaxformer.data.sources.records import RecordField
    from jaxformer.tokenizer.bpe import blocks_of, train_on

    field = RecordField("--text_field", asked.text_field, "text")
    source = find_source(asked.source, "SOURCE", (field,))
    first, *others = source.files
    rules: dict[str, Any] = {"special_tokens": asked.special_tokens, "pattern": asked.pattern}
    packed = first.path.suffix.lower() in (".gz", ".zst")
    if first.format == "text" and not packed and not others:
        texts = _noted([blocks_of(first.path)], _size(str(first.path)))
        return train_on(texts, asked.vocab_size, **rules)
    documents = itertools.groupby(source.pieces(), lambda piece: piece.document)
    texts = ((piece.text for piece in document) for _, document in documents)
    return train_on(_noted(texts, 0), asked.vocab_size, **rules)


def _encode(asked: Encode) -> None:
    from jaxformer.tokenizer import Tokenizer

    check_output(asked.output)
    tokenizer, read = Tokenizer.load(asked.tokenizer), TextReader(asked.file)
    ids = tokenizer.encode_iterable(read, asked.special_tokens)
    count = _write_array(asked.output, ids, tokenizer) if asked.output else _print_ids(ids)
    rate = f", {read.bytes / count:.3f} bytes per token" if count else ""
    print(f"{count:,} tokens of {read.bytes:,} bytes{rate}", file=sys.stderr)


class TextReader:
    """The text of a file or of standard input, a block at a time; `bytes` counts what was read."""

    def __init__(self, name: str) -> None:
        self._name, self.bytes = name, 0

    def __iter__(self) -> Iterator[str]:
        from jaxformer.data.sources.source_files import READ_BYTES, read_blocks
        from jaxformer.data.tokenizing import ProgressNotes

        # A pipe is read with os.read, which returns as soon as there is anything.
        piped = iter(lambda: os.read(sys.stdin.fileno(), READ_BYTES), b"")
        blocks: Iterable[bytes] = piped if self._name == "-" else read_blocks(Path(self._name))
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
    """Bytes of a file that is read as it is; 0 where that is not known."""
    packed = name.lower().endswith((".gz", ".zst"))
    return os.path.getsize(name) if os.path.isfile(name) and not packed else 0


def _noted(texts: Iterable[Iterable[str]], size: int) -> Iterator[Iterator[str]]:
    """The same texts, with notes of how much of `size` bytes (0: unknown) was read."""
    from jaxformer.data.tokenizing import ProgressNotes

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
    count = 0
    while some := [*itertools.islice(ids, IDS_PER_BLOCK)]:
        print(" " * bool(count) + " ".join(map(str, some)), end="", flush=True)
        count += len(some)
    print()
    return count


def _write_array(path: Path, ids: Iterator[int], tokenizer: "Tokenizer") -> int:
    """Writes ids as they come. NumPy's header has space for the length, which is known only at the
    end."""
    from jaxformer.files import replacing

    dtype, count = tokenizer.dtype, 0
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with replacing(path, "choose another --output") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (0,)})
        while some := [*itertools.islice(ids, IDS_PER_BLOCK)]:
            file.write(np.array(some, dtype).tobytes())
            count += len(some)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
    return count


def _inspect(asked: Inspect) -> None:
    from jaxformer.config.format import escaped
    from jaxformer.tokenizer import Tokenizer
    from jaxformer.tokenizer.metadata import ROLES

    tokenizer = Tokenizer.load(asked.tokenizer)
    sizes, ordinary = tokenizer.token_bytes(), tokenizer.ordinary()
    known = [(role, tokenizer.special(role)) for role in ROLES]
    print(f"{asked.tokenizer}: {tokenizer.vocab_size:,} ids, {len(ordinary):,} of them for text")
    print("special tokens")
    for token in np.setdiff1d(np.arange(tokenizer.vocab_size), ordinary).tolist():
        roles = ", ".join(role for role, index in known if index == token)
        print(f"{token:8d}  {escaped(tokenizer.shown(token))}  {roles}".rstrip())
    print("longest entries")
    longest = sorted(ordinary.tolist(), key=lambda token: (-sizes[token], token))[:SHOWN_ENTRIES]
    print("\n".join(f"{token:8d}  {tokenizer.shown(token)!r}" for token in longest))
    if asked.text:
        ids, size = tokenizer.encode(asked.text, asked.special_tokens), len(asked.text.encode())
        rate = size / max(1, len(ids))
        print(f"text: {size:,} bytes in {len(ids):,} tokens, {rate:.3f} bytes per token")
        print("\n".join(f"{token:8d}  {tokenizer.shown(token)!r}" for token in ids))
