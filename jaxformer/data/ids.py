"""Token ids made elsewhere: .npy arrays and nanoGPT's .bin files, mapped where they are.

Only an index of their documents, which end with the tokenizer's end token, is written. A .npy file
holds its type. A .bin file is raw, and has the type that the tokenizer's vocabulary asks for
(`Tokenizer.dtype`): uint16 up to 65,536 entries, else uint32; this is checked when it is read.
"""

import functools
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxformer.config.settings import Log
from jaxformer.data.cache_files import claimed, remove_folder
from jaxformer.data.sources import IdFiles, fingerprint
from jaxformer.data.sources.source_files import SourceFile, hash_fraction, unreadable
from jaxformer.data.splits import Scan, cached_scan
from jaxformer.data.store import IdArray, Shard, TokenStore, digest_of_ids
from jaxformer.data.tokenizing import ProgressNotes, write_file, write_index
from jaxformer.files import ConfigError

# With fewer ids than this nothing is concluded from every second one being 0.
FEWEST_TO_DOUBT = 16


def scan_ids(source: IdFiles, folder: Path, log: Log) -> Scan:
    """Reads and checks every id once; kept in `folder` until a file or the tokenizer changes.

    Raises ConfigError for a file that holds no ids of the tokenizer's vocabulary.
    """
    scans = []
    for file in source.files:
        name = fingerprint(source.part([file]).signature(), source.made_by().fingerprint())
        read = functools.partial(_read, source, file, log)
        scans.append(cached_scan(folder / f"{name}.json", read))
    return Scan.joined(scans)


def id_store(
    source: IdFiles, text_scan: Scan, folders: list[Path], thorough: bool, log: Log
) -> TokenStore:
    """The ids of a source, each file's index of documents in its folder.

    `thorough` reads all ids and indices once more, and makes nothing. Raises ConfigError for a file
    that changed since its scan, or an index that cannot be used.
    """
    shards: list[Shard] = []
    for file, file_scan, folder in zip(source.files, text_scan.parts, folders, strict=True):
        array = _open(source, file)
        closed = int(array.mapped()[-1]) == source.made_by().end_token
        if thorough and _read(source, file, log).content != file_scan.content:
            raise _changed(file)
        made = _finished(folder, closed, thorough)
        if not made and thorough:
            raise ConfigError(
                f"{source}: {file.path} has no index of documents: leave out --verify to make it."
            )
        if not made:
            with claimed(folder, log):
                made = _finished(folder, closed) or _index(source, file, folder, file_scan.content)
        documents, size = sum(shard.documents for shard in made), sum(shard.bytes for shard in made)
        if (documents, size) != (file_scan.documents, file_scan.bytes):
            # An index of other ids than the scan's.
            remove_folder(folder)
            raise _changed(file)
        shards += [replace(made[0], ids=array), *made[1:]]
    # Digests of the ids and their tokenizer.
    names = [folder.name for folder in folders]
    joined = names[0] if len(names) == 1 else fingerprint(names)
    return TokenStore(shards, source.made_by().dtype, joined)


def _finished(folder: Path, closed: bool, thorough: bool = False) -> list[Shard]:
    """The shards of a file: its ids, and one end token where they lack it; [] if not yet made."""
    shards = [Shard.finished(folder, number, thorough) for number in range(1 if closed else 2)]
    made = [shard for shard in shards if shard]
    return made if len(made) == len(shards) else []


def _read(source: IdFiles, file: SourceFile, log: Log) -> Scan:
    """Reads all ids of a file, and checks them."""
    tokenizer, array = source.made_by(), _open(source, file)
    log(f"{source}: reading {file.path}, {array.dtype.name}")
    digest = _content_of(file)
    sizes, progress = tokenizer.token_bytes(), ProgressNotes(log, work=f"{file.path}: read")
    documents = size = last = 0
    # uint32 ids below 65,536 that are read as uint16 have 0 as every second one.
    doubtful = array.path.suffix.lower() != ".npy" and array.dtype.itemsize == 2
    for start, ids in array.blocks():
        _check(source, array, start, ids)
        doubtful = doubtful and not ids[1::2].any()
        digest.update(ids.astype("<u4").tobytes())
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
    return Scan(digest.hexdigest(), documents, size)


