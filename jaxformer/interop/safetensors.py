"""The tensors of a model directory: safetensors, in one file or in shards with an index, read and
written piece by piece.

A map of a file keeps every page resident that was touched, so each piece is read through a map of
its own. The safetensors library writes only what is all in memory, so shards are written here: the
length of a header (8 bytes, little-endian), the header (JSON: name to dtype, shape and place), then
the data.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.config import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors(\.tmp)?|model\.safetensors\.index\.json(\.tmp)?"
)
SHARD_NAME = re.compile(r"[^/\\:]+\.safetensors")
DTYPES = {
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
REFUSED = (  # files of weights that are not read, why, and what reads them
    (
        ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"),
        "reading a pickle runs code that lies in it",
        "transformers",
    ),
    (
        ("*.h5", "*.msgpack"),
        "only safetensors are read",
        "transformers 4 (from_tf=True or from_flax=True)",
    ),
)
POINTER = b"version https://git-lfs"
PIECE_BYTES = 32 << 20
HEADER_LIMIT = 100_000_000  # the library's own
PROBLEMS_SHOWN = 20

TensorShapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, and as what; `dtype` is the format's name for it ("BF16")."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a model directory, by name, as `listing`, a file, has them. Construction reads
    the headers alone, and holds them against the index.

    Raises ConfigError where there are no safetensors, a file is damaged or missing, or files and
    index disagree.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is not a directory: give one with config.json and *.safetensors."
            )
        index = directory / INDEX
        placed = (
            _read_index(index) if index.is_file() and not (directory / SINGLE).is_file() else None
        )
        files = [_only_file(directory)] if placed is None else sorted(set(placed.values()))
        self.listing = files[0] if placed is None else INDEX
        if missing := [file for file in files if not (directory / file).is_file()]:
            raise ConfigError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX} names. Download what is"
                " missing."
            )
        found = {file: _read_header(directory / file) for file in files}
        if placed is not None:
            _compare(index, placed, found)
        self.entries = {
            name: entry for entries in found.values() for name, entry in entries.items()
        }

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor in its file's dtype, or consecutive rows of its first axis. Raises ConfigError
        if it is no float."""
        entry = self.entries[name]
        path = self.directory / entry.file
        if entry.dtype not in DTYPES:
            raise ConfigError(
                f"{name} in {path} is of dtype {entry.dtype}; what can be read is"
                f" {', '.join(DTYPES)}. Quantized weights are not read: save the model unquantized."
            )
        if not entry.shape:
            with _opened(path) as file:
                return np.asarray(file.get_tensor(name))
        start, stop, _ = rows.indices(entry.shape[0])
        out = np.empty((max(0, stop - start), *entry.shape[1:]), DTYPES[entry.dtype])
        for piece in _pieces(out):
            with _opened(path) as file:
                out[piece] = file.get_slice(name)[start + piece.start : start + piece.stop]
        return out


