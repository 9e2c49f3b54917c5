"""The texts that a run names, read from their sources or tokenized beforehand, and their stores,
made or found."""

import functools
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxformer.config import ConfigError, DataConfig, named_sources
from jaxformer.data.ids import IdFiles, find_ids, id_store, scan_ids
from jaxformer.data.sources import Source, find_source, fingerprint
from jaxformer.data.sources.error_policy import ErrorPolicy
from jaxformer.data.sources.records import Fields
from jaxformer.data.splits import Scan, file_groups, scan, scan_group
from jaxformer.data.store import MANIFEST, TokenStore, missing_of
from jaxformer.data.tokenizing import ProgressNotes, build_shards, complete, open_or_build
from jaxformer.data.writing import claimed, replacing
from jaxformer.settings import Log
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.files import TOKENIZER_FILE

# A change of how text becomes tokens or files takes a new number, so that no older cache is read.
FORMAT = 2
KIND = "jaxformer tokens"

# Folders of the cache, or of a prepared directory, so that what one machine has read and made
# another finds.
SCANS, TOKENIZERS = "scans", "tokenizers"


@dataclass(frozen=True)
class Prepared(Source):
    """A text of a directory that `jaxformer prepare --output` wrote."""

    folder: Path = Path()
    scanned: Scan | None = None
    tokenizer: str = ""


def find_texts(data: DataConfig, setting: str, fields: Fields) -> list[Source]:
    """The sources that `data.train` or `data.validation` names, apart by ';'. Raises ConfigError
    where one is none."""
    specs = named_sources(getattr(data, setting.removeprefix("data.")))
    if not specs:
        raise ConfigError(
            f"{setting} names no source: give a file, a directory, a glob, or a named source such"
            " as stdlib."
        )
    policy = ErrorPolicy(data.undecodable, data.malformed)
    found: list[Source] = []
    for spec in specs:
        folder = Path(os.path.expanduser(spec))
        if ids := find_ids(spec, setting, fields):
            found.append(ids)
        elif not _is_prepared(folder):
            _require_joined(folder, setting)
            found.append(find_source(spec, setting, fields, policy, data.cache_dir))
        elif texts := prepared_texts(folder, setting, fields):
            found += texts
        else:
            raise ConfigError(
                f"{setting}: {folder} was prepared without text for validation: prepare it with"
                " data.validation, or leave data.validation empty to hold out a part of"
                " data.train."
            )
    return found


