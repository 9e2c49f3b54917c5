"""From settings to rows ready for training: finds or builds the tokenizer and the stores."""

import itertools
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxformer.config import ConfigError, DataConfig, TokenizerConfig
from jaxformer.data.examples import ExampleStore, open_or_encode
from jaxformer.data.ids import IdFiles
from jaxformer.data.mixture import Mixture, check_shares
from jaxformer.data.packing import ExampleRows
from jaxformer.data.rows import Rows
from jaxformer.data.sources import Piece, Source, fingerprint
from jaxformer.data.splits import Sides, Split
from jaxformer.data.store import TokenStore
from jaxformer.data.task import Task
from jaxformer.data.templates import Template
from jaxformer.data.texts import (
    FORMAT,
    SCANS,
    TOKENIZERS,
    find_held,
    find_texts,
    megabytes,
    scan_of,
    store_of,
)
from jaxformer.data.vocabulary import given_tokenizer, make_tokenizer
from jaxformer.settings import Log
from jaxformer.tokenizer import Tokenizer

# Tokens of a text that are decoded at a time.
BLOCK_TOKENS = 1 << 20

SIDES: tuple[Literal["train", "validation"], ...] = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """The data of a run as rows; `validation` is None where nothing is held out.

    `task` is what is learnt of it; `labels` are the names of classes or tags, in the order of their
    numbers; `stores` are the tokens of each side's texts, none of them for records.
    """

    tokenizer: Tokenizer
    task: Task
    labels: tuple[str, ...]
    train: Rows
    validation: Rows | None
    sides: Sides
    stores: dict[str, list[TokenStore]]

    def validation_text(self) -> Iterator[str]:
        """The text that the validation tokens stand for, in pieces; none where they are not each
        told from the last."""
        for store in self.stores["validation"] if self.task.every_token else ():
            for start in range(0, store.tokens, BLOCK_TOKENS):
                yield self.tokenizer.decode(store.read(start, start + BLOCK_TOKENS))

    def validation_records(self) -> Iterator[Piece]:
        """The records that are held out."""
        return itertools.chain.from_iterable(split.pieces() for split in self.sides["validation"])


def prepare(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    *,
    seed: int,
    vocab_size: int = 0,
    labels: tuple[str, ...] = (),
    log: Log = lambda line: None,
) -> Corpus:
    """Makes or finds the tokenizer and the stores of a run, and cuts them into rows.

    `seed` gives the order in which whole examples are packed. `vocab_size` is the model's, which
    the tokenizer has to fit in; 0 takes any. `labels` are those of a model that knows some already,
    in place of the training data's. Raises ConfigError for data that cannot be used.
    """
    cache = Path(os.path.expanduser(data.cache_dir))
    sides = find_sides(data, settings, task, cache / SCANS, log)
    tokenizer = tokenizer_of(settings, task, vocab_size, sides, cache, log)
    stores: dict[str, list[TokenStore]] = {side: [] for side in sides}
    rows: dict[str, list[Rows]] = {}
    if task.template:
        template = task.template(task.format, tokenizer)
        examples = _example_stores(sides, task.name, template, cache / "stores", log)
        met = {label for store in examples["train"] for label in store.labels}
        labels = labels or in_order(met)
        rows = _example_rows(sides, examples, template, labels, seed, log)
    else:
        stores = text_stores(sides, tokenizer, cache / "stores", log)
        for side, several in stores.items():
            rows[side] = [task.rows(store, data, task.format, tokenizer) for store in several]
    train, validation = (_mixed(sides[side], rows[side], data) for side in SIDES)
    if train is None:
        raise ConfigError(f"data.train={data.train} holds nothing to train on.")
    return Corpus(tokenizer, task, labels, train, validation, sides, stores)


def find_sides(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    scanned: Path,
    log: Log = lambda line: None,
) -> Sides:
    """What is for training, and what is held out; every text is read once, so that a fault shows
    before any work.

    What was read before is found again in the folder `scanned`.
    """
    fraction = data.validation_fraction
    train, held_out = find_named(data, settings, task)
    texts = [(source, scan_of(source, scanned, log)) for source in train]
    held = [(source, scan_of(source, scanned, log)) for source in held_out]
    if held or not fraction:
        return {
            "train": [Split(*text) for text in texts],
            "validation": [Split(*text) for text in held],
        }
    return {side: [Split(*text, side, fraction) for text in texts] for side in SIDES}


def find_named(
    data: DataConfig, settings: TokenizerConfig, task: Task
) -> tuple[list[Source], list[Source]]:
    """The texts for training and those for validation that the settings name, not yet read."""
    sources = find_texts(data, "data.train", task.fields)
    check_shares([source.spec for source in sources], data)
    held = find_held(data, sources, task.fields)
    return _with_tokenizer(sources, settings), _with_tokenizer(held, settings)


def _with_tokenizer(sources: list[Source], settings: TokenizerConfig) -> list[Source]:
    """The sources, those of token ids with the tokenizer that tokenizer.path names.

    Raises ConfigError where there are ids, and no such tokenizer.
    """
    if not any(isinstance(source, IdFiles) for source in sources):
        return sources
    given = given_tokenizer(settings, ()) if settings.path else None
    return [source.of(given) if isinstance(source, IdFiles) else source for source in sources]


