"""The texts that a run names, read from their sources or tokenized beforehand, and their stores,
made or found."""

import functools
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxformer.config.run import DataConfig, named_sources
from jaxformer.config.settings import Log
from jaxformer.data.cache_files import MANIFEST, WRONG_RECORD, claimed
from jaxformer.data.sources import IdFiles, Source, find_ids, find_source, fingerprint
from jaxformer.data.sources.error_policy import ErrorPolicy
from jaxformer.data.sources.records import Fields, is_text
from jaxformer.data.splits import Scan, file_groups, scan, scan_group
from jaxformer.data.store import TokenStore
from jaxformer.data.token_shards import missing_of
from jaxformer.data.tokenizing import ProgressNotes, build_shards, complete, open_or_build
from jaxformer.files import ConfigError, read_file, read_object, write_text
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import TOKENIZER_FILE

# A change in how text becomes tokens or files takes a new number, so that no older cache is read.
FORMAT = 2
KIND = "jaxformer tokens"

# Directories of the cache, or of a prepared directory.
SCANS, TOKENIZERS = "scans", "tokenizers"


@dataclass(frozen=True)
class Prepared(Source):
    """A text of a directory that `jaxformer prepare --output` wrote."""

    folder: Path = Path()
    scanned: Scan | None = None
    tokenizer: str = ""
    beginning: tuple[int, ...] = ()


def find_texts(data: DataConfig, setting: str, fields: Fields) -> list[Source]:
    """The sources that `data.train` or `data.validation` names. Raises ConfigError."""
    specs = named_sources(getattr(data, setting.removeprefix("data.")))
    if not specs:
        raise ConfigError(
            f"{setting} names no source: give a file, a directory, a glob, or stdlib."
        )
    policy = ErrorPolicy(data.undecodable, data.malformed)
    sources: list[Source] = []
    for spec in specs:
        folder = Path(os.path.expanduser(spec))
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
            if (folder / SCANS).is_dir() and not (folder / MANIFEST).exists():
                raise ConfigError(
                    f"{setting}: {folder} is prepared in part: run the line of `jaxformer prepare"
                    " --output` once more without --shard, to join what the tasks have made."
                )
            sources.append(find_source(spec, setting, fields, policy, data.cache_dir))
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
        texts, digest = manifest[setting.removeprefix("data.")], manifest["tokenizer"]
        beginning = tuple(map(int, manifest.get("beginning", ())))
        scans = [
            (entry["spec"], Scan.read(entry.get("scan") or entry["survey"])) for entry in texts
        ]
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


def scan_of(source: Source, folder: Path, log: Log) -> Scan:
    """The scan of a text: kept with a prepared one, else made or found in `folder`."""
    if isinstance(source, IdFiles):
        from jaxformer.data.ids import scan_ids

        return scan_ids(source, folder, log)
    if isinstance(source, Prepared) and source.scanned:
        return source.scanned
    return scan(source, folder, log)


def store_of(
    source: Source,
    text_scan: Scan,
    tokenizer: Tokenizer,
    folder: Path,
    log: Log,
    thorough: bool = False,
    beginning: tuple[int, ...] = (),
) -> TokenStore:
    """The tokens of a text, in `folder` or where it is prepared; `thorough` only checks them.

    Each document begins with `beginning`; files of token ids stay as they are.
    """
    if isinstance(source, IdFiles):
        from jaxformer.data.ids import id_store

        names = [directory_of(group_scan, tokenizer) for group_scan in text_scan.parts]
        return id_store(source, text_scan, [folder / name for name in names], thorough, log)
    names = [directory_of(group_scan, tokenizer, beginning) for group_scan in text_scan.parts]
    if isinstance(source, Prepared):
        _require_beginning(source, tokenizer, beginning)
        stores = [_prepared(source, name, tokenizer, thorough) for name in names]
    else:
        directories = [folder / name for name in names]
        stores = _group_stores(source, text_scan, directories, tokenizer, log, thorough, beginning)
    return TokenStore.joined(stores, fingerprint(names))


def _group_stores(
    source: Source,
    text_scan: Scan,
    directories: list[Path],
    tokenizer: Tokenizer,
    log: Log,
    thorough: bool,
    beginning: tuple[int, ...],
) -> list[TokenStore]:
    """The stores of the file groups of a source."""
    count, began = len(directories), time.perf_counter()
    stores = [TokenStore.open(directory, thorough) for directory in directories]
    pairs = zip(text_scan.parts, stores, strict=True)
    missing = [group_scan for group_scan, store in pairs if store is None]
    size = sum(group_scan.bytes for group_scan in missing)
    if missing and thorough:
        raise ConfigError(
            f"{source}: {len(missing)} of {count} parts are not prepared: leave out --verify to"
            " make them."
        )
    if missing:
        parts = f", {len(missing)} of {count} parts" if count > 1 else ""
        log(f"{source}: tokenizing {megabytes(size)}{parts}")
    progress, made = ProgressNotes(log, size), []
    groups = zip(directories, file_groups(source), text_scan.parts, stores, strict=True)
    for directory, group, group_scan, store in groups:
        store = store or open_or_build(directory, group.pieces, tokenizer, progress, beginning)
        _require_text_of(group_scan, store, directory, source)
        made.append(store)
    if missing:
        log(f"{source}: tokenized in {time.perf_counter() - began:.1f} s")
    else:
        more = f" and {count - 1:,} more" if count > 1 else ""
        log(f"{source}: reusing {directories[0]}{more}")
    return made


