"""From settings to rows ready for training: finds or builds the tokenizer and the stores."""

import itertools
import os
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from jaxformer.config.run import DataConfig, TokenizerConfig, named_sources
from jaxformer.config.settings import Log
from jaxformer.data.documents import PIECE_CHARACTERS, Piece, fingerprint
from jaxformer.data.examples import ExampleStore, open_or_encode
from jaxformer.data.ids import open_or_index
from jaxformer.data.mixture import Mixture, check_shares
from jaxformer.data.records import Fields
from jaxformer.data.rows import Rows
from jaxformer.data.source import Source, file_groups, find_source, scan
from jaxformer.data.splits import SideName, Sides, Split
from jaxformer.data.store import (
    GrowingStore,
    ProgressNotes,
    TokenStore,
    claimed,
    head_of,
    open_or_build,
    remove_folder,
)
from jaxformer.data.task import Task
from jaxformer.data.templates import ExampleRows, Template
from jaxformer.files import ConfigError, located
from jaxformer.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    character_tokenizer,
    set_chat_template,
    train_bpe_tokenizer,
)

# A change in how text becomes tokens or files takes a new number, so that no older cache is read.
FORMAT = 3
STORES_TOGETHER = 16  # stores that are opened at the same time, as those of a URL
# Where a tokenizer is trained on a part of the text, the most that is taken from one place.
SAMPLE_CHARACTERS = 1 << 12

SIDES: tuple[SideName, ...] = get_args(SideName)


@dataclass(frozen=True)
class Corpus:
    """The data of a run as rows; `validation` is None where nothing is held out.

    `labels` are the names of classes or tags, in the order of their numbers; `stores` are the
    tokens of each side's texts, none for records; `held_out` is what `validation` is made of.
    """

    tokenizer: Tokenizer
    task: Task
    labels: tuple[str, ...]
    train: Rows
    validation: Rows | None
    stores: dict[SideName, list[TokenStore]]
    held_out: list[Split]

    def validation_records(self) -> Iterator[Piece]:
        """The records that are held out."""
        return itertools.chain.from_iterable(split.pieces() for split in self.held_out)


class ModelLabels(NamedTuple):
    """The labels of a model that has some already, which are taken in place of the training data's;
    where they `may_grow`, the data may have others, as `joined_labels` says."""

    names: tuple[str, ...] = ()
    may_grow: bool = False


NO_LABELS = ModelLabels()


class Tokenized(NamedTuple):
    """What a run reads, as tokens: on each side the parts of its sources, and of each part the
    whole text that it is of, or the examples of the `template`."""

    tokenizer: Tokenizer
    template: Template | None
    sides: Sides
    texts: dict[SideName, list[TokenStore]]
    examples: dict[SideName, list[ExampleStore]]


def prepare(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    *,
    seed: int,
    vocab_size: int = 0,
    model_labels: ModelLabels = NO_LABELS,
    log: Log = lambda line: None,
) -> Corpus:
    """Makes or finds the tokenizer and the stores of a run, and cuts them into rows.

    `seed` gives the order in which whole examples are packed. `vocab_size` is the model's, which
    the tokenizer has to fit in; 0 takes any. ConfigError for data that cannot be used.
    """
    tokenizer, template, sides, texts, examples = tokenize(
        data, settings, task, vocab_size=vocab_size, log=log, wait=data.order != "text"
    )
    labels = model_labels.names
    if template and (model_labels.may_grow or not labels):
        labels = joined_labels(labels, {name for each in examples["train"] for name in each.labels})
    stores: dict[SideName, list[TokenStore]] = {side: [] for side in SIDES}
    rows: dict[SideName, Rows] = {}
    for side, splits in sides.items():
        # What is held out is read in order, without the shares of what is trained on.
        how = data if side == "train" else replace(data, weights="", order="epochs")
        made: list[Rows] = []
        if template:
            for split, store in zip(splits, examples[side], strict=True):
                made.append(example_rows(split, store, template, labels, seed, log))
        else:
            for split, text in zip(splits, texts[side], strict=True):
                text.fetch()
                part = split.of(text)
                tokens = "tokens in the making"
                if not isinstance(part, GrowingStore):
                    tokens = f"{part.tokens:,} tokens"
                about = "about " if part.is_cut else ""
                log(
                    f"{split.name}: {tokens}, {part.documents:,} documents,"
                    f" {about}{megabytes(part.bytes)} of text of {split.source.spec}"
                    f" ({split.rule()})"
                )
                stores[side].append(part)
                made.append(task.rows(part, how, task.format, tokenizer))
        if len(made) == 1:
            rows[side] = made[0]
        elif made:
            names = [split.source.spec for split in splits]
            rows[side] = Mixture([*zip(names, made, strict=True)], how)
    return Corpus(
        tokenizer, task, labels, rows["train"], rows.get("validation"), stores, sides["validation"]
    )


