"""`jaxformer tokenizer train | encode | inspect`: makes a tokenizer, writes the ids of a text,
shows how it is split."""

import codecs
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from jaxformer.config import ConfigError

if TYPE_CHECKING:
    from jaxformer.tokenizer import Tokenizer

USAGE = """usage:
  jaxformer tokenizer train SOURCE --vocab_size N --output DIR   a byte-level BPE of a text
  jaxformer tokenizer encode TOKENIZER [FILE]                    the ids of a text
  jaxformer tokenizer inspect TOKENIZER [--text "..."]           its entries; how a text is split"""

IDS_PER_LINE = 1 << 14  # ids of a line
SHOWN_ENTRIES = 10  # entries that are shown
Ids = Iterator[int]


@dataclass(frozen=True)
class Train:
    """Trains a byte-level BPE: special tokens first, then the 256 bytes, then merges in their
    order."""

    source: Annotated[str, tyro.conf.Positional]
    """A text file, read as it is; or what data.train takes, of one source."""
    vocab_size: int
    """Entries, special tokens and bytes counted in."""
    output: Path
    """Directory for tokenizer.json."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Split out of the text, never merged across."""
    pattern: str = "gpt2"
    """How text is parted into words: gpt2, or llama3, which has numbers by 3 digits."""
    text_field: str = "text"
    """The field or column of records that holds the text."""


@dataclass(frozen=True)
class Encode:
    """Writes the ids of a text, as they are made; how many there are is said at the end, on
    standard error."""

    tokenizer: Annotated[Path, tyro.conf.Positional]
    """A tokenizer.json, its directory, or a run directory."""
    file: Annotated[str, tyro.conf.Positional] = "-"
    """UTF-8 text, plain, .gz or .zst; - is standard input."""
    output: Path | None = None
    """An .npy file for the ids, uint16 or uint32, in place of standard output."""
    special_tokens: bool = False
    """Names of special tokens in the text are these, and the template stands around it."""


@dataclass(frozen=True)
class Inspect:
    """Shows what a tokenizer holds, and how it splits a text."""

    tokenizer: Annotated[Path, tyro.conf.Positional]
    """A tokenizer.json, its directory, or a run directory."""
    text: str = ""
    """A text to split."""
    special_tokens: bool = False
    """Names of special tokens in the text are these, and the template stands around it."""