def build_part(
    source: Source,
    tokenizer: Tokenizer,
    scanned: Path,
    folder: Path,
    share: tuple[int, int],
    log: Log,
    beginning: tuple[int, ...] = (),
) -> None:
    """Makes the part (number from 0, of how many) of a text's shards, independently of others.
    Each document begins with `beginning`.

    Parts are file groups where there are enough of them, otherwise shards of each group.
    """
    index, count = share
    groups = list(enumerate(file_groups(source)))
    by_group = len(groups) >= count
    my_groups = groups[index::count] if by_group else groups
    part_of = f"one of every {count} shards is"
    if by_group:
        part_of = f"{len(my_groups):,} of {len(groups):,} groups of files are"
    log(f"{source}: {part_of} this task's")
    scans = [scan_group(group, scanned, log) for _, group in my_groups]
    progress = ProgressNotes(log, sum(group_scan.bytes for group_scan in scans))
    for (number, group), group_scan in zip(my_groups, scans, strict=True):
        directory = folder / directory_of(group_scan, tokenizer, beginning)
        if by_group:
            store = open_or_build(directory, group.pieces, tokenizer, progress, beginning)
            _require_text_of(group_scan, store, directory, source)
        elif TokenStore.open(directory) is None:
            chosen = functools.partial(_is_mine, number, index, count)
            with claimed(directory, log, shared=True):
                shards = build_shards(
                    directory, group.pieces(), tokenizer, progress, chosen, beginning
                )
                complete(directory, shards, tokenizer, beginning)


def _is_mine(group: int, index: int, count: int, shard: int) -> bool:
    return (group + shard) % count == index


def _require_text_of(group_scan: Scan, store: TokenStore, directory: Path, source: Source) -> None:
    """Removes the store, and raises ConfigError, where files changed after their scan."""
    if (group_scan.documents, group_scan.bytes) != (store.documents, store.bytes):
        shutil.rmtree(directory, ignore_errors=True)
        raise ConfigError(
            f"{source}: its files changed while they were tokenized: run again when they no longer"
            " change."
        )


def write_prepared(
    folder: Path,
    tokenizer: Tokenizer,
    texts: dict[str, list[tuple[Source, Scan]]],
    beginning: tuple[int, ...] = (),
) -> None:
    """Writes what makes a directory of stores a source: its tokenizer and its manifest, which says
    with which tokens documents begin."""
    tokenizer.save(folder / TOKENIZER_FILE)
    listed = {
        side: [{"spec": source.spec, "scan": asdict(text_scan)} for source, text_scan in several]
        for side, several in texts.items()
    }
    made_by = {"kind": KIND, "format": FORMAT, "tokenizer": tokenizer.fingerprint()}
    begun = {"beginning": [*beginning]} if beginning else {}
    write_text(folder / MANIFEST, json.dumps(made_by | begun | listed, indent=1))


def directory_of(group_scan: Scan, tokenizer: Tokenizer, beginning: tuple[int, ...] = ()) -> str:
    """The name of the directory of a file group's tokens, the same for equal text, tokenizer and
    tokens with which documents begin."""
    begun = [[*beginning]] if beginning else []
    return fingerprint(FORMAT, group_scan.content, tokenizer.fingerprint(), *begun)


def _require_beginning(source: Prepared, tokenizer: Tokenizer, beginning: tuple[int, ...]) -> None:
    """Raises ConfigError where prepared documents begin otherwise than data.bos says."""
    if source.tokenizer != tokenizer.fingerprint() or source.beginning == beginning:
        return
    stored, asked = (
        " ".join(map(tokenizer.shown, tokens)) or "no BOS"
        for tokens in (source.beginning, beginning)
    )
    setting = "always" if source.beginning else "never"
    raise ConfigError(
        f"{source.setting}: the documents of {source.folder} were prepared with {stored}, and the"
        f" run's data.bos and data.objective ask for {asked}: set data.bos={setting}, or prepare"
        " the text again with the settings of the run."
    )


def _prepared(source: Prepared, name: str, tokenizer: Tokenizer, thorough: bool) -> TokenStore:
    if source.tokenizer != tokenizer.fingerprint():
        raise ConfigError(
            f"{source.setting}: {source.folder} was made by another tokenizer than the run's, which"
            " is that of tokenizer.path, or else of the first prepared directory: prepare all"
            " texts with one tokenizer."
        )
    if (store := TokenStore.open(source.folder / name, thorough)) is not None:
        return store
    directory = source.folder / name
    raise ConfigError(
        f"{source.setting}: {directory} is not complete, {missing_of(directory)} is missing: copy"
        " the directory again, or run the `jaxformer prepare --output` that made it once more."
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
