"""The tensors of a model directory, read from one safetensors file or from shards with an index.

Tensors are read one by one, with pread and not through a memory map, whose pages would stay
resident.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxformer.files import ConfigError, first_of, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\:]+\.safetensors")
DTYPES = {
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
REFUSED = {  # other files of weights: why they are not read, and what converts them
    "*.bin *.pt *.pth *.ckpt *.pkl": ("reading a pickle runs code that lies in it", "transformers"),
    "*.h5 *.msgpack": (
        "only safetensors are read",
        "transformers 4 (from_tf=True or from_flax=True)",
    ),
}
POINTER = b"version https://git-lfs"
HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """The file, shape and dtype of a tensor; `dtype` is the format's name for it ("BF16")."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a model directory by name, or of its file `only`. `listing` is the file that
    lists them.

    Construction reads only the headers, and compares them with the index. Raises ConfigError where
    there are no safetensors, a file is damaged or missing, or the files do not match the index.
    """

    def __init__(self, directory: Path, only: str = "") -> None:
        self.directory = directory
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is not a directory: give one with config.json and *.safetensors."
            )
        index = directory / INDEX
        single = only or (directory / SINGLE).is_file() or not index.is_file()
        placed = None if single else _read_index(index)
        files = [_only_file(directory, only)] if placed is None else sorted(set(placed.values()))
        self.listing = files[0] if placed is None else INDEX
        if missing := [file for file in files if not (directory / file).is_file()]:
            raise ConfigError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX} names: download the"
                " missing files."
            )
        found = {file: _read_header(directory / file) for file in files}
        if placed is not None:
            _compare(index, placed, found)
        self.entries: dict[str, Entry] = {}
        for entries in found.values():
            self.entries |= entries

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor in the dtype of its file, or consecutive rows of its first axis.

        Raises ConfigError for a dtype that is not floating-point.
        """
        entry = self.entries[name]
        path = self.directory / entry.file
        if entry.dtype not in DTYPES:
            raise ConfigError(
                f"{name} in {path} is of dtype {entry.dtype}; supported are {', '.join(DTYPES)}."
                " Quantized weights are not supported: save the model unquantized."
            )
        with _opened(path) as file:
            if not entry.shape:
                return np.asarray(file.get_tensor(name))
            start, stop, _ = rows.indices(entry.shape[0])
            if start >= stop:  # the library refuses empty slices
                return np.empty((0, *entry.shape[1:]), DTYPES[entry.dtype])
            return np.asarray(file.get_slice(name)[start:stop])


def has_tensors(directory: Path) -> bool:
    """Whether the files of weights of a model directory are there, and not only their index, or
    what git leaves where they were not fetched."""
    index = directory / INDEX
    if (directory / SINGLE).is_file() or not index.is_file():
        files = [*directory.glob("*.safetensors")]
    else:
        files = [directory / name for name in set(_read_index(index).values())]
    return bool(files) and all(file.is_file() and not _is_pointer(file) for file in files)


def names_in_index(directory: Path) -> list[str] | None:
    """The names of the tensors by the index of a model directory, None where it has none. Raises
    ConfigError for a damaged index."""
    index = directory / INDEX
    return [*_read_index(index)] if index.is_file() and not _is_pointer(index) else None


def _only_file(directory: Path, only: str) -> str:
    """The file of weights in a directory without an index."""
    if (directory / (only or SINGLE)).is_file():
        return only or SINGLE
    found = [] if only else sorted(path.name for path in directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{directory} has several files of weights ({', '.join(found)}) and no {INDEX}: add the"
            " index."
        )
    for patterns, (why, remedy) in REFUSED.items():
        others = [path.name for each in patterns.split() for path in directory.glob(each)]
        if others:
            raise ConfigError(
                f"{directory} has weights only in {', '.join(sorted(others))}, which are not read:"
                f" {why}. Convert them once, in an environment you trust, with {remedy}:"
                " from_pretrained, then save_pretrained, writes safetensors."
            )
    wanted = f"no {only}" if only else f"neither {SINGLE}, nor {INDEX} and its shards"
    raise ConfigError(f"{directory} has no weights: {wanted}.")


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        placed = read_object(path, "download it again").get("weight_map")
    except ConfigError:
        _refuse_pointer(path)
        raise
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(
            f"{path} has no weight_map from tensor names to file names: download it again."
        )
    if outside := [f"{name} in {f!r}" for name, f in placed.items() if not SHARD_NAME.fullmatch(f)]:
        raise ConfigError(
            f"{path} places tensors elsewhere than in a *.safetensors beside it:"
            f" {first_of(outside, between=', ')}."
        )
    return placed


def _compare(index: Path, placed: dict[str, str], found: dict[str, dict[str, Entry]]) -> None:
    problems = [
        f"{name}: not in {file}, as the index says"
        for name, file in placed.items()
        if name not in found[file]
    ]
    for file, entries in found.items():
        for name in entries:
            if name not in placed:
                problems.append(f"{name}: in {file}, but the index does not name it")
            elif placed[name] != file:
                problems.append(f"{name}: in {file}, but the index places it in {placed[name]}")
    if problems:
        raise ConfigError(
            f"{index} does not match its files; download all again from one source:\n  "
            + first_of(problems)
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of the safetensors library; its errors become ConfigErrors that say what is wrong."""
    try:
        with safe_open(path, "numpy", backend="pread") as file:
            yield file
    except SafetensorError as error:
        _refuse_pointer(path)
        raise ConfigError(f"{path} {_diagnosis(path, error)}. Download or save it again.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read_header(path: Path) -> dict[str, Entry]:
    entries = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  (not a dict)
            tensor = file.get_slice(name)
            entries[name] = Entry(path.name, tuple(tensor.get_shape()), str(tensor.get_dtype()))
    return entries


def _diagnosis(path: Path, error: Exception) -> str:
    """Why the library refused a file, from the file's size and header."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= HEADER_LIMIT else b""
    if size == 0:
        return "is empty"
    if size < 8 + length <= 8 + HEADER_LIMIT:
        return f"is truncated: its {size:,} bytes end within the header"
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = sorted((8 + length + int(row["data_offsets"][1]), n) for n, row in header.items())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        ends = []
    if not ends or ends[-1][0] == size:
        return f"is not a valid safetensors file ({error})"
    cut = [name for end, name in ends if end > size]
    first = f"; the first incomplete tensor is {cut[0]}" if cut else ""
    return f"is damaged: it has {size:,} bytes where its header promises {ends[-1][0]:,}{first}"


def _is_pointer(path: Path) -> bool:
    start = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        start = file.read(len(POINTER))
    return start == POINTER


def _refuse_pointer(path: Path) -> None:
    """ConfigError for the text file that git leaves where a large file was not fetched."""
    if _is_pointer(path):
        raise ConfigError(
            f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in"
            f" {path.parent}."
        )
