"""The files of weights of a model directory, read and written: one safetensors file, or shards with
an index.

The safetensors library reads them, one tensor or some rows of it at a time, with pread and not
through a memory map, whose pages would stay resident.
"""

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxformer.files import ConfigError, first_of, read_object, store_of
from jaxformer.files.stores import matching, resolved_file, sync

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\:]+\.safetensors")
DTYPES = {
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
# The files of a save, and the folder in it where they are made.
WRITTEN = re.compile(r"model(-\d{5}-of-\d{5}\.safetensors|\.safetensors(\.index\.json)?)")
DRAFTS = ".model-drafts-"
PIECE = 1 << 22  # numbers of a tensor that are compared at a time

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

    Construction reads only the headers, and compares them with the index. `metadata` are those of
    a GGUF file.
    """

    metadata: Mapping[str, Any] = {}

    def __init__(self, directory: Path, only: str = "") -> None:
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        self.listing, files, shard_of = listed(directory, only)
        if not files:
            others = []
            for path in sorted(directory.glob("*")):
                if path.name.endswith(OTHER_WEIGHTS):
                    others.append(path.name)
            if others:
                raise ConfigError(
                    f"{directory} has weights only in {', '.join(others)}, and only safetensors are"
                    " read: a pickle runs code that lies in it. Convert them once, in an"
                    " environment you trust: from_pretrained of transformers, then save_pretrained."
                )
            raise ConfigError(f"{directory} has no weights: no {self.listing}.")
        if len(files) > 1 and not shard_of:
            raise ConfigError(
                f"{directory} has several files of weights ({', '.join(files)}) and no {INDEX}: add"
                " the index."
            )
        stored = set()
        for shard in files:
            with _opened(directory / shard) as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    tensor = file.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    self.entries[name] = Entry(shard, shape, str(tensor.get_dtype()))
                    stored.add((name, shard))
        if shard_of:
            indexed = {*shard_of.items()}
            problems = [f"{name} in {file}: not in the index" for name, file in stored - indexed]
            problems += [f"{name} in {file}: not in the file" for name, file in indexed - stored]
            if problems:
                raise ConfigError(
                    f"{directory / INDEX} does not match its files; download all again from one"
                    f" source:\n  {first_of(sorted(problems))}"
                )

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor in the dtype of its file, or consecutive rows of its first axis."""
        return self.read_entry(name, self.entries[name], rows, DTYPES)

    def are_equal(self, a: str, b: str) -> bool:
        """Return whether two tensors are equal; a piece of each is in memory at a time."""
        shape = self.entries[a].shape
        if shape != self.entries[b].shape:
            return False
        if not shape:
            return np.array_equal(self.read(a), self.read(b))
        step = max(1, PIECE // max(1, math.prod(shape[1:])))
        for at in range(0, shape[0], step):
            rows = slice(at, at + step)
            if not np.array_equal(self.read(a, rows), self.read(b, rows)):
                return False
        return True

    def read_entry(
        self, name: str, entry: Entry, rows: slice, dtypes: Mapping[str, np.dtype]
    ) -> np.ndarray:
        """Return what `read` does, of a tensor whose dtype is one of these."""
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


def listed(directory: Path, only: str = "") -> tuple[str, list[str], dict[str, str]]:
    """Return the file that lists the tensors of a model, its files of weights, and the shard of
    each tensor if that is an index."""
    index = directory / INDEX
    files = sorted(path.name for path in directory.glob(only or "*.safetensors"))
    if SINGLE in files:
        files = [SINGLE]
    elif not only and index.is_file():
        shard_of = _read_index(index)
        return INDEX, sorted({*shard_of.values()}), shard_of
    if len(files) == 1:
        return files[0], files, {}
    return only or SINGLE, files, {}


def copied_model(directory: Path, only: str = "") -> Path:
    """Return the directory in which a model is read: a local one as it is; of one at a URL the
    copies on this machine of its JSON files and of its weights, or of the file `only` of these."""
    store = store_of(directory)
    copy = store.local_folder(matching("*.json"))
    is_weight = matching(only or "*.safetensors")
    if not only and store_of(directory / SINGLE).version():
        is_weight = matching(SINGLE)
    elif not only and (copy / INDEX).is_file():
        is_weight = {*_read_index(copy / INDEX).values()}.__contains__
    return store.local_folder(is_weight)


def has_tensors(directory: Path) -> bool:
    """Return whether the files of weights of a model directory are there, and not only their
    index."""
    _, files, _ = listed(directory)
    return bool(files) and all((directory / file).is_file() for file in files)


def _read_index(path: Path) -> dict[str, str]:
    """Return the shard of each tensor."""
    shard_of = read_object(path, "download it again").get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(f, str) for f in shard_of.values()):
        raise ConfigError(
            f"{path} has no weight_map from tensor names to file names: download it again."
        )
    for shard in shard_of.values():
        if not SHARD_NAME.fullmatch(shard):
            raise ConfigError(
                f"{path} places tensors elsewhere than in a *.safetensors beside it: {shard!r}."
            )
    return shard_of


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """Yield a file of the safetensors library, whose errors become ConfigErrors."""
    resolved_file(path, "download it again")  # the library would wait for a pipe
    try:
        with safe_open(path, "numpy", backend="pread") as file:
            yield file
    except SafetensorError as error:
        # Of a download that stopped the library says only that the header or the length is wrong.
        raise ConfigError(
            f"{path}, of {path.stat().st_size:,} bytes, is not a valid safetensors file ({error})."
            " Download or save it again, or run `git lfs pull` where git has left a pointer."
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path} cannot be read: {reason}. Download it again.") from None


def write_tensors(
    directory: Path, shapes: TensorShapes, tensor: Callable[[str], np.ndarray], shard_bytes: int
) -> list[Path]:
    """Write tensors to one file, or to shards of at most `shard_bytes` of data and an index, as
    transformers names and fills them. Return the paths of the files.

    `tensor` is called once for each name; its result is cast. The tensors of one shard are in
    memory at a time. A model that is already in the directory stays unchanged until all files are
    on the disk, and is then removed.
    """
    # Not needed to read; importing it takes as long as a small model.
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda entry: math.prod(entry[0]) * entry[1].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for killed in directory.glob(f"{DRAFTS}*"):
            shutil.rmtree(killed)
        # In the directory: only names on one file system can be replaced.
        with tempfile.TemporaryDirectory(
            prefix=DRAFTS, dir=directory, ignore_cleanup_errors=True
        ) as place:
            drafts = Path(place)
            for file, names in split.filename_to_tensors.items():
                tensors = {name: as_stored(name, tensor(name), shapes[name][1]) for name in names}
                # Of the mode that a new file has here, which safetensors does not give it.
                (drafts / file).touch()
                mode = (drafts / file).stat().st_mode
                # Without the metadata transformers refuses a file.
                save_file(tensors, drafts / file, {"format": "pt"})
                (drafts / file).chmod(mode)
                del tensors  # before the next ones are made
            if split.is_sharded:
                index = {
                    "metadata": split.metadata,
                    "weight_map": dict(sorted(split.tensor_to_filename.items())),
                }
                (drafts / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
            written = sorted(path.name for path in drafts.iterdir())  # the index is the last
            sync(*(drafts / file for file in written))
            if split.is_sharded:
                (directory / INDEX).unlink(missing_ok=True)  # never an old index beside new shards
            for file in written:
                os.replace(drafts / file, directory / file)
            for path in directory.iterdir():
                if path.name not in written and WRITTEN.fullmatch(path.name):
                    path.unlink()
            sync(directory)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error  # of an OSError
        raise ConfigError(
            f"weights cannot be written to {directory}: {reason}. Make room, or choose another"
            " directory."
        ) from error
    return [directory / file for file in written]


def as_stored(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a tensor contiguous and in the dtype of its file. ConfigError for a finite value that
    the dtype cannot express."""
    try:
        with np.errstate(over="raise"):
            return value.astype(dtype, order="C", copy=False)
    except FloatingPointError:
        raise ConfigError(
            f"{name} has values beyond the range of {dtype}: save it as bfloat16 or float32."
        ) from None


# Weights packed as MXFP4, as in the checkpoints of gpt-oss (OCP Microscaling Formats 1.0).
#
# A tensor `NAME` of experts, [E, in, out], is two in the files. `NAME_blocks` uint8 [E, out, G,
# 16] has the numbers of G blocks of 32 inputs, two in a byte, the lower four bits first;
# `NAME_scales` uint8 [E, out, G] has the exponent of each block, plus 127. A number of four bits
# is a sign and one of the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6, so that bfloat16 has the product
# exactly.

BLOCKS = "_blocks"
SCALES = "_scales"
BLOCK_BYTES = 16
PACKED_DTYPES = {"U8": np.dtype("u1")}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
# The two numbers of a byte, times 2, and 2^(scale - 128): no power of a scale is beyond float32.
PAIRS = 2 * FP4_VALUES[np.arange(256)[:, None] >> np.array([0, 4]) & 15]
POWERS = np.exp2(np.arange(256, dtype=np.float32) - 128)


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return bfloat16 [E, in, out], from uint8 blocks [E, out, G, 16] and scales [E, out, G]."""
    experts, outputs, groups, _ = blocks.shape
    numbers = PAIRS[blocks].reshape(experts, outputs, groups, 2 * BLOCK_BYTES)
    with np.errstate(over="ignore"):
        numbers *= POWERS[scales][..., None]
    return numbers.reshape(experts, outputs, -1).swapaxes(1, 2).astype(ml_dtypes.bfloat16)


class Mxfp4Files(TensorFiles):
    """The tensors of a model directory, those packed as MXFP4 as the bfloat16 tensors that they
    stand for. A read unpacks the rows that are asked for, so that as many experts are in memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.packed: dict[str, tuple[Entry, Entry]] = {}  # blocks and scales
        problems: list[str] = []
        for name in [*self.entries]:
            if not name.endswith(BLOCKS):
                continue
            stem = name.removesuffix(BLOCKS)
            blocks = self.entries.pop(name)
            scales = self.entries.pop(stem + SCALES, None)
            if scales is None:
                problems.append(f"{name} without {stem}{SCALES}")
            elif (
                {blocks.dtype, scales.dtype} == {*PACKED_DTYPES}
                and len(blocks.shape) == 4
                and blocks.shape == (*scales.shape, BLOCK_BYTES)
            ):
                self.packed[stem] = blocks, scales
                experts, outputs, groups, _ = blocks.shape
                shape = (experts, 2 * BLOCK_BYTES * groups, outputs)
                self.entries[stem] = Entry(blocks.file, shape, "BF16")
            else:
                problems.append(
                    f"{name}: {blocks.dtype} {list(blocks.shape)} with scales {scales.dtype}"
                    f" {list(scales.shape)}"
                )
        if problems:
            raise ConfigError(
                f"the packed tensors of {directory} are not MXFP4, whose blocks are uint8 [experts,"
                f" out, groups, {BLOCK_BYTES}] (32 numbers each) with scales uint8 [experts, out,"
                f" groups]:\n  {first_of(problems)}"
            )

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        if name not in self.packed:
            return super().read(name, rows)
        blocks, scales = self.packed[name]
        return unpacked(
            self.read_entry(name + BLOCKS, blocks, rows, PACKED_DTYPES),
            self.read_entry(name + SCALES, scales, rows, PACKED_DTYPES),
        )
