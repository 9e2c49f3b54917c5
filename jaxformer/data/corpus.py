"""From settings to rows ready for training, by one door: the tokenizer and the stores, made or found."""

import functools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jaxformer.config import ConfigError, RunConfig, TokenizerConfig
from jaxformer.data.examples import ExampleStore, open_or_encode
from jaxformer.data.forms import Form
from jaxformer.data.objectives import OBJECTIVES, check_tokenizer, fields_of, objective_of, specials_of
from jaxformer.data.packing import ExampleRows
from jaxformer.data.reading import PIECE_CHARACTERS
from jaxformer.data.rows import Rows
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
Store = TypeVar("Store", TokenStore, ExampleStore)


@dataclass(frozen=True)
class Corpus:
    """The data of a run as rows; `validation` is None where nothing is held out.

    `objective` is never "auto"; `labels` are the names of classes or tags, in the order of their numbers.
    """

    tokenizer: Tokenizer
    objective: str
    labels: tuple[str, ...]
    train: Rows
    validation: Rows | None
    validation_split: Split | None

    def validation_text(self) -> Iterator[str]:
        """The text that the validation tokens were made from, in pieces; none where they are not each told from the last."""
        if self.objective != "causal" or self.validation_split is None:
            return iter(())
        return (piece.text for piece in self.validation_split.pieces())


def prepare(run: RunConfig, say: Say = lambda line: None, labels: tuple[str, ...] = ()) -> Corpus:
    """Makes or finds the tokenizer and the stores of a run, and cuts them into rows.

    `labels` are those of a model that knows some already, in place of the training data's. Raises ConfigError for data
    that cannot be used.
    """
    cache = Path(run.data.cache_dir).expanduser()
    objective = objective_of(run)
    splits = _splits(run, cache, say)
    tokenizer = _tokenizer(run.tokenizer, splits, specials_of(run), cache / "tokenizers", say)
    check_tokenizer(objective, tokenizer, run.tokenizer.path)
    if 0 < run.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size:,} entries: "
            f"set it to at least {tokenizer.vocab_size}, or to 0 to take the tokenizer's."
        )
    form, cut = OBJECTIVES[objective].form, OBJECTIVES[objective].rows
    rows: list[Rows] = []
    for split in splits:
        if form:
            examples = _example_store(split, objective, form(run, tokenizer), cache / "stores", say)
            labels = labels or in_order(examples.labels)
            rows.append(_example_rows(split, examples, form(run, tokenizer), labels, run.run.seed, say))
        else:
            rows.append(cut(_text_store(split, tokenizer, cache / "stores", say), run, tokenizer))
    validation = rows[1] if splits[1:] else None
    return Corpus(tokenizer, objective, labels, rows[0], validation, splits[-1] if validation else None)


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers: whole numbers by value, then the rest by name."""
    return tuple(sorted(labels, key=lambda label: (0, int(label), label) if label.isdecimal() else (1, 0, label)))


def gzip_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits that `gzip -9` takes for each byte of the texts, one after the other; nan where there are none."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    size = packed = 0
    for text in texts:
        raw = text.encode()
        size += len(raw)
        packed += len(packer.compress(raw))
    return 8 * (packed + len(packer.flush())) / size if size else float("nan")


def _splits(run: RunConfig, cache: Path, say: Say) -> list[Split]:
    """What is for training, and what is held out where anything is."""
    settings, fraction = run.data, run.data.validation_fraction
    fields = fields_of(run)
    source = find_source(settings.train, "data.train", fields)
    held = find_source(settings.validation, "data.validation", fields) if settings.validation else None
    surveyed = survey(source, cache / "surveys", say)
    if held:
        return [Split(source, surveyed), Split(held, survey(held, cache / "surveys", say))]
    if not fraction:
        return [Split(source, surveyed)]
    return [Split(source, surveyed, "train", fraction), Split(source, surveyed, "validation", fraction)]


def _tokenizer(
    settings: TokenizerConfig, splits: list[Split], specials: tuple[str, ...], cache: Path, say: Say
) -> Tokenizer:
    if settings.path:
        return Tokenizer.load(settings.path)
    if settings.kind == "bytes":
        return byte_tokenizer(specials)
    if settings.kind == "bpe":
        facts: tuple[object, ...] = (splits[0].identity(), settings.vocab_size, settings.training_bytes)
    else:
        facts = tuple(split.survey.content for split in splits)
    path = cache / f"{fingerprint(FORMAT, settings.kind, *facts, *specials)}.json"
    if not path.exists():
        with claimed(cache, say):
            if not path.exists():
                _make(settings, splits, specials, say).save(path)
                return Tokenizer.load(path)
    say(f"tokenizer: reusing {path}")
    return Tokenizer.load(path)


def _make(settings: TokenizerConfig, splits: list[Split], specials: tuple[str, ...], say: Say) -> Tokenizer:
    began = time.perf_counter()
    if settings.kind == "bpe":
        size = _megabytes(min(splits[0].bytes, settings.training_bytes))
        say(f"tokenizer: training {settings.vocab_size:,} entries of byte-level BPE on {size} of {splits[0].source}")
        made = train_bpe_tokenizer(spread(splits[0], settings.training_bytes), settings.vocab_size, specials)
    else:
        say("tokenizer: taking the characters of " + " and ".join(dict.fromkeys(str(split.source) for split in splits)))
        texts = (piece.text for split in splits for piece in split.source.pieces())
        made = character_tokenizer(texts, specials)
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


def _text_store(split: Split, tokenizer: Tokenizer, cache: Path, say: Say) -> TokenStore:
    directory = cache / fingerprint(FORMAT, split.identity(), tokenizer.fingerprint())
    build = functools.partial(open_or_build, directory, split.pieces, tokenizer, say, split.bytes)
    return _told(split, TokenStore.open(directory), build, "documents", say)


def _example_store(split: Split, objective: str, form: Form, cache: Path, say: Say) -> ExampleStore:
    directory = cache / fingerprint(FORMAT, split.identity(), form.tokenizer.fingerprint(), objective)
    build = functools.partial(open_or_encode, directory, split.pieces, form.encode, say)
    return _told(split, ExampleStore.open(directory), build, "examples", say)


def _example_rows(
    split: Split, store: ExampleStore, form: Form, labels: tuple[str, ...], seed: int, say: Say
) -> ExampleRows:
    if labels:
        store.number_as(labels, str(split.source))
    rows = ExampleRows(store, form, seed)
    if form.packs:
        say(f"{split.name}: packed in {len(rows):,} rows, {rows.filled:.0%} of them filled")
    if rows.cut:
        say(f"{split.name}: {rows.cut:,} of {len(store):,} examples are longer than a row, and are cut at the end")
    return rows


def _told(split: Split, found: Store | None, build: Callable[[], Store], things: str, say: Say) -> Store:
    """The store that was found, or one that is built now, said in a line."""
    began = time.perf_counter()
    if not found:
        say(f"{split.name}: tokenizing {_megabytes(split.bytes)} of {split.source} ({split.rule()})")
    store = found or build()
    how = f"reusing {store.directory}" if found else f"made in {time.perf_counter() - began:.1f} s"
    facts = f"{store.tokens:,} tokens, {store.documents:,} {things}, {_megabytes(store.bytes)} of text"
    say(f"{split.name}: {facts}, {how}")
    return store


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