def run(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    if name not in TOKENIZER_COMMANDS:
        asked_for_help = name in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    kind, command = TOKENIZER_COMMANDS[name]
    command(
        tyro.cli(kind, prog=f"jaxformer tokenizer {name}", args=arguments[1:], use_underscores=True)
    )
    return 0


def _train(asked: Train) -> None:
    from jaxformer.tokenizer import Tokenizer
    from jaxformer.tokenizer.files import TOKENIZER_FILE

    file = asked.output / TOKENIZER_FILE
    if file.exists() or (asked.output.exists() and not asked.output.is_dir()):
        raise ConfigError(
            f"{file if file.exists() else asked.output} is there already: name another --output."
        )
    above = next(path for path in asked.output.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(
            f"{asked.output} cannot be made, since {above} cannot be written: name another"
            " --output."
        )
    began = time.perf_counter()
    vocab, merges = _trained(asked)
    Tokenizer.from_bpe(vocab, merges, asked.special_tokens, asked.pattern).save(file)
    few = f" (no pair is left for {asked.vocab_size:,})" if len(vocab) < asked.vocab_size else ""
    seconds = time.perf_counter() - began
    print(
        f"{file}: {len(vocab):,} entries{few}, {len(merges):,} of them merges, in {seconds:.1f} s"
    )


def _trained(asked: Train) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    from jaxformer.data.sources import find_source
    from jaxformer.data.sources.records import RecordField
    from jaxformer.tokenizer.bpe import train_bpe, train_on

    source = find_source(
        asked.source, "SOURCE", (RecordField("--text_field", asked.text_field, "text"),)
    )
    files = source.files
    rules: dict[str, Any] = {"special_tokens": asked.special_tokens, "pattern": asked.pattern}
    if (
        len(files) == 1
        and files[0].format == "text"
        and files[0].path.suffix.lower() not in (".gz", ".zst")
    ):
        return train_bpe(files[0].path, asked.vocab_size, **rules)
    documents = itertools.groupby(source.pieces(), lambda piece: piece.document)
    texts = ((piece.text for piece in document) for _, document in documents)
    return train_on(texts, asked.vocab_size, **rules)


def _encode(asked: Encode) -> None:
    from jaxformer.tokenizer import Tokenizer

    tokenizer, read = Tokenizer.load(asked.tokenizer), Read(asked.file)
    ids = tokenizer.encode_iterable(read, asked.special_tokens)
    count = _write_array(asked.output, ids, tokenizer) if asked.output else _print_ids(ids)
    rate = f", {read.bytes / count:.3f} bytes a token" if count else ""
    print(f"{count:,} tokens of {read.bytes:,} bytes{rate}", file=sys.stderr)


class Read:
    """The text of a file or of standard input, a block at a time; `bytes` is how many there were so
    far."""

    def __init__(self, name: str) -> None:
        self._name, self.bytes = name, 0

    def __iter__(self) -> Iterator[str]:
        from jaxformer.data.sources.reading import READ_BYTES, read_blocks

        piped = iter(
            lambda: os.read(sys.stdin.fileno(), READ_BYTES), b""
        )  # as soon as there is any
        blocks: Iterable[bytes] = piped if self._name == "-" else read_blocks(Path(self._name))
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in itertools.chain(blocks, [b""]):
            start = self.bytes - len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place, named = (
                    start + error.start,
                    "standard input" if self._name == "-" else self._name,
                )
                raise ConfigError(
                    f"{named} is not UTF-8 text at offset {place}, {error.reason}: convert it."
                ) from None
            self.bytes += len(block)


def _print_ids(ids: Ids) -> int:
    count = 0
    while some := [*itertools.islice(ids, IDS_PER_LINE)]:
        print(" " * bool(count) + " ".join(map(str, some)), end="", flush=True)
        count += len(some)
    print()
    return count


def _write_array(path: Path, ids: Ids, tokenizer: "Tokenizer") -> int:
    """Writes ids as they come; NumPy's header has room for the length, which is known at the
    end."""
    from jaxformer.files import replacing

    dtype, count = tokenizer.dtype, 0
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    advice = "name another --output"
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written (no such directory): {advice}.")
    with replacing(path, advice) as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (0,)})
        while some := [*itertools.islice(ids, IDS_PER_LINE)]:
            file.write(np.array(some, dtype).tobytes())
            count += len(some)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
    return count


def _inspect(asked: Inspect) -> None:
    from jaxformer.tokenizer import Tokenizer
    from jaxformer.tokenizer.files import ROLES

    tokenizer = Tokenizer.load(asked.tokenizer)
    sizes, ordinary = tokenizer.token_bytes(), tokenizer.ordinary()
    known = [(role, tokenizer.special(role)) for role in ROLES]
    print(f"{asked.tokenizer}: {tokenizer.vocab_size:,} ids, {len(ordinary):,} of them for text")
    print("special tokens")
    for token in np.setdiff1d(np.arange(tokenizer.vocab_size), ordinary).tolist():
        roles = ", ".join(role for role, index in known if index == token)
        print(f"{token:8d}  {tokenizer.shown(token)}  {roles}".rstrip())
    print("longest entries")
    longest = sorted(ordinary.tolist(), key=lambda token: (-sizes[token], token))[:SHOWN_ENTRIES]
    print("\n".join(f"{token:8d}  {tokenizer.shown(token)!r}" for token in longest))
    if asked.text:
        ids, size = tokenizer.encode(asked.text, asked.special_tokens), len(asked.text.encode())
        print(
            f"text: {size:,} bytes in {len(ids):,} tokens, {size / max(1, len(ids)):.3f} bytes a"
            " token"
        )
        print("\n".join(f"{token:8d}  {tokenizer.shown(token)!r}" for token in ids))


TOKENIZER_COMMANDS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "train": (Train, _train),
    "encode": (Encode, _encode),
    "inspect": (Inspect, _inspect),
}