def _is_prepared(folder: Path) -> bool:
    """Whether a directory says that it was prepared; other manifests may lie beside text."""
    try:
        return KIND in (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _require_joined(folder: Path, setting: str) -> None:
    if (folder / SCANS).is_dir() and not (folder / MANIFEST).exists():
        raise ConfigError(
            f"{setting}: {folder} is prepared in part: run the line of `jaxformer prepare --output`"
            " once more without --shard, which joins what the tasks have made."
        )


def find_held(data: DataConfig, train: list[Source], fields: Fields) -> list[Source]:
    """The sources that `data.validation` names, or else what was prepared for validation beside the
    texts for training."""
    if data.validation:
        return find_texts(data, "data.validation", fields)
    folders = dict.fromkeys(source.folder for source in train if isinstance(source, Prepared))
    return [
        text for folder in folders for text in prepared_texts(folder, "data.validation", fields)
    ]


def prepared_texts(folder: Path, setting: str, fields: Fields) -> list[Source]:
    """The texts for training or for validation of a prepared directory. Raises ConfigError where it
    is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, not {FORMAT}")
        texts = manifest[setting.removeprefix("data.")]
        scans = [
            (entry["spec"], Scan.read(entry.get("scan") or entry["survey"])) for entry in texts
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{setting}: {folder / MANIFEST} is not what `jaxformer prepare --output` of this"
            f" version writes ({error}): prepare the text again."
        ) from None
    if len(fields) > 1:
        raise ConfigError(
            f"{setting}: {folder} holds tokens of text, and data.objective reads records: name"
            " their source."
        )
    made_by = manifest["tokenizer"]
    return [
        Prepared(setting, spec, (), folder=folder, scanned=found, tokenizer=made_by)
        for spec, found in scans
    ]


def scan_of(source: Source, folder: Path, log: Log) -> Scan:
    """What a text holds: as it is written where the text is prepared, else read, and kept in
    `folder`."""
    if isinstance(source, IdFiles):
        return scan_ids(source, folder, log)
    return (
        source.scanned
        if isinstance(source, Prepared) and source.scanned
        else scan(source, folder, log)
    )


def store_of(
    source: Source,
    found: Scan,
    tokenizer: Tokenizer,
    folder: Path,
    log: Log,
    thorough: bool = False,
) -> TokenStore:
    """The tokens of a text, in `folder` or where it is prepared; `thorough` reads all that is
    there, and makes nothing.

    Raises ConfigError for a store that cannot be used.
    """
    names = [directory_of(part, tokenizer) for part in found.parts]
    if isinstance(source, IdFiles):
        return id_store(source, found, [folder / name for name in names], thorough, log)
    if isinstance(source, Prepared):
        stores = [_prepared(source, name, tokenizer, thorough) for name in names]
    else:
        opened = [TokenStore.open(folder / name, thorough) for name in names]
        made = [part for part, store in zip(found.parts, opened, strict=True) if store is None]
        progress = ProgressNotes(log, sum(part.bytes for part in made))
        if made and thorough:
            raise ConfigError(
                f"{source}: {len(made)} of {len(names)} parts are not prepared: leave out --verify"
                " to make them."
            )
        if made:
            parts = f", {len(made)} of {len(names)} parts" * (len(names) > 1)
            log(f"{source}: tokenizing {megabytes(sum(part.bytes for part in made))}{parts}")
        began = time.perf_counter()
        stores = [
            (
                open_or_build(folder / name, group.pieces, tokenizer, progress, source.place)
                if store is None
                else store
            )
            for store, name, group in zip(opened, names, file_groups(source), strict=True)
        ]
        for store, part, name in zip(stores, found.parts, names, strict=True):
            _require_text_of(part, store, folder / name, source)
        if made:
            log(f"{source}: tokenized in {time.perf_counter() - began:.1f} s")
        else:
            log(
                f"{source}: reusing {folder / names[0]}"
                + f" and {len(names) - 1:,} more" * (len(names) > 1)
            )
    return TokenStore.joined(stores, fingerprint(names))


def build_part(
    source: Source,
    tokenizer: Tokenizer,
    scanned: Path,
    folder: Path,
    part: tuple[int, int],
    log: Log,
) -> None:
    """Makes the share `part` (its number from 0, and of how many) of a text's shards, whatever the
    other shares are doing.

    Shares are of units where there are enough of them, and each then reads nothing else; otherwise
    of the shards in each.
    """
    index, count = part
    groups = file_groups(source)
    apart = len(groups) >= count
    mine = [
        (number, group)
        for number, group in enumerate(groups)
        if not apart or number % count == index
    ]
    part_of = (
        f"{len(mine):,} of {len(groups):,} groups of files are"
        if apart
        else f"one of every {count} shards is"
    )
    log(f"{source}: {part_of} this task's")
    scans = [scan_group(group, scanned, log) for _, group in mine]
    progress = ProgressNotes(log, sum(found.bytes for found in scans))
    for (number, group), found in zip(mine, scans, strict=True):
        directory = folder / directory_of(found, tokenizer)
        if apart:
            store = open_or_build(directory, group.pieces, tokenizer, progress, source.place)
            _require_text_of(found, store, directory, source)
        elif TokenStore.open(directory) is None:
            shares = functools.partial(_is_mine, number, index, count)
            with claimed(directory, log, shared=True):
                shards = build_shards(
                    directory, group.pieces(), tokenizer, progress, source.place, shares
                )
                complete(directory, shards, tokenizer)


def _is_mine(group: int, index: int, count: int, shard: int) -> bool:
    return (group + shard) % count == index


def _require_text_of(part: Scan, store: TokenStore, directory: Path, source: Source) -> None:
    """Raises ConfigError, and leaves nothing of the store, where files changed between their scan
    and their tokens."""
    if (part.documents, part.bytes) != (store.documents, store.bytes):
        shutil.rmtree(directory, ignore_errors=True)
        raise ConfigError(
            f"{source}: its files changed while they were tokenized: wait until they do not, and"
            " begin again."
        )


def write_prepared(
    folder: Path, tokenizer: Tokenizer, texts: dict[str, list[tuple[Source, Scan]]]
) -> None:
    """Writes what makes a folder of stores a source of its own: its tokenizer and its manifest."""
    tokenizer.save(folder / TOKENIZER_FILE)
    listed = {
        side: [{"spec": source.spec, "scan": asdict(found)} for source, found in several]
        for side, several in texts.items()
    }
    manifest = {"kind": KIND, "format": FORMAT, "tokenizer": tokenizer.fingerprint(), **listed}
    with replacing(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def directory_of(part: Scan, tokenizer: Tokenizer) -> str:
    """The name of the directory that a unit's tokens are in: equal text and an equal tokenizer have
    the same."""
    return fingerprint(FORMAT, part.content, tokenizer.fingerprint())


def _prepared(source: Prepared, name: str, tokenizer: Tokenizer, thorough: bool) -> TokenStore:
    if source.tokenizer != tokenizer.fingerprint():
        raise ConfigError(
            f"{source.setting}: {source.folder} was made by another tokenizer than the run's, which"
            " is that of tokenizer.path, or else of the first prepared directory: prepare all"
            " texts with one tokenizer."
        )
    if (store := TokenStore.open(source.folder / name, thorough)) is not None:
        return store
    raise ConfigError(
        f"{source.setting}: {source.folder / name} is not complete,"
        f" {missing_of(source.folder / name)} is missing: copy the directory again, or run the"
        " `jaxformer prepare --output` that made it once more."
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
