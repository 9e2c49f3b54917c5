"""Digests of arrays and of files.

The digest of an array has 64 bits. It is a pair of sums, modulo 2^32, over the words of the array.
Each word is mixed with its flat index by a function that is a bijection of the word for every index
(xor, multiplication by odd numbers and shifted xor, as in the finalizer of MurmurHash3). The change
of a single word therefore always changes both sums; other damage goes unnoticed with a probability
of about 2^-64. The order of the sum does not matter, so that every sharding on every mesh gives the
same digest.

The digest of a file is its size and the CRC-32 of its bytes. The CRC-32 always differs where all
changed bits lie within 32 bits, and else with a probability of 1 - 2^-32.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.files import store_of

WORD = np.uint32
FILES = "files.json"  # of a checkpoint: the digests of the files in FOLDERS
FOLDERS = ("state", "manifest")
READ_AT_ONCE = 2**20  # bytes of a file
READERS = 4  # files that are read in parallel

FileDigest: TypeAlias = list[int]  # size and CRC-32
Array: TypeAlias = jax.Array | np.ndarray


class Altered(ValueError):
    """The data that was read is not the data that was saved."""


def digests(leaves: Mapping[str, Array]) -> dict[str, jax.Array]:
    """Return the digest of each array as uint32 [2], computed on the devices of the array. Returns
    before they are done."""
    groups: dict[Any, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        sharding = getattr(leaf, "sharding", None)
        devices = None
        if sharding is not None:
            devices = frozenset(sharding.device_set)
        # One program for the arrays of each set of devices: a jit takes no arrays of two.
        groups.setdefault(devices, {})[path] = leaf if sharding else as_words(np.asarray(leaf))
    sums: dict[str, jax.Array] = {}
    for group in groups.values():
        sums |= _of_table(group)
    return {path: sums[path] for path in leaves}


def as_text(digest: Array) -> str:
    """Return a digest, uint32 [2], as 16 hexadecimal digits."""
    first, second = np.asarray(digest).tolist()
    return f"{first:08x}{second:08x}"


def fingerprint(leaves: Mapping[str, Array]) -> str:
    """Return 16 hexadecimal digits of all arrays of a model, by path, whatever devices hold
    them."""
    return combined(as_texts(digests(leaves)))


def as_texts(sums: Mapping[str, Array]) -> dict[str, str]:
    """Return the digests of arrays, uint32 [2] each, as texts."""
    return {path: as_text(digest) for path, digest in jax.device_get(sums).items()}


def combined(texts: Mapping[str, str]) -> str:
    """Return `fingerprint` from the texts of the digests."""
    lines = [f"{path} {texts[path]}" for path in sorted(texts)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def digest_on_host(array: np.ndarray[Any, Any]) -> str:
    """Return the digest of an array in this process's memory, computed by NumPy."""
    words = as_words(array).reshape(-1)
    sums = np.zeros(2, WORD)
    # In pieces that fit the cache of a core.
    for begin in range(0, words.size, 1 << 16):
        piece = words[begin : begin + (1 << 16)]
        index = np.arange(begin, begin + piece.size, dtype=np.uint64).astype(WORD)
        sums += np.array([mixed.sum(dtype=WORD) for mixed in _mixed(piece, index)])
    return as_text(sums)


def file_digest(path: Path) -> FileDigest:
    """Compute the size and the CRC-32 of a file. Raises OSError where it cannot be read, and
    ConfigError in a bucket."""
    size = 0
    crc = 0
    for block in store_of(path).blocks(READ_AT_ONCE):
        size += len(block)
        crc = zlib.crc32(block, crc)
    return [size, crc]


def write_file_digests(checkpoint: Path) -> None:
    """Write the digests of all files in the FOLDERS of a checkpoint to its FILES."""
    names: list[str] = []
    for folder in FOLDERS:
        names += [f"{folder}/{name}" for name in store_of(checkpoint / folder).names_below()]
    with ThreadPoolExecutor(READERS) as pool:
        # zlib releases the interpreter, and a bucket answers several requests at once.
        sums = pool.map(lambda name: file_digest(checkpoint / name), names)
    table = dict(sorted(zip(names, sums, strict=True)))
    content = {"files": table, "sha256": checksum(table)}
    (checkpoint / FILES).write_text(json.dumps(content), encoding="utf-8")


def altered_files(checkpoint: Path, process: int = 0, count: int = 1) -> list[str]:
    """Return the files of a checkpoint whose bytes are not those that were saved, as paths relative
    to it. Each of `count` processes compares its own share.

    Raises Altered where the digests themselves were altered or are missing, and OSError where a
    file exists and cannot be read, which says nothing about its bytes.
    """
    if is_missing(checkpoint / FILES):
        raise Altered(f"{FILES} is missing")
    content = (checkpoint / FILES).read_bytes()
    try:
        saved = json.loads(content)
        table: dict[str, FileDigest] = saved["files"]
        is_intact = saved["sha256"] == checksum(table)
        # A name that leads elsewhere would have another file read.
        is_intact &= all(name.split("/")[0] in FOLDERS and ".." not in name for name in table)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise Altered(f"{FILES} is not what was saved")

    def is_altered(name: str) -> bool:
        path = checkpoint / name
        return is_missing(path) or file_digest(path) != table[name]

    names = sorted(table)[process::count]
    with ThreadPoolExecutor(READERS) as pool:
        answers = pool.map(is_altered, names)
    return [name for name, altered in zip(names, answers, strict=True) if altered]


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what JSON holds, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_missing(path: Path) -> bool:
    """Tell whether there is no file to read: nothing, or a pipe or a device, whose reading may
    never end. A folder fails to be read, which says nothing about the bytes that were saved."""
    return store_of(path).version() is None and not path.is_dir()


def as_words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bits of a NumPy array: one word for each element, two for an element of 64
    bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == bool or array.dtype.itemsize not in (1, 2, 4, 8):
        return array.astype(WORD)
    if array.dtype.itemsize == 8:
        return array.reshape(*array.shape, 1).view(WORD)
    return array.view(f"uint{8 * array.dtype.itemsize}").astype(WORD, copy=False)


@jax.jit
def _of_table(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    return {path: _digest(leaf) for path, leaf in leaves.items()}


@jax.jit
def _digest(leaf: jax.Array) -> jax.Array:
    """Compute the digest of a leaf; traced once for all leaves of one shape."""
    # The words of `as_words`, on a device; those of a PRNG key are its data, and those of a complex
    # number its real and its imaginary part.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], -1)
    if leaf.dtype != bool:
        kind = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
        leaf = jax.lax.bitcast_convert_type(leaf, f"uint{min(kind(leaf.dtype).bits, 32)}")
    words = leaf.astype(WORD)
    # The flat index of each word, which no sharding changes.
    index = jnp.zeros(words.shape, WORD)
    stride = 1
    for axis in reversed(range(words.ndim)):
        position = jax.lax.broadcasted_iota(WORD, words.shape, axis)
        index += position * WORD(stride % 2**32)
        stride *= words.shape[axis]
    zero = WORD(0)
    # One reduction for both sums, which XLA would compile as two programs.
    sums = jax.lax.reduce(
        _mixed(words, index),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(sums)


def _mixed(words: Any, index: Any) -> tuple[Any, Any]:
    """Return two bijections of a word for each index."""
    mixed = words ^ index * WORD(0x9E3779B1)
    mixed = (mixed ^ mixed >> WORD(16)) * WORD(0x7FEB352D)
    mixed = (mixed ^ mixed >> WORD(15)) * WORD(0x846CA68B)
    return mixed, mixed ^ mixed >> WORD(16)
