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
from jaxformer.data.documents import SourceFile, hash_fraction, unreadable
from jaxformer.data.store import ProgressNotes, Shard, TokenStore, claimed, write_array, write_index
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer

# With fewer ids than this nothing is concluded from every second one being 0.
FEWEST_TO_DOUBT = 16
# An even number, as the test for ids of another width needs.
BLOCK_IDS = 1 << 22


def open_ids(file: SourceFile, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of a file [N], mapped and not read. Raises ConfigError where it holds none."""
    path = file.path
    if not file.size:
        raise ConfigError(f"{path} is empty: there is nothing to train on or to evaluate.")
    dtype = tokenizer.dtype
    if is_raw(path) and file.size % dtype.itemsize:
        raise ConfigError(
            f"{path} has {file.size:,} bytes, which is no whole number of {dtype.name}: a .bin file"
            " holds raw ids, uint16 for up to 65,536 entries, else uint32."
        )
    try:
        if is_raw(path):
            ids = np.memmap(path, dtype, "r")
        else:
            ids = np.lib.format.open_memmap(path, mode="r")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"it is one of {ids.dtype}, shape {ids.shape}")
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is no .npy array of one row of integers ({error}): write it by numpy.save."
        ) from None
    if not len(ids):
        raise ConfigError(f"{path} is empty: there is nothing to train on or to evaluate.")
    # A plain view: slices of np.memmap itself are several times slower to make.
    return ids.view(np.ndarray)


def is_raw(path: Path) -> bool:
    """Return whether a file holds ids alone, which can be read as another type than they were
    written with."""
    return path.suffix.lower() != ".npy"


def documents_of_ids(
    file: SourceFile, tokenizer: Tokenizer, log: Log = lambda line: None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Read and check all ids of a file: the place after each document, that of an end token which
    the file lacks as the last, and the bytes of each document's text (both int64 [documents]); and
    a digest of the file's name and the ids, whatever holds them."""
    path = file.path
    all_ids = open_ids(file, tokenizer)
    read_as = ""
    if is_raw(path):
        read_as = f", read as {all_ids.dtype.name},"
    log(f"{path}: reading {len(all_ids):,} ids, {all_ids.dtype.name}")
    token_bytes = tokenizer.token_bytes()
    progress = ProgressNotes(log, work=f"{path}: read")
    ends = []
    bytes_until_ends = []
    size = 0
    # uint32 ids below 65,536 that are read as uint16 have 0 as every second one.
    doubtful = is_raw(path) and all_ids.dtype.itemsize == 2 and len(all_ids) >= FEWEST_TO_DOUBT
    digest = hashlib.blake2b(file.name.encode() + b"\xff", digest_size=16)
    for start in range(0, len(all_ids), BLOCK_IDS):
        ids = all_ids[start : start + BLOCK_IDS]
        if int(ids.min()) < 0 or int(ids.max()) >= tokenizer.vocab_size:
            position = int(np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))[0])
            raise ConfigError(
                f"id {int(ids[position])} at place {start + position:,} of {path}{read_as} is not"
                f" in the vocabulary of tokenizer.path, which has {tokenizer.vocab_size:,} entries:"
                " name the tokenizer that made the ids."
            )
        # Of one width, so that the same ids of another type are the same text.
        digest.update(ids.astype("<u4").tobytes())
        doubtful = doubtful and not ids[1::2].any()
        positions = np.flatnonzero(ids == tokenizer.end_token)
        # Bytes up to and with each id.
        bytes_until = size + np.cumsum(token_bytes[ids], dtype=np.int64)
        ends.append(positions + start + 1)
        bytes_until_ends.append(bytes_until[positions])
        size = int(bytes_until[-1])
        progress.done += ids.nbytes
        progress.tell()
    if doubtful:
        raise ConfigError(
            f"every second id of {path} is 0, as if they were uint32, and a .bin file of"
            f" {tokenizer.vocab_size:,} entries holds uint16: write it so, or as .npy."
        )
    if ids[-1] != tokenizer.end_token:
        # The place of the end token that `open_or_index` adds, which is no text.
        ends.append(np.array([len(all_ids) + 1]))
        bytes_until_ends.append(np.array([size]))
    sizes = np.diff(np.concatenate(bytes_until_ends), prepend=0)
    return np.concatenate(ends), sizes, digest.hexdigest()


def open_or_index(file: SourceFile, tokenizer: Tokenizer, folder: Path, log: Log) -> TokenStore:
    """Return the ids of a file as a store, whose index of documents is in a folder, made where
    there is none; a file that lacks an end token has one in a shard of its own."""
    ids = open_ids(file, tokenizer)
    # The user's file is never written to, so the end token that it lacks is a second shard.
    count = 1 if int(ids[-1]) == tokenizer.end_token else 2
    with claimed(folder, log):
        shards = []
        for number in range(count):
            if shard := Shard.finished(folder, number):
                shards.append(shard)
        if len(shards) < count:
            ends, sizes, _ = documents_of_ids(file, tokenizer)
            hashes = np.array([hash_fraction(file.document(n)) for n in range(len(ends))])
            # [3, documents]
            table = np.stack([ends, sizes, hashes.view(np.int64)])
            # A last document without an end token ends in the second shard.
            inside = len(ends) + 1 - count
            shards = [write_index(folder / "00000", len(ids), table[:, :inside], {})]
            if count == 2:
                end = np.array([tokenizer.end_token], tokenizer.dtype)
                files = {"tokens": write_array(folder / "00001.tokens", end)}
                table[0] -= len(ids)
                shards.append(write_index(folder / "00001", 1, table[:, inside:], files))
    # Mapped when it is read, since each map holds a file open.
    arrays = {"tokens": functools.partial(open_ids, file, tokenizer)}
    shards[0] = replace(shards[0], arrays=arrays)
    return TokenStore(shards, tokenizer.dtype, folder.name)
