"""From settings to rows ready for training: which part of a text is held out, and the tokenizer and
the stores, which are found or built."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from jaxformer.config.run import DataConfig, TokenizerConfig, named_sources
from jaxformer.config.settings import Log
from jaxformer.data.documents import (
    PIECE_CHARACTERS,
    Piece,
    fingerprint,
    hash_fraction,
    joint_fingerprint,
)
from jaxformer.data.examples import ExampleStore, open_or_encode
from jaxformer.data.ids import open_or_index
from jaxformer.data.mixture import Mixture, shares_of
from jaxformer.data.records import Fields
from jaxformer.data.rows import Rows
from jaxformer.data.source import (
    Scan,
    Source,
    changed,
    file_groups,
    find_source,
    sample,
    scan,
    whole_parts,
)
from jaxformer.data.store import (
    MANIFEST,
    GrowingStore,
    ProgressNotes,
    TokenStore,
    claimed,
    head_of,
    make_folder,
    open_or_build,
)
from jaxformer.data.task import Task
from jaxformer.data.templates import ExampleRows, Template
from jaxformer.files import ConfigError, located, store_of
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

# With fewer documents to hold out than this the choice by hash could miss, so the end of the text
# is held out.
FEWEST_HELD_OUT = 10

SideName = Literal["train", "validation"]
SIDES: tuple[SideName, ...] = get_args(SideName)


@dataclass(frozen=True)
class Split:
    """One side of a text: all of it, or what is kept for training, or the `fraction` held out for
    validation.

    Documents are chosen by a hash of their name (a path, or their number in their file), so that
    more text moves none of them. Where there are few documents, the last `fraction` of the tokens,
    or of the records, is held out.
    """

    source: Source
    scan: Scan
    side: Literal["all", SideName] = "all"
    fraction: float = 0.0

    @property
    def name(self) -> str:
        if self.side == "validation":
            return self.side
        return self.source.setting.removeprefix("data.")

    @property
    def by_document(self) -> bool:
        # Both sides are to have so many.
        return self.scan.documents * min(self.fraction, 1 - self.fraction) >= FEWEST_HELD_OUT

    @property
    def bytes(self) -> int:
        """Bytes of text on this side; an expectation where documents are chosen by hash."""
        fractions = {"all": 1.0, "train": 1 - self.fraction, "validation": self.fraction}
        return int(self.scan.bytes * fractions[self.side])

    def rule(self) -> str:
        """Return a description of this side, for messages and digests."""
        if self.side == "all":
            return "all text"
        rule = f"the end of the text, {self.fraction:g} of it"
        if self.by_document:
            rule = f"documents chosen by hash, {self.fraction:g} of it"
        if self.side == "train":
            rule = f"without {rule}"
        return rule

    def identity(self) -> str:
        """Return a digest of the text on this side, known without reading it."""
        return fingerprint(self.scan.content, self.rule())

    def of(self, store: TokenStore) -> TokenStore:
        """Return this side of the text's tokens."""
        if self.side == "all":
            return store
        held_out = self.side == "validation"
        # The same documents as `pieces` gives, by the hashes that the store keeps.
        if self.by_document:
            return store.held_out(self.fraction, inverse=not held_out)
        return store.cut(self.fraction, after=held_out)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of this side's documents, in order; where a document is cut, about as
        many bytes as `of` has tokens."""
        pieces = self.source.pieces()
        train_fraction = 1 - self.fraction
        held_out = self.side == "validation"
        if self.side == "all":
            yield from pieces
        elif self.by_document:
            for piece in pieces:
                if (hash_fraction(piece.document) < self.fraction) is held_out:
                    yield piece
        elif self.source.of_records:
            # A record is whole on one side, so its place decides and not its bytes.
            border = round(self.scan.documents * train_fraction)
            if held_out:
                yield from itertools.islice(pieces, border, None)
            else:
                yield from itertools.islice(pieces, border)
        else:
            # A character that the border cuts goes to neither side.
            border = int(self.scan.bytes * train_fraction)
            for piece in pieces:
                raw = piece.text.encode()
                cut = max(0, border)
                side = raw[:cut]
                if held_out:
                    side = raw[cut:]
                if text := side.decode(errors="ignore"):
                    yield piece._replace(text=text)
                border -= len(raw)


@dataclass(frozen=True)
class Corpus:
    """The data of a run as rows; `validation` is None where nothing is held out.

    `labels` are the names of classes or tags, in the order of their numbers; `held_out` is what
    `validation` is made of.
    """

    tokenizer: Tokenizer
    task: Task
    labels: tuple[str, ...]
    train: Rows
    validation: Rows | None
    held_out: list[Split]

    def validation_records(self) -> Iterator[Piece]:
        """Return the records that are held out."""
        return itertools.chain.from_iterable(split.pieces() for split in self.held_out)


class ModelLabels(NamedTuple):
    """The labels of a model that has some already, which are taken in place of the training data's;
    where they `may_grow`, the data may have others, as `joined_labels` says."""

    names: tuple[str, ...] = ()
    may_grow: bool = False


NO_LABELS = ModelLabels()


class Part(NamedTuple):
    """A side of a source, and the tokens of the source's whole text, or the examples of the
    side."""

    split: Split
    store: TokenStore | ExampleStore


class Tokenized(NamedTuple):
    """What a run reads, as tokens: on each side the parts of its sources, which are examples where
    there is a `template`."""

    tokenizer: Tokenizer
    template: Template | None
    parts: dict[SideName, list[Part]]


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
    """Make or find the tokenizer and the stores of a run, and cut them into rows.

    `seed` gives the order in which whole examples are packed. `vocab_size` is the model's, which
    the tokenizer has to fit in; 0 takes any. ConfigError for data that cannot be used.
    """
    tokenizer, template, parts = tokenize(
        data, settings, task, vocab_size=vocab_size, log=log, wait=data.order != "text"
    )
    labels = model_labels.names
    # The numbers of labels are those of the model that is trained further, so that its head means
    # what it meant; only then come new ones.
    if template and (model_labels.may_grow or not labels):
        met = set[str]()
        for _, store in parts["train"]:
            if isinstance(store, ExampleStore):
                met.update(store.labels)
        labels = joined_labels(labels, met)
    # The counts of tokens are known from here on, but for a text in the making.
    rows: dict[SideName, Rows] = {}
    for side in SIDES:
        # What is held out is read in order, without the shares of what is trained on.
        how = data
        if side == "validation":
            how = replace(data, weights="", order="epochs")
        made: list[tuple[str, Rows]] = []
        for split, store in parts[side]:
            spec = split.source.spec
            if template and isinstance(store, ExampleStore):
                made.append((spec, example_rows(split, store, template, labels, seed, log)))
            elif isinstance(store, TokenStore):
                store.fetch()
                text = split.of(store)
                # The number of tokens would wait for all of them.
                counts = "tokens in the making"
                if not isinstance(text, GrowingStore):
                    counts = f"{text.tokens:,} tokens, {text.documents:,} documents"
                about = "about " if text.is_cut else ""
                log(
                    f"{split.name}: {counts}, {about}{megabytes(text.bytes)} of text of {spec}"
                    f" ({split.rule()})"
                )
                made.append((spec, task.rows(text, how, task.format, tokenizer)))
        if len(made) > 1:
            rows[side] = Mixture(made, how)
        elif made:
            rows[side] = made[0][1]
    held_out = [split for split, _ in parts["validation"]]
    return Corpus(tokenizer, task, labels, rows["train"], rows.get("validation"), held_out)


def tokenize(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    *,
    vocab_size: int = 0,
    log: Log = lambda line: None,
    wait: bool = True,
) -> Tokenized:
    """Make or find the tokenizer and the stores of a run. Every text is read once before, so that
    errors show before any work, and a text that is on both sides is tokenized once. One text that
    is trained on as a whole, in its order, is read and tokenized later.

    ConfigError for data that cannot be used; `vocab_size` is as in `prepare`. Without `wait` such a
    text may be in the making when this returns.
    """
    # 1. Find the files, and read each once, unless an earlier start has.
    sources = {"train": find_texts(data, "data.train", task.fields), "validation": []}
    shares_of([source.spec for source in sources["train"]], data)
    if data.validation:
        sources["validation"] = find_texts(data, "data.validation", task.fields)
    cache = located(data.cache_dir)
    make_folder(cache / "scans")
    tokenizer = given_tokenizer(settings, task.specials)
    # The ids of a file say nothing without the tokenizer that made them.
    of_ids = tokenizer if settings.path else None
    fraction = data.validation_fraction
    if data.validation:
        fraction = 0.0
    in_order = data.order == "text" and not fraction and len(sources["train"]) == 1
    sides: dict[SideName, list[Split]] = {side: [] for side in SIDES}
    for side in SIDES:
        for source in sources[side]:
            if side == "train" and in_order and source.on_disk and not source.of_ids:
                whole = sample(source, cache / "scans")
            else:
                whole = scan(source, cache / "scans", log, of_ids)
            sides[side].append(Split(source, whole))
    if fraction:
        # The side for training last, of which both are parts.
        for side in reversed(SIDES):
            sides[side] = [replace(each, side=side, fraction=fraction) for each in sides["train"]]
    # 2. Take or make the tokenizer, which has to fit the objective and the model.
    if tokenizer is None:
        tokenizer = made_tokenizer(settings, task.specials, sides, cache / "tokenizers", log)
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
    # 3. Tokenize: a text whole, since both sides are parts of it by place; records each side alone.
    template: Template | None = None
    if task.template:
        template = task.template(task.format, tokenizer)
        for warning in template.warnings():
            log(f"warning: {warning}")
    parts: dict[SideName, list[Part]] = {side: [] for side in SIDES}
    texts: dict[Source, TokenStore] = {}
    for side, splits in sides.items():
        for split in splits:
            if template is None:
                if split.source not in texts:
                    beginning = task.beginning(data.bos, tokenizer)
                    grows = not wait and (side, split.side) == ("train", "all")
                    grows = grows and not split.source.of_ids
                    texts[split.source] = text_store(split, cache, tokenizer, beginning, log, grows)
                parts[side].append(Part(split, texts[split.source]))
                continue
            made_by = (tokenizer.fingerprint(), task.name, *template.recipe)
            directory = cache / "stores" / fingerprint(FORMAT, split.identity(), *made_by)
            log(f"{split.name}: tokens of {split.source} ({split.rule()}) in {directory}")
            examples = open_or_encode(directory, split.pieces, template.encode, log)
            log(
                f"{split.name}: {examples.tokens:,} tokens, {examples.documents:,} examples,"
                f" {megabytes(examples.bytes)} of text"
            )
            parts[side].append(Part(split, examples))
    return Tokenized(tokenizer, template, parts)


def find_texts(data: DataConfig, setting: str, fields: Fields) -> list[Source]:
    """Return the sources that `data.train` or `data.validation` names."""
    specs = named_sources(getattr(data, setting.removeprefix("data.")))
    if not specs:
        raise ConfigError(
            f"{setting} names no source: give a file, a directory, a glob, or stdlib."
        )
    return [find_source(spec, setting, fields, data.malformed) for spec in specs]


def given_tokenizer(settings: TokenizerConfig, specials: tuple[str, ...]) -> Tokenizer | None:
    """Return the tokenizer of a file, or of bytes; None where it needs text."""
    if not settings.path:
        return byte_tokenizer(specials) if settings.kind == "bytes" else None
    path = located(settings.path)
    if not path.exists():
        raise ConfigError(
            f"tokenizer.path: {settings.path} does not exist: name a tokenizer.json, a directory of"
            " one or of GPT-2's vocab.json and merges.txt, or leave it empty to have one made."
        )
    return Tokenizer.load(path).with_special_tokens(settings.added)


def made_tokenizer(
    settings: TokenizerConfig,
    specials: tuple[str, ...],
    sides: dict[SideName, list[Split]],
    cache: Path,
    log: Log,
) -> Tokenizer:
    """Return a BPE of the text for training, or the characters of all text, kept in `cache`."""
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
    """Yield pieces of a split's text, evenly over all of it, of at most `limit` bytes together; of
    a text that is read while a run trains, its beginning."""
    # Small parts from everywhere, since a text may be sorted: its first 20 MB may be one language.
    # A run that reads a text in its order needs one that is not.
    rate = min(1.0, limit / max(1, split.bytes))
    group = SAMPLE_CHARACTERS
    if rate == 1 or split.scan.is_sampled:
        rate = 1.0
        group = PIECE_CHARACTERS * 2
    seen = 0
    used = 0
    for piece in split.pieces():
        for start in range(0, len(piece.text), group):
            text = piece.text[start : start + group]
            size = len(text.encode())
            seen += size
            if split.scan.is_sampled and seen > limit:
                return
            # A piece is taken where fewer bytes were than the rate gives up to its end.
            if used + size <= min(limit, seen * rate):
                used += size
                yield text


def text_store(
    text: Split,
    cache: Path,
    tokenizer: Tokenizer,
    beginning: tuple[int, ...],
    log: Log,
    grows: bool,
) -> TokenStore:
    """Return the tokens of the whole text of a split, made in the stores of a cache where there are
    none, by a thread where the store `grows`; each document begins with the tokens `beginning`.
    Files of token ids stay as they are."""
    source = text.source
    groups = file_groups(source)
    # A store has the same name for equal text, tokenizer and tokens with which documents begin.
    made_by: list[object] = [tokenizer.fingerprint()]
    if beginning and not source.of_ids:
        made_by.append([*beginning])

    def directories_of(parts: Sequence[Scan]) -> list[Path]:
        return [cache / "stores" / fingerprint(FORMAT, part.content, *made_by) for part in parts]

    def make(tell: Callable[[list[Path]], None] = lambda directories: None) -> TokenStore:
        parts = whole_parts(source, text.scan, cache / "scans", log)
        directories = directories_of(parts)
        tell(directories)
        # What an earlier start or another task has made is taken; of token ids it is the index.
        with ThreadPoolExecutor(STORES_TOGETHER) as threads:
            opened = [*threads.map(TokenStore.open, directories)]
        missing = [part.bytes for part, store in zip(parts, opened, strict=True) if not store]
        progress = ProgressNotes(log, sum(missing))
        began = time.perf_counter()
        if not missing:
            log(f"{source}: reusing {directories[0]}, the first of {len(parts):,} parts")
        elif not source.of_ids:
            of_all = f"{len(missing):,} of {len(parts):,} parts"
            log(f"{source}: tokenizing {megabytes(sum(missing))}, {of_all}")

        def build(group: Source, part: Scan, directory: Path) -> TokenStore:
            def check(documents: int, size: int) -> None:
                if (documents, size) != (part.documents, part.bytes):
                    store_of(directory).remove_folder()
                    raise changed(group)

            if not source.of_ids:
                return open_or_build(directory, group.pieces, tokenizer, progress, beginning, check)
            store = open_or_index(group.files[0], tokenizer, directory, log)
            check(store.documents, store.bytes)
            return store

        stores = []
        for store, group, part, directory in zip(opened, groups, parts, directories, strict=True):
            stores.append(store or build(group, part, directory))
        if missing and not source.of_ids:
            log(f"{source}: tokenized in {time.perf_counter() - began:.1f} s")
        return TokenStore.joined(stores)

    directories = directories_of(text.scan.parts)
    is_made = directories and all((each / MANIFEST).exists() for each in directories)
    if not grows or is_made:
        store = make()
    else:
        # What the first steps read, so that they need not wait for the first shard.
        store = GrowingStore(head_of(groups[0].pieces(), tokenizer, beginning), make)
        store.documents = text.scan.documents
        store.bytes = text.scan.bytes
    if text.scan.is_sampled:
        # The run is known by the digest of the samples, whenever the rest is read.
        directories = directories_of([text.scan])
    store.fingerprint = joint_fingerprint([directory.name for directory in directories])
    return store


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def joined_labels(before: tuple[str, ...], met: set[str]) -> tuple[str, ...]:
    """Return the labels of a model that is trained further, in their order, and then those that
    only the data has: whole numbers by value, then the rest by name. A model that shares no label
    with the data is for another task: then the labels are those of the data alone."""
    if met.isdisjoint(before):
        before = ()
    further = sorted(met.difference(before))
    # "10" after "9", so that classes named by numbers keep their order.
    numbers = sorted(filter(str.isdecimal, further), key=int)
    return (*before, *numbers, *itertools.filterfalse(str.isdecimal, further))


def example_rows(
    split: Split,
    store: ExampleStore,
    template: Template,
    labels: tuple[str, ...],
    seed: int,
    log: Log,
) -> ExampleRows:
    """Return the rows of a split's examples, their labels numbered in the order of `labels`."""
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
