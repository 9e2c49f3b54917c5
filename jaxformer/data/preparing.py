"""Tokenizes a run's text beforehand: all of it, or the part of one of many independent tasks."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxformer.config.run import DataConfig, TokenizerConfig
from jaxformer.config.settings import Log
from jaxformer.data.cache_files import MANIFEST, WRONG_RECORD
from jaxformer.data.corpus import check_fit, find_named, find_sides, given_tokenizer, tokenizer_of
from jaxformer.data.sources import IdFiles, Source
from jaxformer.data.sources.records import is_text
from jaxformer.data.splits import Scan, SideName, Split
from jaxformer.data.store import TokenStore
from jaxformer.data.task import Task
from jaxformer.data.texts import SCANS, TOKENIZERS, Prepared, StoreFolder
from jaxformer.files import (
    ConfigError,
    is_remote,
    located,
    make_directory,
    read_object,
    store_errors,
)


@dataclass(frozen=True)
class TextSummary:
    """What a tokenized text holds: tokens with the end of each document, bytes of text, the longest
    document in tokens."""

    name: str
    documents: int
    tokens: int
    bytes: int
    longest: int
    skipped: tuple[str, ...]


def prepare_text(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    *,
    output: Path | None = None,
    thorough: bool = False,
    vocab_size: int = 0,
    log: Log = lambda line: None,
) -> list[TextSummary]:
    """Tokenizes all text of a run that is not yet tokenized, to its cache or to `output`, which is
    then a source.

    `thorough` reads all that is there, compares it with its checksums, and makes nothing.
    `vocab_size` is the model's, 0 for any. Raises ConfigError for text, or a store, that cannot be
    used.
    """
    _require_text(task)
    if thorough and output:
        data = replace(data, train=str(output), validation="", weights="", epochs="")
        output = None
    cache, folder = _folders(data, output)
    sides = find_sides(data, settings, task, cache / SCANS, log)
    if output:
        _require_sources(split.source for splits in sides.values() for split in splits)
    tokenizer = tokenizer_of(settings, task, vocab_size, sides, cache, log)
    stores = StoreFolder(folder, tokenizer, task.beginning(data.bos, tokenizer), log)
    if output:
        _require_same_origin(stores, [split.source.spec for split in sides["train"]])
    summary: list[TextSummary] = []
    texts: dict[SideName, list[tuple[Source, Scan]]] = {side: [] for side in sides}
    for side, splits in sides.items():
        for split in splits:
            # A text that is on both sides is tokenized for training.
            if side == "train" or split.side == "all":
                store = stores.store_of(split.source, split.scan, thorough)
                summary.append(_summary(split, store))
                texts[side].append((split.source, split.scan))
    if output:
        stores.write_prepared(texts)
    return summary


def prepare_share(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    share: tuple[int, int],
    *,
    output: Path | None = None,
    vocab_size: int = 0,
    log: Log = lambda line: None,
) -> None:
    """Makes the shards of task `share[0]` of `share[1]`.

    Where a tokenizer has to be trained, each task reads all text, and trains it unless another task
    did before: the results are equal.
    """
    _require_text(task)
    cache, folder = _folders(data, output)
    train, validation = find_named(data, settings, task)
    if output:
        _require_sources([*train, *validation])
    tokenizer = given_tokenizer(settings, task.specials)
    if tokenizer is None:
        log("each task reads all text to train the tokenizer; with --tokenizer.path only its part")
        sides = find_sides(data, settings, task, cache / SCANS, log)
        tokenizer = tokenizer_of(settings, task, vocab_size, sides, cache, log)
    check_fit(task, vocab_size, tokenizer, settings.path)
    stores = StoreFolder(folder, tokenizer, task.beginning(data.bos, tokenizer), log)
    if output:
        _require_same_origin(stores, [source.spec for source in train])
    for source in [*train, *validation]:
        if not isinstance(source, (Prepared, IdFiles)):
            stores.build_part(source, cache / SCANS, share)


def _folders(data: DataConfig, output: Path | None) -> tuple[Path, Path]:
    """The directory for scans and tokenizers, and that for stores. Raises ConfigError where
    `output` cannot be made, or holds what an earlier call did not write."""
    if not output:
        cache = located(os.path.expanduser(data.cache_dir))
        return cache, cache / "stores"
    remedy = "name one that is new, or that an earlier call began"
    try:
        make_directory(output)
        with store_errors(output, "listed"):
            names = sorted(path.name for path in _entries(output))
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be used ({error.strerror or error}): {remedy}."
        ) from None
    if not is_remote(output) and not os.access(output, os.W_OK):
        raise ConfigError(f"--output {output} cannot be written: {remedy}.")
    prepared_names = re.compile(f"[0-9a-f]{{32}}|{SCANS}|{TOKENIZERS}")
    if names and not any(map(prepared_names.fullmatch, names)):
        raise ConfigError(
            f"--output {output} holds other things ({', '.join(names[:3])}): {remedy}."
        )
    return output, output


def _entries(folder: Path) -> list[Path]:
    """What is in a directory, without hidden files; a store has no directory without objects."""
    if is_remote(folder) and not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _require_same_origin(output: StoreFolder, specs: list[str]) -> None:
    """Raises ConfigError for a directory that other text, another tokenizer or another data.bos
    made."""
    try:
        manifest = read_object(output.path / MANIFEST)
        before = [entry["spec"] for entry in manifest["train"]]
        difference = ""
        if manifest["tokenizer"] != output.tokenizer.fingerprint():
            difference = "with another tokenizer"
        elif tuple(manifest.get("beginning", ())) != output.beginning:
            difference = "with another data.bos"
    except WRONG_RECORD:
        return
    if before != specs:
        difference = f"of other text ({'; '.join(before)})"
    if difference:
        raise ConfigError(
            f"--output {output.path} was prepared {difference}: name a new directory, so that"
            " nothing is lost."
        )


def _require_sources(sources: Iterable[Source]) -> None:
    """Raises ConfigError for sources that hold tokens already."""
    for source in sources:
        if isinstance(source, IdFiles):
            raise ConfigError(
                f"--output: {source} holds token ids already: train on it as it is, or name its"
                " text."
            )
        if isinstance(source, Prepared):
            raise ConfigError(
                f"--output: {source.folder}, of {source.setting}, is prepared already: train on it"
                " as it is, or name its text."
            )


def _require_text(task: Task) -> None:
    if not is_text(task.fields):
        raise ConfigError(
            f"data.objective={task.name} reads records, which training encodes itself: jaxformer"
            " prepare tokenizes text."
        )


def _summary(split: Split, store: TokenStore) -> TextSummary:
    longest = int(np.diff(store.ends(), prepend=0).max(initial=0))
    skipped, name = tuple(split.scan.skipped.lines()), str(split.source)
    return TextSummary(name, store.documents, store.tokens, store.bytes, longest, skipped)
