"""The texts that a run names, and their stores of tokens, made or found."""

import time
from pathlib import Path

from jaxformer.config.run import DataConfig, named_sources
from jaxformer.config.settings import Log
from jaxformer.data.cache_files import remove_folder
from jaxformer.data.ids import find_ids, id_store
from jaxformer.data.sources import Source, find_source, fingerprint
from jaxformer.data.sources.records import Fields
from jaxformer.data.splits import Scan, file_groups
from jaxformer.data.store import TokenStore, open_stores
from jaxformer.data.tokenizing import ProgressNotes, open_or_build
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer

# A change in how text becomes tokens or files takes a new number, so that no older cache is read.
FORMAT = 3


def find_texts(data: DataConfig, setting: str, fields: Fields) -> list[Source]:
    """The sources that `data.train` or `data.validation` names."""
    specs = named_sources(getattr(data, setting.removeprefix("data.")))
    if not specs:
        raise ConfigError(
            f"{setting} names no source: give a file, a directory, a glob, or stdlib."
        )
    return [
        find_ids(spec, setting, fields) or find_source(spec, setting, fields, data.malformed)
        for spec in specs
    ]


def text_store(
    source: Source,
    text_scan: Scan,
    folder: Path,
    tokenizer: Tokenizer,
    beginning: tuple[int, ...],
    log: Log,
) -> TokenStore:
    """The tokens of a text in a directory of stores, made where there are none; each document
    begins with the tokens `beginning`. Files of token ids stay as they are."""
    # A store has the same name for equal text, tokenizer and tokens with which documents begin.
    made_by: list[object] = [tokenizer.fingerprint()]
    if beginning and not source.of_ids:
        made_by.append([*beginning])
    names = [fingerprint(FORMAT, part.content, *made_by) for part in text_scan.parts]
    directories = [folder / name for name in names]
    if source.of_ids:
        return id_store(source, tokenizer, text_scan, directories, log)
    began = time.perf_counter()
    groups = file_groups(source)
    opened = open_stores(directories)
    missing = [part for part, store in zip(text_scan.parts, opened, strict=True) if store is None]
    count = len(groups)
    size = sum(part.bytes for part in missing)
    if missing:
        parts = f", {len(missing)} of {count} parts" if count > 1 else ""
        log(f"{source}: tokenizing {megabytes(size)}{parts}")
    elif count:
        and_more = f" and {count - 1:,} more" if count > 1 else ""
        log(f"{source}: reusing {directories[0]}{and_more}")
    progress = ProgressNotes(log, size)
    stores = []
    for directory, group, part, store in zip(
        directories, groups, text_scan.parts, opened, strict=True
    ):
        if store is None:
            store = open_or_build(directory, group.pieces, tokenizer, progress, beginning)
        if (part.documents, part.bytes) != (store.documents, store.bytes):
            remove_folder(directory)
            raise ConfigError(
                f"{group}: its files changed while they were tokenized: run again when they no"
                " longer change."
            )
        stores.append(store)
    if missing:
        log(f"{source}: tokenized in {time.perf_counter() - began:.1f} s")
    return TokenStore.joined(stores, fingerprint(names))


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