def tokenize(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    *,
    vocab_size: int = 0,
    log: Log = lambda line: None,
    wait: bool = True,
) -> Tokenized:
    """Makes or finds the tokenizer and the stores of a run. A text that is on both sides is
    tokenized once. ConfigError for data that cannot be used; `vocab_size` is as in `prepare`.
    Without `wait` a whole text for training may be in the making when this returns."""
    cache = located(os.path.expanduser(data.cache_dir))
    sides = find_sides(data, settings, task, cache / "scans", log)
    tokenizer = tokenizer_of(settings, task, vocab_size, sides, cache / "tokenizers", log)
    template = task.template(task.format, tokenizer) if task.template else None
    for warning in template.warnings() if template else ():
        log(f"warning: {warning}")
    texts: dict[SideName, list[TokenStore]] = {side: [] for side in SIDES}
    examples: dict[SideName, list[ExampleStore]] = {side: [] for side in SIDES}
    stores: dict[Source, TokenStore] = {}
    for side, splits in sides.items():
        for split in splits:
            if template:
                made_by = (tokenizer.fingerprint(), task.name, *template.recipe)
                directory = cache / "stores" / fingerprint(FORMAT, split.identity(), *made_by)
                log(f"{split.name}: tokens of {split.source} ({split.rule()}) in {directory}")
                encoded = open_or_encode(directory, split.pieces, template.encode, log)
                log(
                    f"{split.name}: {encoded.tokens:,} tokens, {encoded.documents:,} examples,"
                    f" {megabytes(encoded.bytes)} of text"
                )
                examples[side].append(encoded)
                continue
            if split.source not in stores:
                beginning = task.beginning(data.bos, tokenizer)
                grows = not wait and (side, split.side) == ("train", "all")
                stores[split.source] = text_store(
                    split, cache / "stores", tokenizer, beginning, log, grows
                )
            texts[side].append(stores[split.source])
    return Tokenized(tokenizer, template, sides, texts, examples)


def find_texts(data: DataConfig, setting: str, fields: Fields) -> list[Source]:
    """The sources that `data.train` or `data.validation` names."""
    specs = named_sources(getattr(data, setting.removeprefix("data.")))
    if not specs:
        raise ConfigError(
            f"{setting} names no source: give a file, a directory, a glob, or stdlib."
        )
    return [find_source(spec, setting, fields, data.malformed) for spec in specs]


def find_sides(
    data: DataConfig, settings: TokenizerConfig, task: Task, scans: Path, log: Log
) -> Sides:
    """What is for training, and what is held out. Every text is read once, so that errors show
    before any work; its scan is kept in the directory `scans`."""
    sources: dict[SideName, list[Source]] = {"validation": []}
    sources["train"] = find_texts(data, "data.train", task.fields)
    check_shares([source.spec for source in sources["train"]], data)
    if data.validation:
        sources["validation"] = find_texts(data, "data.validation", task.fields)
    tokenizer = None
    if settings.path and any(source.of_ids for side in SIDES for source in sources[side]):
        tokenizer = given_tokenizer(settings, ())
    sides: Sides = {}
    for side in SIDES:
        sides[side] = [
            Split(source, scan(source, scans, log, tokenizer)) for source in sources[side]
        ]
    fraction = data.validation_fraction
    if data.validation or not fraction:
        return sides
    return {
        side: [replace(split, side=side, fraction=fraction) for split in sides["train"]]
        for side in SIDES
    }


