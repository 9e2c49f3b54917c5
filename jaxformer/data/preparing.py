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
from jaxformer.data.ids import IdFiles
from jaxformer.data.sources import Source
from jaxformer.data.sources.records import is_text
from jaxformer.data.splits import Scan, SideName, file_groups, scan_group
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
    `vocab_size` is the model's, 0 for any.
    """
    _require_text(task)
    if thorough and output:
        data = replace(data, train=str(output), validation="", weights="")
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
            if side == "validation" and split.side != "all":
                # A text that is on both sides was tokenized for training.
                continue
            store = stores.store_of(split.source, split.scan, make=not thorough)
            if thorough:
                store.verify(copies=False)
            longest = int(np.diff(store.ends(), prepend=0).max(initial=0))
            skipped = tuple(split.scan.skipped.lines())
            name = str(split.source)
            summary.append(
                TextSummary(name, store.documents, store.tokens, store.bytes, longest, skipped)
            )
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
    """Tokenizes the groups of files of task `share[0]` of `share[1]`, and reads no others."""
    _require_text(task)
    cache, folder = _folders(data, output)
    train, validation = find_named(data, settings, task)
    sources = [*train, *validation]
    if output:
        _require_sources(sources)
    tokenizer = given_tokenizer(settings, task.specials)
    if tokenizer is None:
        raise ConfigError(
            "--shard: a task reads only its part of the text, and the tokenizer would be trained on"
            " all of it: train it before by `jaxformer tokenizer train`, and set tokenizer.path."
        )
    check_fit(task, vocab_size, tokenizer, settings.path)
    stores = StoreFolder(folder, tokenizer, task.beginning(data.bos, tokenizer), log)
    if output:
        _require_same_origin(stores, [source.spec for source in train])
    index, count = share
    for source in sources:
        if not isinstance(source, (Prepared, IdFiles)):
            groups = file_groups(source)
            mine = groups[index::count]
            log(f"{source}: {len(mine):,} of {len(groups):,} groups of files are this task's")
            stores.made(source, mine, [scan_group(group, cache / SCANS, log) for group in mine])


def _folders(data: DataConfig, output: Path | None) -> tuple[Path, Path]:
    """The directory for scans and tokenizers, and that for stores. An `output` may not hold what an
    earlier call did not write."""
    if not output:
        cache = located(os.path.expanduser(data.cache_dir))
        return cache, cache / "stores"
    remedy = "name one that is new, or that an earlier call began"
    try:
        make_directory(output)
        names = []
        with store_errors(output, "listed"):
            # A store has no directory without objects.
            if not is_remote(output) or output.is_dir():
                names = sorted(path.name for path in output.iterdir())
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be used ({error.strerror or error}): {remedy}."
        ) from None
    if not is_remote(output) and not os.access(output, os.W_OK):
        raise ConfigError(f"--output {output} cannot be written: {remedy}.")
    names = [name for name in names if not name.startswith(".")]
    prepared_names = re.compile(f"[0-9a-f]{{32}}|{SCANS}|{TOKENIZERS}")
    if names and not any(map(prepared_names.fullmatch, names)):
        raise ConfigError(
            f"--output {output} holds other things ({', '.join(names[:3])}): {remedy}."
        )
    return output, output


def _require_same_origin(output: StoreFolder, specs: list[str]) -> None:
    """Refuses a directory that other text, another tokenizer or another data.bos made."""
    try:
        manifest = read_object(output.path / MANIFEST)
        before = [entry["spec"] for entry in manifest["train"]]
        made_by = (manifest["tokenizer"], tuple(manifest.get("beginning", ())))
    except WRONG_RECORD:
        return
    if before != specs or made_by != (output.tokenizer.fingerprint(), output.beginning):
        raise ConfigError(
            f"--output {output.path} was prepared of other text ({'; '.join(before)}), or with"
            " another tokenizer or data.bos: name a new directory, so that nothing is lost."
        )


def _require_sources(sources: Iterable[Source]) -> None:
    """Refuses sources that hold tokens already."""
    for source in sources:
        if isinstance(source, (IdFiles, Prepared)):
            where = source.folder if isinstance(source, Prepared) else source.spec
            raise ConfigError(
                f"--output: {where}, of {source.setting}, holds tokens already: train on it as it"
                " is, or name its text."
            )


def _require_text(task: Task) -> None:
    if not is_text(task.fields):
        raise ConfigError(
            f"data.objective={task.name} reads records, which training encodes itself: jaxformer"
            " prepare tokenizes text."
        )
