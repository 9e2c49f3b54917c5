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
        shutil.rmtree(directory / DRAFTS, ignore_errors=True)  # of a save that was killed
        (directory / DRAFTS).mkdir(parents=True)
        for file, target in targets.items():
            drafts[file] = _draft_of(directory, file, target)
            drafts[file].parent.mkdir(parents=True, exist_ok=True)
        for file, names in shards.items():
            # Without the metadata transformers refuses a file.
            save_file(_cast(names, shapes, tensor), drafts[file], {"format": "pt"})
        if INDEX in drafts:
            drafts[INDEX].write_text(_index_of(shapes, shards), encoding="utf-8")
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
            (directory / DRAFTS).rmdir()
    return [directory / file for file in sorted(files)]


def _targets(directory: Path, files: list[str]) -> dict[str, Path]:
    """Where each file is written: where a link of its name leads, else in the directory. Raises
    ConfigError where a name that is written or removed is that of something else."""
    advice = "move it away, or choose another directory"
    drafts = directory / DRAFTS
    for path in directory.iterdir() if directory.is_dir() else ():
        if WRITTEN.fullmatch(path.name):
            place_of(path, advice)
    if drafts.is_symlink() or (drafts.exists() and not drafts.is_dir()):
        raise ConfigError(f"{drafts} is not of a save that was stopped: {advice}.")
    if drafts.is_dir() and any(not WRITTEN.fullmatch(path.name) for path in drafts.iterdir()):
        raise ConfigError(f"{drafts} holds files that are not of a save: {advice}.")
    return {file: place_of(directory / file, advice) for file in files}


def _draft_of(directory: Path, file: str, target: Path) -> Path:
    """Where a file is written first: in the directory of drafts, or beside its target where a link
    leads to that, since only names on one file system can be replaced."""
    if target == directory / file:
        return directory / DRAFTS / file
    return target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")


def _shards(shapes: TensorShapes, limit: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, filled in order, which is that of the calls."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
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
        try:
            with np.errstate(over="raise"):
                tensors[name] = value.astype(dtype, order="C", copy=False)
        except FloatingPointError:
            raise ConfigError(
                f"{name} has values beyond the range of {dtype}: save it as bfloat16 or float32."
            ) from None
    return tensors


def _index_of(shapes: TensorShapes, shards: dict[str, list[str]]) -> str:
    shard_of = {name: file for file, names in shards.items() for name in names}
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    return json.dumps(index, indent=2)


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