def tokenizer_of(
    settings: TokenizerConfig, task: Task, vocab_size: int, sides: Sides, cache: Path, log: Log
) -> Tokenizer:
    """The tokenizer of a run: that of a file, or one that is made of its text."""
    tokenizer = given_tokenizer(settings, task.specials)
    if tokenizer is None:
        tokenizer = made_tokenizer(settings, task.specials, sides, cache, log)
    if settings.chat_template:
        set_chat_template(tokenizer, settings.chat_template)
    if missing := ", ".join(task.missing(tokenizer)):
        raise ConfigError(
            f"tokenizer.path={settings.path} has no {missing}, which data.objective={task.name}"
            " needs: add them to its added_tokens, or leave tokenizer.path empty to have one made."
        )
    if 0 < vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is less than the tokenizer's {tokenizer.vocab_size:,}"
            f" entries: set it to at least {tokenizer.vocab_size}, or to 0 to take the tokenizer's."
        )
    return tokenizer


def given_tokenizer(settings: TokenizerConfig, specials: tuple[str, ...]) -> Tokenizer | None:
    """The tokenizer of a file, or of bytes; None where it needs text."""
    if not settings.path:
        return byte_tokenizer(specials) if settings.kind == "bytes" else None
    if not located(os.path.expanduser(settings.path)).exists():
        raise ConfigError(
            f"tokenizer.path: {settings.path} does not exist: name a tokenizer.json, a directory of"
            " one or of GPT-2's vocab.json and merges.txt, or leave it empty to have one made."
        )
    return Tokenizer.load(settings.path).with_special_tokens(settings.added)


def made_tokenizer(
    settings: TokenizerConfig, specials: tuple[str, ...], sides: Sides, cache: Path, log: Log
) -> Tokenizer:
    """A BPE of the text for training, or the characters of all text, kept in `cache`."""
    train = sides["train"]
    every = [*train, *sides["validation"]]
    summary: tuple[object, ...] = tuple(dict.fromkeys(split.scan.content for split in every))
    if settings.kind == "bpe":
        texts = [split.identity() for split in train]
        summary = (texts, settings.vocab_size, settings.training_bytes, settings.pattern)
    path = cache / f"{fingerprint(FORMAT, settings.kind, *summary, *specials)}.json"
    # Another process may be making it.
    with claimed(cache, log):
        if path.exists():
            log(f"tokenizer: reusing {path}")
            return Tokenizer.load(path)
        began = time.perf_counter()
        if settings.kind == "characters":
            sources = dict.fromkeys(split.source for split in every)
            log("tokenizer: taking the characters of " + " and ".join(map(str, sources)))
            characters = (piece.text for source in sources for piece in source.pieces())
            made = character_tokenizer(characters, specials)
        else:
            limit = settings.training_bytes
            total = sum(split.bytes for split in train)
            names = " and ".join(str(split.source) for split in train)
            log(
                f"tokenizer: training {settings.vocab_size:,} entries of byte-level BPE on"
                f" {megabytes(min(total, limit))} of {names}"
            )
            shares = [round(limit * split.bytes / max(1, total)) for split in train]
            pieces = itertools.chain.from_iterable(map(spread, train, shares))
            made = train_bpe_tokenizer(pieces, settings.vocab_size, specials, settings.pattern)
        seconds = time.perf_counter() - began
        log(f"tokenizer: {made.vocab_size:,} entries, made in {seconds:.1f} s")
        made.save(path)
    return Tokenizer.load(path)


def spread(split: Split, limit: int) -> Iterator[str]:
    """Pieces of a split's text, evenly over all of it, of at most `limit` bytes together."""
    rate = min(1.0, limit / max(1, split.bytes))
    seen = 0
    used = 0
    group = PIECE_CHARACTERS * 2 if rate == 1 else SAMPLE_CHARACTERS
    for piece in split.pieces():
        for start in range(0, len(piece.text), group):
            text = piece.text[start : start + group]
            size = len(text.encode())
            seen += size
            # A piece is taken where fewer bytes were than the rate gives up to its end.
            if used + size <= min(limit, seen * rate):
                used += size
                yield text