def _content_of(file: SourceFile) -> "hashlib.blake2b":
    """The beginning of the digest of a file's ids."""
    return hashlib.blake2b(file.name.encode() + b"\xff", digest_size=16)


def _index(source: IdFiles, file: SourceFile, folder: Path, content: str) -> list[Shard]:
    """Writes where the documents of a file end, the digests of its blocks, and an end token for a
    file that lacks it. Raises ConfigError where `content` is not the digest of its ids."""
    tokenizer, array = source.made_by(), _open(source, file)
    digest, digests = _content_of(file), bytearray()
    end, sizes = tokenizer.end_token, tokenizer.token_bytes()
    ends, sizes_before, size = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for start, ids in array.blocks():
        digest.update(ids.astype("<u4").tobytes())
        digests += digest_of_ids(ids, tokenizer.dtype)
        end_positions = np.flatnonzero(ids == end)
        # Bytes up to and with each id.
        sizes_until = size + np.cumsum(sizes[ids], dtype=np.int64)
        ends.append(end_positions + start + 1)
        sizes_before.append(sizes_until[end_positions])
        size = int(sizes_until[-1])
    if digest.hexdigest() != content:
        raise _changed(file)
    stops, bytes_before = np.concatenate(ends), np.concatenate(sizes_before)
    order = [hash_fraction(file.document(number)) for number in range(len(stops))]
    table = (stops, np.diff(bytes_before, prepend=0), np.array(order, np.float64))
    written = write_file(folder / "00000", "digests", np.frombuffer(digests, np.uint8))
    shards = [write_index(folder / "00000", array.count, table, written)]
    if not len(stops) or stops[-1] < array.count:
        left = size - int(bytes_before[-1] if len(stops) else 0)
        last_hash = hash_fraction(file.document(len(stops)))
        tail = (np.ones(1, np.int64), np.array([left], np.int64), np.array([last_hash]))
        written = write_file(folder / "00001", "tokens", np.array([end], tokenizer.dtype))
        shards.append(write_index(folder / "00001", 1, tail, written))
    return shards


def _open(source: IdFiles, file: SourceFile) -> IdArray:
    """Where the ids of a file are. Raises ConfigError for one that holds no array of ids."""
    path, where = file.path, f"{source}: {file.path}"
    try:
        if path.suffix.lower() == ".npy":
            array = _npy_array(path, where)
        else:
            dtype, size = source.made_by().dtype, path.stat().st_size
            array = IdArray(path, dtype, 0, size // dtype.itemsize)
            if size % dtype.itemsize:
                raise ConfigError(
                    f"{where} has {size:,} bytes, which is no whole number of {dtype.name}: a .bin"
                    " file holds raw ids, uint16 for up to 65,536 entries, else uint32."
                )
    except OSError as error:
        raise unreadable(path, error) from None
    if not array.count:
        raise ConfigError(f"{where} is empty: there is nothing to train on or to evaluate.")
    return array


def _npy_array(path: Path, where: str) -> IdArray:
    try:
        memmap = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ConfigError(
            f"{where} is no .npy array of integers ({error}): write it by numpy.save."
        ) from None
    if memmap.ndim != 1 or memmap.dtype.kind not in "iu":
        raise ConfigError(
            f"{where} is an array of {memmap.dtype} of shape {memmap.shape}: token ids are one row"
            " of integers."
        )
    return IdArray(path, memmap.dtype, memmap.offset, len(memmap))


def _check(source: IdFiles, array: IdArray, start: int, ids: np.ndarray) -> None:
    """Raises ConfigError for an id that the tokenizer does not have."""
    size = source.made_by().vocab_size
    if int(ids.min()) >= 0 and int(ids.max()) < size:
        return
    position = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
    raw = "" if array.path.suffix.lower() == ".npy" else f", read as {array.dtype.name},"
    raise ConfigError(
        f"{source}: id {int(ids[position])} at place {start + position:,} of {array.path}{raw} is"
        f" not in the vocabulary of tokenizer.path, which has {size:,} entries: name the tokenizer"
        " that made the ids."
    )


def _changed(file: SourceFile) -> ConfigError:
    return ConfigError(
        f"{file.path} changed while it was read: run again when it no longer changes."
    )
