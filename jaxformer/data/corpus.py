"""From settings to text ready for training, by one door: the tokenizer and the token stores, made or found."""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxformer.config import ConfigError, RunConfig, TokenizerConfig
from jaxformer.data.reading import PIECE_CHARACTERS
from jaxformer.data.sources import find_source, fingerprint
from jaxformer.data.splits import Split, survey
from jaxformer.data.store import TokenStore, open_or_build
from jaxformer.data.writing import claimed
from jaxformer.tokenizer import Tokenizer, byte_tokenizer, character_tokenizer, train_bpe_tokenizer

# A change of how text becomes tokens or files takes a new number, so that no older cache is read.
FORMAT = 1

# Where a tokenizer is trained on a part of the text, the most that is taken from one place.
SAMPLE_CHARACTERS = 1 << 12

Say = Callable[[str], None]


@dataclass(frozen=True)
class Corpus:
    """The text of a run as tokens; `validation` is None where nothing is held out."""

    tokenizer: Tokenizer
    train: TokenStore
    validation: TokenStore | None
    validation_split: Split | None

    def validation_text(self) -> Iterator[str]:
        """The text that the validation tokens were made from, in pieces."""
        return (piece.text for piece in self.validation_split.pieces()) if self.validation_split else iter(())


def prepare(run: RunConfig, say: Say = lambda line: None) -> Corpus:
    """Makes or finds the tokenizer and the token stores of a run. Raises ConfigError for text that cannot be used."""
    cache = Path(run.data.cache_dir).expanduser()
    train, validation = _splits(run, cache, say)
    tokenizer = _tokenizer(run.tokenizer, train, validation, cache / "tokenizers", say)
    if 0 < run.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size:,} entries: "
            f"set it to at least {tokenizer.vocab_size}, or to 0 to take the tokenizer's."
        )
    return Corpus(
        tokenizer,
        _store(train, tokenizer, cache / "stores", say),
        _store(validation, tokenizer, cache / "stores", say) if validation else None,
        validation,
    )


def gzip_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits that `gzip -9` takes for each byte of the texts, one after the other; nan where there are none."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    size = packed = 0
    for text in texts:
        raw = text.encode()
        size += len(raw)
        packed += len(packer.compress(raw))
    return 8 * (packed + len(packer.flush())) / size if size else float("nan")


def _splits(run: RunConfig, cache: Path, say: Say) -> tuple[Split, Split | None]:
    settings, fraction = run.data, run.data.validation_fraction
    source = find_source(settings.train, "data.train", settings.text_field)
    held = find_source(settings.validation, "data.validation", settings.text_field) if settings.validation else None
    surveyed = survey(source, cache / "surveys", say)
    if held:
        return Split(source, surveyed), Split(held, survey(held, cache / "surveys", say))
    if not fraction:
        return Split(source, surveyed), None
    return Split(source, surveyed, "train", fraction), Split(source, surveyed, "validation", fraction)


def _tokenizer(settings: TokenizerConfig, train: Split, validation: Split | None, cache: Path, say: Say) -> Tokenizer:
    if settings.path:
        return Tokenizer.load(settings.path)
    if settings.kind == "bytes":
        return byte_tokenizer()
    splits = [split for split in (train, validation) if split]
    if settings.kind == "bpe":
        facts: tuple[object, ...] = (train.identity(), settings.vocab_size, settings.training_bytes)
    else:
        facts = tuple(split.survey.content for split in splits)
    path = cache / f"{fingerprint(FORMAT, settings.kind, *facts)}.json"
    if not path.exists():
        with claimed(cache, say):
            if not path.exists():
                _make(settings, splits, say).save(path)
                return Tokenizer.load(path)
    say(f"tokenizer: reusing {path}")
    return Tokenizer.load(path)


def _make(settings: TokenizerConfig, splits: list[Split], say: Say) -> Tokenizer:
    began = time.perf_counter()
    if settings.kind == "bpe":
        size = _megabytes(min(splits[0].bytes, settings.training_bytes))
        say(f"tokenizer: training {settings.vocab_size:,} entries of byte-level BPE on {size} of {splits[0].source}")
        made = train_bpe_tokenizer(spread(splits[0], settings.training_bytes), settings.vocab_size)
    else:
        say("tokenizer: taking the characters of " + " and ".join(dict.fromkeys(str(split.source) for split in splits)))
        made = character_tokenizer(piece.text for split in splits for piece in split.source.pieces())
    say(f"tokenizer: {made.vocab_size:,} entries, made in {time.perf_counter() - began:.1f} s")
    return made


def spread(split: Split, most: int) -> Iterator[str]:
    """Pieces of a split's text, evenly over all of it, of at most `most` bytes together."""
    rate, seen, taken = min(1.0, most / max(1, split.bytes)), 0, 0
    unit = PIECE_CHARACTERS * 2 if rate == 1 else SAMPLE_CHARACTERS
    for piece in split.pieces():
        for start in range(0, len(piece.text), unit):
            text = piece.text[start : start + unit]
            size = len(text.encode())
            seen += size
            if taken + size <= min(most, seen * rate):
                taken += size
                yield text


def _store(split: Split, tokenizer: Tokenizer, cache: Path, say: Say) -> TokenStore:
    directory = cache / fingerprint(FORMAT, split.identity(), tokenizer.fingerprint())
    name, began = (
        "validation" if split.side == "validation" else split.source.setting.removeprefix("data."),
        time.perf_counter(),
    )
    found = TokenStore.open(directory)
    if not found:
        say(f"{name}: tokenizing {_megabytes(split.bytes)} of {split.source} ({split.rule()})")
    store = found or open_or_build(directory, split.pieces, tokenizer, say, split.bytes)
    facts = f"{store.tokens:,} tokens, {store.documents:,} documents, {_megabytes(store.bytes)} of text"
    how = f"reusing {directory}" if found else f"made in {time.perf_counter() - began:.1f} s"
    say(f"{name}: {facts}, {how}")
    return store


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
