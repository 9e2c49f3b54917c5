"""The files of weights of a model directory, read and written: one safetensors file, or shards with
an index.

The safetensors library reads them, one tensor or some rows of it at a time, with pread and not
through a memory map, whose pages would stay resident. Here is what it leaves open: the index of a
sharded model, the dtypes that a model may have, and what to do about a file that it refuses.
"""

import contextlib
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxformer.files import ConfigError, first_of, is_remote, read_object, resolved_file, sync
from jaxformer.files.copies import local_folder, matching, version_if_there

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\:]+\.safetensors")
DTYPES = {
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Other files of weights: why they are not read, and what converts them.
REFUSED = {
    "*.bin *.pt *.pth *.ckpt *.pkl": ("reading a pickle runs code that lies in it", "transformers"),
    "*.h5 *.msgpack": (
        "only safetensors are read",
        "transformers 4 (from_tf=True or from_flax=True)",
    ),
}
POINTER = b"version https://git-lfs"
LENGTH_BYTES = 8  # at the start of a file, the length of its header
HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors library
# How the library's message ends where a header is valid and the data have another length.
UNCOVERED = "file not fully covered"
# The names of the files of a save, and of their drafts.
WRITTEN = re.compile(
    r"model(-\d{5}-of-\d{5}\.safetensors|\.safetensors(\.index\.json)?)(\.[0-9a-f]{32}\.tmp)?"
)

TensorShapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


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
        if is_remote(directory):
            raise ConfigError(
                f"the weights of {directory} are read from a disk alone: copy the directory there,"
                " by `gcloud storage cp -r` or `aws s3 cp --recursive`."
            )
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is not a directory: give one with config.json and *.safetensors."
            )
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        index = directory / INDEX
        if only or (directory / SINGLE).is_file() or not index.is_file():
            self.listing = _single_file(directory, only)
            self.entries |= _read_header(directory / self.listing)
            return
        self.listing = INDEX
        shard_of = _read_index(index)
        shards = sorted({*shard_of.values()})
        missing = [shard for shard in shards if not (directory / shard).is_file()]
        if missing:
            raise ConfigError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX} names: download the"
                " missing files."
            )
        headers = {shard: _read_header(directory / shard) for shard in shards}
        _check_index(index, shard_of, headers)
        for entries in headers.values():
            self.entries |= entries

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor in the dtype of its file, or consecutive rows of its first axis.

        Raises ConfigError for a dtype that is not floating-point.
        """
        return self.read_entry(name, self.entries[name], rows, DTYPES)

    def read_entry(
        self, name: str, entry: Entry, rows: slice, dtypes: Mapping[str, np.dtype]
    ) -> np.ndarray:
        """As `read`, of a tensor whose dtype is one of these."""
        path = self.directory / entry.file
        if entry.dtype not in dtypes:
            raise ConfigError(
                f"{name} in {path} is of dtype {entry.dtype}; supported are {', '.join(dtypes)}."
                " Quantized weights are not supported: save the model unquantized."
            )
        with _opened(path) as file:
            if rows == slice(None):
                return np.asarray(file.get_tensor(name))
            start, stop, _ = rows.indices(entry.shape[0])
            if start >= stop:
                # The library refuses empty slices.
                return np.empty((0, *entry.shape[1:]), dtypes[entry.dtype])
            return np.asarray(file.get_slice(name)[start:stop])


def copied_model(directory: Path, only: str = "") -> Path:
    """The directory in which a model is read: a local one as it is; of one at a URL the copies, on
    this machine, of its JSON files and of its weights, or of the file `only` of these. Raises
    ConfigError as `local_copies` does."""
    if not is_remote(directory):
        return directory
    copy, is_weight = local_folder(directory, matching("*.json")), matching(only or "*.safetensors")
    if not only and version_if_there(directory / SINGLE):
        is_weight = matching(SINGLE)
    elif not only and (copy / INDEX).is_file():
        is_weight = {*_read_index(copy / INDEX).values()}.__contains__
    return local_folder(directory, is_weight)


def has_tensors(directory: Path) -> bool:
    """Whether the files of weights of a model directory are there, and not only their index, or
    what git leaves where they were not fetched."""
    index = directory / INDEX
    if (directory / SINGLE).is_file() or not index.is_file():
        files = [*directory.glob("*.safetensors")]
    else:
        files = [directory / shard for shard in {*_read_index(index).values()}]
    return bool(files) and all(file.is_file() and not _is_pointer(file) for file in files)


def names_in_index(directory: Path) -> list[str] | None:
    """The names of the tensors by the index of a model directory, None where it has none. Raises
    ConfigError for a damaged index."""
    index = directory / INDEX
    return [*_read_index(index)] if index.is_file() and not _is_pointer(index) else None


def _single_file(directory: Path, only: str) -> str:
    """The file of weights in a directory without an index."""
    if (directory / (only or SINGLE)).is_file():
        return only or SINGLE
    candidates = [] if only else sorted(path.name for path in directory.glob("*.safetensors"))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(
            f"{directory} has several files of weights ({', '.join(candidates)}) and no {INDEX}:"
            " add the index."
        )
    for patterns, (reason, converter) in REFUSED.items():
        names = [path.name for each in patterns.split() for path in directory.glob(each)]
        if names:
            raise ConfigError(
                f"{directory} has weights only in {', '.join(sorted(names))}, which are not read:"
                f" {reason}. Convert them once, in an environment you trust, with {converter}:"
                " from_pretrained, then save_pretrained, writes safetensors."
            )
    if only:
        raise ConfigError(f"{directory} has no weights: no {only}.")
    raise ConfigError(f"{directory} has no weights: neither {SINGLE}, nor {INDEX} and its shards.")


def _read_index(path: Path) -> dict[str, str]:
    """The shard of each tensor."""
    try:
        shard_of = read_object(path, "download it again").get("weight_map")
    except ConfigError:
        refuse_pointer(path)
        raise
    if not isinstance(shard_of, dict) or not all(isinstance(f, str) for f in shard_of.values()):
        raise ConfigError(
            f"{path} has no weight_map from tensor names to file names: download it again."
        )
    outside = [
        f"{name} in {shard!r}"
        for name, shard in shard_of.items()
        if not SHARD_NAME.fullmatch(shard)
    ]
    if outside:
        raise ConfigError(
            f"{path} places tensors elsewhere than in a *.safetensors beside it:"
            f" {first_of(outside, between=', ')}."
        )
    return shard_of


def _check_index(
    index: Path, shard_of: Mapping[str, str], headers: Mapping[str, Mapping[str, Entry]]
) -> None:
    """ConfigError where a tensor is not in the shard that the index names for it, in another one
    too, or not in the index."""
    problems = [
        f"{name}: not in {shard}, as the index says"
        for name, shard in shard_of.items()
        if name not in headers[shard]
    ]
    for shard, entries in headers.items():
        for name in entries:
            if name not in shard_of:
                problems.append(f"{name}: in {shard}, but the index does not name it")
            elif shard_of[name] != shard:
                problems.append(f"{name}: in {shard}, but the index places it in {shard_of[name]}")
    if problems:
        raise ConfigError(
            f"{index} does not match its files; download all again from one source:\n"
            f"  {first_of(problems)}"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """A file of the safetensors library; its errors become ConfigErrors that say what is wrong."""
    try:
        with safe_open(path, "numpy", backend="pread") as file:
            yield file
    except SafetensorError as error:
        refuse_pointer(path)
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


def _diagnosis(path: Path, error: SafetensorError) -> str:
    """Why the library refused a file. Of one that was cut, as by a download that stopped, it says
    only that the header is invalid or that the file is not covered; sizes and names are added."""
    size = path.stat().st_size
    if size == 0:
        return "is empty"
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data_begin = LENGTH_BYTES + header_bytes
        if size < data_begin and header_bytes <= HEADER_LIMIT:
            return f"is truncated: its {size:,} bytes end within the header"
        if not str(error).endswith(UNCOVERED):
            return f"is not a valid safetensors file ({error})"
        rows = json.loads(file.read(header_bytes))  # which the library has found valid
    rows.pop("__metadata__", None)
    ends = sorted((data_begin + row["data_offsets"][1], name) for name, row in rows.items())
    promised = ends[-1][0] if ends else data_begin
    problem = f"is damaged: it has {size:,} bytes where its header promises {promised:,}"
    incomplete = [name for end, name in ends if end > size]
    if not incomplete:
        return problem
    return f"{problem}; the first incomplete tensor is {incomplete[0]}"


def _is_pointer(path: Path) -> bool:
    start = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.read(len(POINTER))
    return start == POINTER


def refuse_pointer(path: Path) -> None:
    """ConfigError for the text file that git leaves where a large file was not fetched."""
    if _is_pointer(path):
        raise ConfigError(
            f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in"
            f" {path.parent}."
        )


def write_tensors(
    directory: Path, shapes: TensorShapes, tensor: Callable[[str], np.ndarray], shard_bytes: int
) -> list[Path]:
    """Writes tensors to one file, or to shards of at most `shard_bytes` of data and an index.

    `tensor` is called once for each name, in the order of `shapes`; its result is cast. The tensors
    of one shard are in memory at a time. A model that is already in the directory stays unchanged
    until all files are on the disk, and is then removed. Returns the paths of the files. Raises
    ConfigError where a tensor does not have its shape in `shapes`, a dtype is not floating-point,
    or writing fails.
    """
    allowed = [*DTYPES.values()]
    refused = [f"{name}: {dtype}" for name, (_, dtype) in shapes.items() if dtype not in allowed]
    if refused:
        raise ConfigError(
            f"weights are saved as {', '.join(map(str, allowed))}, not"
            f" {first_of(refused, between='; ')}."
        )
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes} must be at least 1.")
    shards = _shards(shapes, shard_bytes)
    files = [*shards, INDEX] if len(shards) > 1 else [*shards]
    drafts: dict[str, Path] = {}
    try:
        targets = _targets(directory, files)
        for file, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Beside the target: only names on one file system can be replaced.
            drafts[file] = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        for file, names in shards.items():
            # Without the metadata transformers refuses a file.
            save_file(_cast(names, shapes, tensor), drafts[file], {"format": "pt"})
        if INDEX in drafts:
            total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
            shard_of = {name: file for file, names in shards.items() for name in names}
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(shard_of.items())),
            }
            drafts[INDEX].write_text(json.dumps(index, indent=2), encoding="utf-8")
        _replace(directory, drafts, targets)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error  # of an OSError
        raise ConfigError(
            f"weights cannot be written to {directory}: {reason}. Make room, or choose another"
            " directory."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
    return [directory / file for file in sorted(files)]


def _targets(directory: Path, files: list[str]) -> dict[str, Path]:
    """Where each file is written: where a link of its name leads, else in the directory.

    Drafts of a save that was killed are removed. Raises ConfigError where a name that is written or
    removed is that of something else.
    """
    advice = "move it away, or choose another directory"
    written = [*directory.iterdir()] if directory.is_dir() else []
    written = [path for path in written if WRITTEN.fullmatch(path.name)]
    for path in written:
        resolved_file(path, advice)
    for path in written:
        if path.suffix == ".tmp":
            path.unlink()
    return {file: resolved_file(directory / file, advice) for file in files}


def _shards(shapes: TensorShapes, limit: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, filled in order, which is that of the calls."""
    shards: list[list[str]] = [[]]
    capacity = limit
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and size > capacity:
            shards.append([])
            capacity = limit
        shards[-1].append(name)
        capacity -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def _cast(
    names: list[str], shapes: TensorShapes, tensor: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors of one shard as they are stored: contiguous, in their dtype."""
    tensors = {}
    for name in names:
        value, (shape, dtype) = tensor(name), shapes[name]
        if value.shape != shape:
            raise ConfigError(
                f"{name}: the params make it {value.shape}, the config {shape}; give params and"
                " config of the same model."
            )
        tensors[name] = as_stored(name, value, dtype)
    return tensors


def as_stored(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A tensor contiguous and in the dtype of its file. Raises ConfigError for a finite value that
    the dtype cannot express."""
    try:
        with np.errstate(over="raise"):
            return value.astype(dtype, order="C", copy=False)
    except FloatingPointError:
        raise ConfigError(
            f"{name} has values beyond the range of {dtype}: save it as bfloat16 or float32."
        ) from None


def _replace(directory: Path, drafts: dict[str, Path], targets: dict[str, Path]) -> None:
    """Gives the drafts their names once they are on the disk, and removes an earlier model."""
    sync(*drafts.values())
    if INDEX in targets:
        targets[INDEX].unlink(missing_ok=True)  # never an old index beside new shards
    for file, draft in drafts.items():
        os.replace(draft, targets[file])
    for path in directory.iterdir():
        if path.name not in targets and WRITTEN.fullmatch(path.name):
            path.unlink()
    sync(*{target.parent for target in targets.values()})