def tokenizer_of(
    settings: TokenizerConfig, task: Task, vocab_size: int, sides: Sides, cache: Path, log: Log
) -> Tokenizer:
    """The tokenizer of a run, made or found. Raises ConfigError where `check_fit` does."""
    tokenizer = make_tokenizer(settings, sides, task.specials, cache / TOKENIZERS, log)
    check_fit(task, vocab_size, tokenizer, settings.path)
    return tokenizer


def check_fit(task: Task, vocab_size: int, tokenizer: Tokenizer, path: str) -> None:
    """Raises ConfigError for a tokenizer (that of tokenizer.path=`path`, if any) that a task, or a
    model of `vocab_size` entries, cannot do with.
    """
    task.check_tokenizer(tokenizer, path)
    if 0 < vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is less than the tokenizer's {tokenizer.vocab_size:,}"
            f" entries: set it to at least {tokenizer.vocab_size}, or to 0 to take the tokenizer's."
        )


def text_stores(
    sides: Sides, tokenizer: Tokenizer, folder: Path, log: Log
) -> dict[str, list[TokenStore]]:
    """The tokens of each side's texts. A text that is on both sides is tokenized once."""
    whole: dict[int, TokenStore] = {}
    found: dict[str, list[TokenStore]] = {}
    for side, splits in sides.items():
        found[side] = []
        for split in splits:
            key = id(split.source)
            whole[key] = whole.get(key) or store_of(
                split.source, split.scan, tokenizer, folder, log
            )
            store = split.of(whole[key])
            found[side].append(store)
            summary = (
                f"{store.tokens:,} tokens, {store.documents:,} documents, {megabytes(store.bytes)}"
                " of text"
            )
            log(f"{split.name}: {summary} of {split.source.spec} ({split.rule()})")
    return found


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers: whole numbers by value, then the rest by name."""
    return tuple(
        sorted(
            labels, key=lambda label: (0, int(label), label) if label.isdecimal() else (1, 0, label)
        )
    )


def gzip_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits that `gzip -9` takes for each byte of the texts, one after the other; nan where there
    are none."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    size = packed = 0
    for text in texts:
        raw = text.encode()
        size += len(raw)
        packed += len(packer.compress(raw))
    return 8 * (packed + len(packer.flush())) / size if size else float("nan")


def _example_rows(
    sides: Sides,
    stores: dict[str, list[ExampleStore]],
    template: Template,
    labels: tuple[str, ...],
    seed: int,
    log: Log,
) -> dict[str, list[Rows]]:
    """The rows of each side's records, their labels numbered in the order of `labels`."""
    rows: dict[str, list[Rows]] = {side: [] for side in SIDES}
    for side in SIDES:
        for store, split in zip(stores[side], sides[side], strict=True):
            if labels:
                store.number_as(labels, str(split.source))
            made = ExampleRows(store, template, seed)
            if template.packs:
                log(f"{split.name}: packed in {len(made):,} rows, {made.filled:.0%} of them filled")
            if made.cut:
                log(
                    f"{split.name}: {made.cut:,} of {len(store):,} examples are longer than a row,"
                    " and are cut at the end"
                )
            rows[side].append(made)
    return rows


def _example_stores(
    sides: Sides, name: str, template: Template, folder: Path, log: Log
) -> dict[str, list[ExampleStore]]:
    """The examples of each side's records, made or found; `name` is the objective's."""
    found: dict[str, list[ExampleStore]] = {side: [] for side in SIDES}
    for side in SIDES:
        for split in sides[side]:
            found[side].append(_example_store(split, name, template, folder, log))
    return found


def _example_store(
    split: Split, objective: str, template: Template, folder: Path, log: Log
) -> ExampleStore:
    made_by = template.tokenizer.fingerprint()
    directory = folder / fingerprint(FORMAT, split.identity(), made_by, objective)
    began = time.perf_counter()
    found = ExampleStore.open(directory)
    if not found:
        log(f"{split.name}: tokenizing {megabytes(split.bytes)} of {split.source} ({split.rule()})")
    store = found or open_or_encode(directory, split.pieces, template.encode, log)
    how = f"reusing {store.directory}" if found else f"made in {time.perf_counter() - began:.1f} s"
    summary = (
        f"{store.tokens:,} tokens, {store.documents:,} examples, {megabytes(store.bytes)} of text"
    )
    log(f"{split.name}: {summary}, {how}")
    return store


def _mixed(splits: list[Split], rows: list[Rows], data: DataConfig) -> Rows | None:
    """The rows of several texts as those of one, in the shares that the settings give where they
    are for training."""
    if len(rows) < 2:
        return rows[0] if rows else None
    named = [(split.source.spec, each) for split, each in zip(splits, rows, strict=True)]
    return Mixture(
        named, data if splits[0].name == "train" else replace(data, weights="", epochs="")
    )
