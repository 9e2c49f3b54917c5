"""Token ids made elsewhere: .npy arrays and nanoGPT's .bin files, mapped where they are.

Only an index of their documents, which end with the tokenizer's end token, is written. A .npy file
holds its type. A .bin file is raw, and has the type that the tokenizer's vocabulary asks for
(`Tokenizer.dtype`): uint16 up to 65,536 entries, else uint32; this is checked when it is read.
"""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxformer.config.settings import Log
from jaxformer.data.documents import SourceFile, fingerprint, hash_fraction, unreadable
from jaxformer.data.source import Source
from jaxformer.data.splits import Scan, cached_scan
from jaxformer.data.store import (
    IdArray,
    ProgressNotes,
    Shard,
    TokenStore,
    claimed,
    remove_folder,
    write_arrays,
    write_index,
)
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer

# With fewer ids than this nothing is concluded from every second one being 0.
FEWEST_TO_DOUBT = 16


def scan_ids(source: Source, tokenizer: Tokenizer | None, folder: Path, log: Log) -> Scan:
    """Reads and checks every id of a tokenizer once; kept in `folder` until a file or the tokenizer
    changes."""
    if tokenizer is None:
        raise ConfigError(
            f"{source} holds token ids, and tokenizer.path is empty: set it to their"
            " tokenizer.json."
        )
    scans = []
    for file in source.files:
        name = fingerprint(source.part([file]).signature(), tokenizer.fingerprint())
        read = functools.partial(_read, source, file, tokenizer, log)
        scans.append(cached_scan(folder / f"{name}.json", read))
    return Scan.joined(scans)


def id_store(
    source: Source, tokenizer: Tokenizer, text_scan: Scan, folders: list[Path], log: Log
) -> TokenStore:
    """The ids of a source, each file's index of documents in its folder, made where there is
    none."""
    shards: list[Shard] = []
    for file, file_scan, folder in zip(source.files, text_scan.parts, folders, strict=True):
        array = _open(source, file, tokenizer)
        # The shards of a file are its ids, and one end token where they lack it.
        count = 1 if int(array.mapped()[-1]) == tokenizer.end_token else 2
        made = _finished(folder, count)
        if not made:
            with claimed(folder, log):
                made = _finished(folder, count) or _index(array, file, folder, tokenizer)
        documents = sum(shard.documents for shard in made)
        if (documents, sum(shard.bytes for shard in made)) != (
            file_scan.documents,
            file_scan.bytes,
        ):
            remove_folder(folder)
            raise ConfigError(
                f"{file.path} changed while it was read: run again when it no longer changes."
            )
        shards += [replace(made[0], ids=array), *made[1:]]
    # Digests of the ids and their tokenizer.
    names = [folder.name for folder in folders]
    joined = names[0] if len(names) == 1 else fingerprint(names)
    return TokenStore(shards, tokenizer.dtype, joined)


def _finished(folder: Path, count: int) -> list[Shard]:
    shards = [Shard.finished(folder, number) for number in range(count)]
    made = [shard for shard in shards if shard]
    return made if len(made) == count else []


def _read(source: Source, file: SourceFile, tokenizer: Tokenizer, log: Log) -> Scan:
    """Reads all ids of a file, and checks them."""
    array = _open(source, file, tokenizer)
    is_raw = array.path.suffix.lower() != ".npy"
    log(f"{source}: reading {file.path}, {array.dtype.name}")
    sizes = tokenizer.token_bytes()
    progress = ProgressNotes(log, work=f"{file.path}: read")
    documents = size = last = 0
    # uint32 ids below 65,536 that are read as uint16 have 0 as every second one.
    doubtful = is_raw and array.dtype.itemsize == 2
    for start, ids in array.blocks():
        if int(ids.min()) < 0 or int(ids.max()) >= tokenizer.vocab_size:
            position = int(np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))[0])
            raw = f", read as {array.dtype.name}," if is_raw else ""
            raise ConfigError(
                f"{source}: id {int(ids[position])} at place {start + position:,} of"
                f" {array.path}{raw} is not in the vocabulary of tokenizer.path, which has"
                f" {tokenizer.vocab_size:,} entries: name the tokenizer that made the ids."
            )
        doubtful = doubtful and not ids[1::2].any()
        documents += int((ids == tokenizer.end_token).sum())
        size += int(sizes[ids].sum())
        last = int(ids[-1])
        progress.done += ids.nbytes
        progress.tell()
    if doubtful and array.count >= FEWEST_TO_DOUBT:
        raise ConfigError(
            f"{source}: every second id of {array.path} is 0, as if they were uint32, and a .bin"
            f" file of {tokenizer.vocab_size:,} entries holds uint16: write it so, or as .npy."
        )
    documents += last != tokenizer.end_token
    return Scan(array.content(), documents, size)


def _index(array: IdArray, file: SourceFile, folder: Path, tokenizer: Tokenizer) -> list[Shard]:
    """Writes where the documents of a file end, and an end token for a file that lacks it."""
    end = tokenizer.end_token
    token_bytes = tokenizer.token_bytes()
    ends = [np.zeros(0, np.int64)]
    bytes_until_ends = [np.zeros(0, np.int64)]
    size = 0
    for start, ids in array.blocks():
        positions = np.flatnonzero(ids == end)
        # Bytes up to and with each id.
        bytes_until = size + np.cumsum(token_bytes[ids], dtype=np.int64)
        ends.append(positions + start + 1)
        bytes_until_ends.append(bytes_until[positions])
        size = int(bytes_until[-1])
    stops = np.concatenate(ends)
    bytes_until_stops = np.concatenate(bytes_until_ends)
    order = [hash_fraction(file.document(number)) for number in range(len(stops))]
    table = (stops, np.diff(bytes_until_stops, prepend=0), np.array(order, np.float64))
    shards = [write_index(folder / "00000", array.count, table, {})]
    if not len(stops) or stops[-1] < array.count:
        rest = size - int(bytes_until_stops[-1] if len(stops) else 0)
        last_hash = hash_fraction(file.document(len(stops)))
        tail = (np.ones(1, np.int64), np.array([rest], np.int64), np.array([last_hash]))
        written = write_arrays(folder / "00001.tokens", [np.array([end], tokenizer.dtype)])
        shards.append(write_index(folder / "00001", 1, tail, {"tokens": written}))
    return shards


def _open(source: Source, file: SourceFile, tokenizer: Tokenizer) -> IdArray:
    """Where the ids of a file are."""
    path = file.path
    where = f"{source}: {file.path}"
    try:
        if path.suffix.lower() == ".npy":
            memmap = np.lib.format.open_memmap(path, mode="r")
            if memmap.ndim != 1 or memmap.dtype.kind not in "iu":
                raise ValueError(f"it is one of {memmap.dtype}, shape {memmap.shape}")
            array = IdArray(path, memmap.dtype, memmap.offset, len(memmap), file.name)
        else:
            dtype = tokenizer.dtype
            size = path.stat().st_size
            if size % dtype.itemsize:
                raise ConfigError(
                    f"{where} has {size:,} bytes, which is no whole number of {dtype.name}: a .bin"
                    " file holds raw ids, uint16 for up to 65,536 entries, else uint32."
                )
            array = IdArray(path, dtype, 0, size // dtype.itemsize, file.name)
    except OSError as error:
        raise unreadable(path, error) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{where} is no .npy array of one row of integers ({error}): write it by numpy.save."
        ) from None
    if not array.count:
        raise ConfigError(f"{where} is empty: there is nothing to train on or to evaluate.")
    return array
