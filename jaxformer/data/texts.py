"""The texts that a run names, read from their sources or tokenized beforehand, and their stores,
made or found."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxformer.config.run import DataConfig, named_sources
from jaxformer.config.settings import Log
from jaxformer.data.cache_files import MANIFEST, WRONG_RECORD, remove_folder
from jaxformer.data.ids import find_ids, id_store, scan_ids
from jaxformer.data.sources import Source, find_source, fingerprint
from jaxformer.data.sources.records import Fields, is_text
from jaxformer.data.splits import Scan, SideName, file_groups, scan
from jaxformer.data.store import TokenStore, open_stores
from jaxformer.data.tokenizing import ProgressNotes, open_or_build
from jaxformer.files import ConfigError, located, read_file, read_object, write_text
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import TOKENIZER_FILE

# A change in how text becomes tokens or files takes a new number, so that no older cache is read.
FORMAT = 3
KIND = "jaxformer tokens"

# Directories of the cache, or of a prepared directory.
SCANS = "scans"
TOKENIZERS = "tokenizers"


@dataclass(frozen=True, kw_only=True)
class Prepared(Source):
    """A text of a directory that `jaxformer prepare --output` wrote: its scan, the fingerprint of
    the tokenizer, and the tokens with which its documents begin."""

    folder: Path
    scanned: Scan
    tokenizer: str
    beginning: tuple[int, ...]


def find_texts(data: DataConfig, setting: str, fields: Fields) -> list[Source]:
    """The sources that `data.train` or `data.validation` names."""
    specs = named_sources(getattr(data, setting.removeprefix("data.")))
    if not specs:
        raise ConfigError(
            f"{setting} names no source: give a file, a directory, a glob, or stdlib."
        )
    sources: list[Source] = []
    for spec in specs:
        folder = located(os.path.expanduser(spec))
        ids = find_ids(spec, setting, fields)
        if ids:
            sources.append(ids)
        elif _is_prepared(folder):
            texts = prepared_texts(folder, setting, fields)
            if not texts:
                raise ConfigError(
                    f"{setting}: {folder} was prepared without text for validation: prepare it"
                    " with data.validation, or leave data.validation empty."
                )
            sources += texts
        else:
            sources.append(find_source(spec, setting, fields, data.malformed))
    return sources


def _is_prepared(folder: Path) -> bool:
    """Whether its manifest is that of a prepared directory; text may have others beside it."""
    try:
        return KIND.encode() in read_file(folder / MANIFEST)
    except ConfigError:
        return False


def find_validation(data: DataConfig, train: list[Source], fields: Fields) -> list[Source]:
    """The sources of `data.validation`, or else what was prepared for it beside `train`."""
    setting = "data.validation"
    if data.validation:
        return find_texts(data, setting, fields)
    folders = dict.fromkeys(source.folder for source in train if isinstance(source, Prepared))
    return [text for folder in folders for text in prepared_texts(folder, setting, fields)]


def prepared_texts(folder: Path, setting: str, fields: Fields) -> list[Source]:
    """The texts for training or for validation of a prepared directory."""
    try:
        manifest = read_object(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, not {FORMAT}")
        texts = manifest[setting.removeprefix("data.")]
        digest = manifest["tokenizer"]
        beginning = tuple(map(int, manifest.get("beginning", ())))
        scans = [(entry["spec"], Scan.read(entry["scan"])) for entry in texts]
    except WRONG_RECORD as error:
        raise ConfigError(
            f"{setting}: {folder / MANIFEST} is not what `jaxformer prepare --output` of this"
            f" version writes ({error}): prepare the text again."
        ) from None
    if not is_text(fields):
        raise ConfigError(
            f"{setting}: {folder} holds tokens of text, and data.objective reads records: name"
            " their source."
        )
    return [
        Prepared(
            setting, spec, (), folder=folder, scanned=scanned, tokenizer=digest, beginning=beginning
        )
        for spec, scanned in scans
    ]


def scan_of(source: Source, tokenizer: Tokenizer | None, folder: Path, log: Log) -> Scan:
    """The scan of a text: kept with a prepared one, else made or found in `folder`; `tokenizer` is
    that of token ids."""
    if source.of_ids:
        return scan_ids(source, tokenizer, folder, log)
    if isinstance(source, Prepared):
        return source.scanned
    return scan(source, folder, log)


@dataclass(frozen=True)
class StoreFolder:
    """A directory of stores: the ids of texts by one tokenizer, in which each document begins with
    the tokens `beginning`."""

    path: Path
    tokenizer: Tokenizer
    beginning: tuple[int, ...]
    log: Log

    def name_of(self, group_scan: Scan) -> str:
        """The name of the directory of a file group's tokens, the same for equal text, tokenizer
        and tokens with which documents begin."""
        begun = [[*self.beginning]] if self.beginning else []
        return fingerprint(FORMAT, group_scan.content, self.tokenizer.fingerprint(), *begun)

    def store_of(self, source: Source, text_scan: Scan, make: bool = True) -> TokenStore:
        """The tokens of a text, in this directory or where it is prepared, made where there are
        none unless `make` is false. Files of token ids stay as they are."""
        if source.of_ids:
            as_they_are = replace(self, beginning=())
            folders = [self.path / as_they_are.name_of(each) for each in text_scan.parts]
            return id_store(source, self.tokenizer, text_scan, folders, make, self.log)
        names = [self.name_of(group_scan) for group_scan in text_scan.parts]
        if isinstance(source, Prepared):
            stores = self._prepared(source, names)
        else:
            stores = self._made(source, text_scan.parts, make)
        return TokenStore.joined(stores, fingerprint(names))

    def _made(self, source: Source, scans: Sequence[Scan], make: bool) -> list[TokenStore]:
        """The stores of the file groups of a source, made where there are none unless `make` is
        false."""
        began = time.perf_counter()
        groups = file_groups(source)
        directories = [self.path / self.name_of(group_scan) for group_scan in scans]
        opened = open_stores(directories)
        missing = [scan for scan, store in zip(scans, opened, strict=True) if store is None]
        count = len(groups)
        size = sum(group_scan.bytes for group_scan in missing)
        if missing and not make:
            raise ConfigError(
                f"{source}: {len(missing)} of {count} parts are not prepared: leave out --verify to"
                " make them."
            )
        if missing:
            parts = f", {len(missing)} of {count} parts" if count > 1 else ""
            self.log(f"{source}: tokenizing {megabytes(size)}{parts}")
        progress = ProgressNotes(self.log, size)
        stores = []
        for directory, group, group_scan, store in zip(
            directories, groups, scans, opened, strict=True
        ):
            if store is None:
                store = open_or_build(
                    directory, group.pieces, self.tokenizer, progress, self.beginning
                )
            if (group_scan.documents, group_scan.bytes) != (store.documents, store.bytes):
                remove_folder(directory)
                raise ConfigError(
                    f"{group}: its files changed while they were tokenized: run again when they no"
                    " longer change."
                )
            stores.append(store)
        if missing:
            self.log(f"{source}: tokenized in {time.perf_counter() - began:.1f} s")
        elif count:
            and_more = f" and {count - 1:,} more" if count > 1 else ""
            self.log(f"{source}: reusing {directories[0]}{and_more}")
        return stores

    def write_prepared(self, texts: dict[SideName, list[tuple[Source, Scan]]]) -> None:
        """Writes what makes this directory a source: its tokenizer and its manifest, which says
        with which tokens documents begin."""
        self.tokenizer.save(self.path / TOKENIZER_FILE)
        listed = {
            side: [{"spec": source.spec, "scan": asdict(text_scan)} for source, text_scan in pairs]
            for side, pairs in texts.items()
        }
        made_by = {"kind": KIND, "format": FORMAT, "tokenizer": self.tokenizer.fingerprint()}
        begun = {"beginning": [*self.beginning]} if self.beginning else {}
        write_text(self.path / MANIFEST, json.dumps(made_by | begun | listed, indent=1))

    def _prepared(self, source: Prepared, names: list[str]) -> list[TokenStore]:
        """The stores of a prepared text."""
        made_by = (source.tokenizer, source.beginning)
        if made_by != (self.tokenizer.fingerprint(), self.beginning):
            raise ConfigError(
                f"{source.setting}: {source.folder} was made by another tokenizer than the run's,"
                " or with another data.bos, so that its documents begin with"
                f" {list(source.beginning)} and not {list(self.beginning)}: prepare all texts with"
                " the tokenizer.path and the data.bos of the run."
            )
        stores = []
        directories = [source.folder / name for name in names]
        for directory, store in zip(directories, open_stores(directories), strict=True):
            if store is None:
                raise ConfigError(
                    f"{source.setting}: {directory} is not complete: copy the directory again, or"
                    " run the `jaxformer prepare --output` that made it once more."
                )
            stores.append(store)
        return stores


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