def text_store(
    text: Split,
    folder: Path,
    tokenizer: Tokenizer,
    beginning: tuple[int, ...],
    log: Log,
    grows: bool,
) -> TokenStore:
    """The tokens of the whole text of a split in a directory of stores, made where there are none,
    by a thread where the store `grows`; each document begins with the tokens `beginning`. Files of
    token ids stay as they are."""
    source = text.source
    parts = text.scan.parts
    groups = file_groups(source)
    # A store has the same name for equal text, tokenizer and tokens with which documents begin.
    made_by: list[object] = [tokenizer.fingerprint()]
    if beginning and not source.of_ids:
        made_by.append([*beginning])
    names = [fingerprint(FORMAT, part.content, *made_by) for part in parts]
    directories = [folder / name for name in names]
    opened: list[TokenStore | None]
    if source.of_ids:
        opened = [
            open_or_index(group.files[0], tokenizer, directory, log)
            for group, directory in zip(groups, directories, strict=True)
        ]
    else:
        with ThreadPoolExecutor(STORES_TOGETHER) as threads:
            opened = [*threads.map(TokenStore.open, directories)]
    missing = [part for part, store in zip(parts, opened, strict=True) if store is None]
    count = len(groups)
    size = sum(part.bytes for part in missing)
    if missing:
        of_all = f", {len(missing)} of {count} parts" if count > 1 else ""
        log(f"{source}: tokenizing {megabytes(size)}{of_all}")
    elif not source.of_ids:
        and_more = f" and {count - 1:,} more" if count > 1 else ""
        log(f"{source}: reusing {directories[0]}{and_more}")

    def make() -> TokenStore:
        progress = ProgressNotes(log, size)
        began = time.perf_counter()
        stores = []
        for directory, group, part, store in zip(directories, groups, parts, opened, strict=True):
            if store is None:
                store = open_or_build(directory, group.pieces, tokenizer, progress, beginning)
            if (part.documents, part.bytes) != (store.documents, store.bytes):
                remove_folder(directory)
                raise ConfigError(
                    f"{group}: its files changed while they were read: run again when they no"
                    " longer change."
                )
            stores.append(store)
        if missing:
            log(f"{source}: tokenized in {time.perf_counter() - began:.1f} s")
        return TokenStore.joined(stores)

    if not (missing and grows):
        return make()
    head = opened[0] or head_of(groups[0].pieces(), tokenizer, beginning)
    growing = GrowingStore(head, directories, make)
    growing.documents = text.scan.documents
    growing.bytes = text.scan.bytes
    return growing


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def joined_labels(before: tuple[str, ...], met: Set[str]) -> tuple[str, ...]:
    """The labels of a model that is trained further, in their order, and then those that only the
    data has: whole numbers by value, then the rest by name. A model that shares no label with the
    data is for another task: then the labels are those of the data alone."""
    if met.isdisjoint(before):
        before = ()
    numbers = [label for label in met if label.isdecimal()]
    in_order = [*sorted(sorted(numbers), key=int), *sorted(met - {*numbers})]
    return (*before, *(label for label in in_order if label not in before))


def example_rows(
    split: Split,
    store: ExampleStore,
    template: Template,
    labels: tuple[str, ...],
    seed: int,
    log: Log,
) -> ExampleRows:
    """The rows of a split's examples, their labels numbered in the order of `labels`."""
    if labels:
        store.number_as(labels, str(split.source))
    rows = ExampleRows(store, template, seed)
    count = len(store)
    if rows.left_out:
        remedy = "set data.sequence_length to more"
        if template.cut == "end":
            remedy += ", or data.cut=prompt, which keeps the beginning of each answer"
        if not len(rows):
            longest = int(template.sizes(store.lengths()).max())
            raise ConfigError(
                f"{split.source} ({split.rule()}): none of its {count:,} examples has anything to"
                f" learn in a row of data.sequence_length={template.length:,}; the longest takes"
                f" {longest:,} tokens. Check what is to be learned of them, or {remedy}."
            )
        log(
            f"{split.name}: {rows.left_out:,} of {count:,} examples ({rows.left_out / count:.0%})"
            f" are left out: within data.sequence_length={template.length:,} nothing of them is"
            f" learned; to keep what was cut away, {remedy}"
        )
    if template.packs:
        log(f"{split.name}: packed in {len(rows):,} rows, {rows.filled:.0%} of them filled")
    if rows.cut:
        log(
            f"{split.name}: {rows.cut:,} of {count - rows.left_out:,} examples are longer than a"
            f" row, and are cut {template.cut_where}"
        )
    return rows