def write_tensors(
    directory: Path, shapes: TensorShapes, tensor: Callable[[str], np.ndarray], shard_bytes: int
) -> list[Path]:
    """Writes tensors to one file, or to shards of at most `shard_bytes` of data and an index; gives
    the files' paths.

    `tensor` is asked once for each name, in the order of `shapes` with wider dtypes first, and what
    it gives is cast. Until all of it is on the disk, an earlier model in the directory stays as it
    is; afterwards nothing is left of that one. Raises ConfigError where a tensor has not the shape
    promised, a dtype is no float, or the disk does not take it.
    """
    if wrong := [
        f"{name}: {dtype}" for name, (_, dtype) in shapes.items() if np.dtype(dtype) not in CODES
    ]:
        raise ConfigError(
            f"weights are saved as one of {', '.join(map(str, CODES))}, not {_first(wrong, '; ')}."
        )
    if shard_bytes < 1:
        raise ConfigError(
            f"shard_bytes={shard_bytes} must be at least 1: it is the most that one file of weights"
            " holds."
        )
    shards = _shards(shapes, shard_bytes)
    drafts = {
        directory / name: directory / f"{name}.tmp"
        for name in (*shards, *([INDEX] if len(shards) > 1 else []))
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, names in shards.items():
            _write_durably(drafts[directory / file], _content(shapes, names, tensor))
        if len(shards) > 1:
            _write_durably(drafts[directory / INDEX], [_index_of(shapes, shards)])
            (directory / INDEX).unlink(missing_ok=True)  # never an old index beside new shards
        for path, draft in drafts.items():
            os.replace(draft, path)
        for path in directory.iterdir():
            if path not in drafts and OURS.fullmatch(path.name):
                path.unlink()
    except OSError as error:
        raise ConfigError(
            f"weights cannot be written to {directory}: {error.strerror or error}. Make room, or"
            " choose another place."
        ) from error
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()
    return list(drafts)


def _pieces(rows: np.ndarray) -> Iterator[slice]:
    """The first axis in parts of about PIECE_BYTES."""
    step = max(1, PIECE_BYTES * len(rows) // max(1, rows.nbytes))
    return (slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step))


def _only_file(directory: Path) -> str:
    """The file of weights in a directory that has no index. Raises ConfigError if there is none, or
    more than one."""
    if (directory / SINGLE).is_file():
        return SINGLE
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{directory} has several files of weights ({', '.join(found)}) and no {INDEX}: add the"
            " index."
        )
    for patterns, why, remedy in REFUSED:
        if others := sorted(path.name for pattern in patterns for path in directory.glob(pattern)):
            raise ConfigError(
                f"{directory} has weights in {', '.join(others)} alone, which is refused: {why}."
                f" Convert them once, in an environment you trust, with {remedy}: from_pretrained,"
                " then save_pretrained, writes safetensors."
            )
    raise ConfigError(f"{directory} has no weights: neither {SINGLE}, nor {INDEX} and its shards.")


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor. Raises ConfigError if it is not such a map, or names what does not
    lie beside it."""
    try:
        text = path.read_bytes()
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            _pointer(path, text) or f"{path} is not JSON ({error}): download it again."
        ) from None
    placed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(
            f"{path} has no weight_map from the tensors' names to their files: download it again."
        )
    if outside := [
        f"{name} in {file!r}" for name, file in placed.items() if not SHARD_NAME.fullmatch(file)
    ]:
        raise ConfigError(
            f"{path} places tensors elsewhere than in a *.safetensors beside it:"
            f" {_first(outside, ', ')}."
        )
    return placed


def _compare(index: Path, placed: dict[str, str], found: dict[str, dict[str, Entry]]) -> None:
    problems = [
        f"{name}: not in {file}, as the index says"
        for name, file in placed.items()
        if name not in found[file]
    ]
    problems += [
        f"{name}: in {file}, but the index "
        + (f"places it in {placed[name]}" if name in placed else "does not name it")
        for file, entries in found.items()
        for name in entries
        if placed.get(name) != file
    ]
    if problems:
        raise ConfigError(
            f"{index} and its files disagree; download all again from one place:\n "
            f" {_first(problems)}"
        )


def _first(lines: list[str], between: str = "\n  ") -> str:
    rest = [f"and {len(lines) - PROBLEMS_SHOWN} more"] if len(lines) > PROBLEMS_SHOWN else []
    return between.join([*lines[:PROBLEMS_SHOWN], *rest])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of the safetensors library. Raises ConfigError saying what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise ConfigError(_diagnosis(path, error)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read_header(path: Path) -> dict[str, Entry]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        return {
            name: Entry(path.name, tuple(part.get_shape()), str(part.get_dtype()))
            for name, part in slices.items()
        }


def _diagnosis(path: Path, error: Exception) -> str:
    """Why a file was refused, from its size and its own header."""
    size, again = path.stat().st_size, "Download it again, or save it again."
    with open(path, "rb") as file:
        start = file.read(len(POINTER))
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        text = file.read(length) if length <= HEADER_LIMIT else b""
    if size == 0:
        return f"{path} is empty. {again}"
    if pointer := _pointer(path, start):
        return pointer
    if size < 8 + length <= 8 + HEADER_LIMIT:
        return f"{path} is truncated: its {size:,} bytes end within the header. {again}"
    try:
        header = {
            name: entry["data_offsets"]
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
        ends = sorted((8 + length + int(end), name) for name, (_, end) in header.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        ends = []
    if not ends or ends[-1][0] == size:
        return f"{path} is no sound safetensors file ({error}). {again}"
    cut = [name for end, name in ends if end > size]
    first = f"; the first tensor that is not whole is {cut[0]}" if cut else ""
    return (
        f"{path} is damaged: it has {size:,} bytes where its header promises"
        f" {ends[-1][0]:,}{first}. {again}"
    )


def _pointer(path: Path, text: bytes) -> str | None:
    """The message for a stand-in that git leaves where large files were not fetched; None if it is
    not one."""
    told = (
        f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in {path.parent}."
    )
    return told if text.startswith(POINTER) else None


def _bytes(shapes: TensorShapes, name: str) -> int:
    shape, dtype = shapes[name]
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _shards(shapes: TensorShapes, limit: int) -> dict[str, list[str]]:
    """File name to its tensors' names, filled in order; wider dtypes go first, so each lies at a
    multiple of its own."""
    groups: list[list[str]] = [[]]
    space = limit
    for name in sorted(shapes, key=lambda name: -np.dtype(shapes[name][1]).itemsize):
        if groups[-1] and _bytes(shapes, name) > space:
            groups.append([])
            space = limit
        groups[-1].append(name)
        space -= _bytes(shapes, name)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, 1)
    }


def _index_of(shapes: TensorShapes, shards: dict[str, list[str]]) -> bytes:
    placed = {name: file for file, names in shards.items() for name in names}
    total = sum(_bytes(shapes, name) for name in shapes)
    return json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}, indent=2
    ).encode()


def _write_durably(path: Path, parts: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _content(
    shapes: TensorShapes, names: list[str], tensor: Callable[[str], np.ndarray]
) -> Iterator[bytes]:
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"}
    }  # without it transformers refuses the file
    end = 0
    for name in names:
        begin, end = end, end + _bytes(shapes, name)
        shape, dtype = shapes[name]
        header[name] = {
            "dtype": CODES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from _data(name, tensor(name), *shapes[name])


def _data(name: str, value: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[bytes]:
    if value.shape != shape:
        raise ConfigError(
            f"{name}: the params make it {value.shape}, the config {shape}; give two that belong"
            " together."
        )
    rows = np.atleast_1d(value)
    for piece in _pieces(rows):
        try:
            with np.errstate(over="raise"):
                cast = rows[piece].astype(dtype, copy=False)
        except FloatingPointError:
            raise ConfigError(
                f"{name} has values beyond the range of {dtype}: save it as bfloat16 or float32."
            ) from None
        yield cast.tobytes()
