"""The tensors of a model directory, written as one safetensors file or as shards with an index."""

import contextlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxformer.files import ConfigError, first_of, place_of, sync
from jaxformer.interop.safetensors import DTYPES, INDEX, SINGLE

WRITTEN = re.compile(r"model(-\d{5}-of-\d{5}\.safetensors|\.safetensors(\.index\.json)?)(\.tmp)?")
DRAFTS = "model.tmp"  # a directory within that of the model

TensorShapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


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
    dtypes = [*DTYPES.values()]
    if wrong := [f"{name}: {dtype}" for name, (_, dtype) in shapes.items() if dtype not in dtypes]:
        allowed = ", ".join(map(str, dtypes))
        raise ConfigError(f"weights are saved as {allowed}, not {first_of(wrong, between='; ')}.")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes} must be at least 1.")
    shards = _shards(shapes, shard_bytes)
    files = [*shards, INDEX] if len(shards) > 1 else [*shards]
    folder, drafts = directory / DRAFTS, dict[str, Path]()
    try:
        places = _places(directory, files)
        shutil.rmtree(folder, ignore_errors=True)  # of a save that was killed
        folder.mkdir(parents=True)
        for file, place in places.items():
            linked = place != directory / file  # maybe to another file system
            name = f"{place.name}.{uuid.uuid4().hex}.tmp"
            drafts[file] = place.with_name(name) if linked else folder / file
            drafts[file].parent.mkdir(parents=True, exist_ok=True)
        for file, names in shards.items():
            # Without the metadata transformers refuses a file.
            save_file(_cast(names, shapes, tensor), drafts[file], {"format": "pt"})
        if INDEX in drafts:
            drafts[INDEX].write_text(_index_of(shapes, shards), encoding="utf-8")
        _replace(directory, drafts, places)
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
            folder.rmdir()
    return [directory / file for file in sorted(files)]


def _places(directory: Path, files: list[str]) -> dict[str, Path]:
    """Where each file is written. Raises ConfigError where a name that is written or removed is
    that of something else."""
    advice = "move it away, or choose another directory"
    drafts = directory / DRAFTS
    found = [*directory.iterdir()] if directory.is_dir() else []
    for path in found:
        if WRITTEN.fullmatch(path.name):
            place_of(path, advice)
    if drafts.is_symlink() or (drafts.exists() and not drafts.is_dir()):
        raise ConfigError(f"{drafts} is not of a save that was stopped: {advice}.")
    if drafts.is_dir() and any(not WRITTEN.fullmatch(path.name) for path in drafts.iterdir()):
        raise ConfigError(f"{drafts} holds files that are not of a save: {advice}.")
    return {file: place_of(directory / file, advice) for file in files}


def _shards(shapes: TensorShapes, limit: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, filled in order."""
    groups: list[list[str]] = [[]]
    space = limit
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and size > space:
            groups.append([])
            space = limit
        groups[-1].append(name)
        space -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _cast(
    names: list[str], shapes: TensorShapes, tensor: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors of one shard as they are stored: contiguous, in their dtype."""
    held = {}
    for name in names:
        value, (shape, dtype) = tensor(name), shapes[name]
        if value.shape != shape:
            raise ConfigError(
                f"{name}: the params make it {value.shape}, the config {shape}; give params and"
                " config of the same model."
            )
        try:
            with np.errstate(over="raise"):
                held[name] = value.astype(dtype, order="C", copy=False)
        except FloatingPointError:
            raise ConfigError(
                f"{name} has values beyond the range of {dtype}: save it as bfloat16 or float32."
            ) from None
    return held


def _index_of(shapes: TensorShapes, shards: dict[str, list[str]]) -> str:
    placed = {name: file for file, names in shards.items() for name in names}
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    return json.dumps(index, indent=2)


def _replace(directory: Path, drafts: dict[str, Path], places: dict[str, Path]) -> None:
    """Gives the drafts their names once they are on the disk, and removes an earlier model."""
    sync(*drafts.values())
    if INDEX in places:
        places[INDEX].unlink(missing_ok=True)  # never an old index beside new shards
    for file, draft in drafts.items():
        os.replace(draft, places[file])
    for path in directory.iterdir():
        if path.name not in places and WRITTEN.fullmatch(path.name):
            path.unlink()
    sync(*{place.parent for place in places.values()})
