"""Reads checkpoints, and verifies what they hold before anything uses it.

The manifest of a checkpoint lists the path, shape, dtype and digest of every array, the run that
saved it, and the versions of the packages that did. Beside it are the digests of the bytes of all
these files.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformer.arrays.params import dotted
from jaxformer.checkpoints.buckets import MARKER, orbax_path, steps_among
from jaxformer.checkpoints.digests import (
    Altered,
    altered_files,
    as_texts,
    checksum,
    digest_on_host,
    digests,
    is_missing,
)
from jaxformer.cluster.processes import together
from jaxformer.files import ConfigError, first_of, store_of

MANIFEST_FORMAT = 3  # of the manifest; checkpoints of others are refused
READ_BACK_BYTES = 256 * 2**20  # bytes of a checkpoint that `read_back` reads at most

TargetT = TypeVar("TargetT")
TargetLeaf: TypeAlias = jax.Array | jax.ShapeDtypeStruct  # shape, dtype and sharding of a leaf


class Manifest(TypedDict):
    """The manifest of a checkpoint; `leaves` has [shape, dtype, digest] of each array, by path."""

    format: int
    run: dict[str, Any]
    versions: dict[str, str]
    leaves: dict[str, list[Any]]


class Damaged(Exception):
    """A checkpoint does not hold what was written; the message says where and why."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, jaxformer, JAX and Orbax, and the devices, as a checkpoint
    records them; empty for a package that is not installed, as jaxformer in a checkout."""

    def version_of(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return ""

    # Other versions and devices add up in another order: `verify` compares to the bit only where
    # all of these are the same.
    names = ("jaxformer", "jax", "jaxlib", "orbax-checkpoint")
    device = jax.devices()[0]
    machine = [str(jax.device_count()), device.device_kind, os.environ.get("XLA_FLAGS", "")]
    if device.platform == "cpu":
        # Sums are made as the vectors of a model of CPU ask for.
        cpu = Path("/proc/cpuinfo")
        text = cpu.read_text(encoding="utf-8") if cpu.is_file() else ""
        machine += [str(os.cpu_count()), *re.findall("^model name\t*: (.*)$", text, re.M)[:1]]
    packages = {name: version_of(name) for name in names}
    return {"python": platform.python_version(), "devices": " ".join(machine)} | packages


def flat_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return `{"params.blocks.attention.q": leaf, ...}`, but for the paths `without`: names that do
    not depend on the containers."""
    leaves = {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)}
    for path in without:
        leaves.pop(path, None)
    return leaves


def shapes_of(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


def manifest_of(leaves: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a state, with the digests of its arrays; `run` identifies the run that
    saves it."""
    texts = as_texts(digests(leaves))
    table = {path: [*row, texts[path]] for path, row in shapes_of(leaves).items()}
    manifest = {
        "format": MANIFEST_FORMAT,
        "run": dict(run),
        "versions": versions(),
        "leaves": table,
    }
    return manifest | {"sha256": checksum(manifest)}


def read_checkpoint(
    folder: Path,
    step: int,
    targets: Mapping[str, TargetLeaf],
    exact: bool = True,
    *,
    run: Mapping[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """Read leaves from the checkpoint of `step`, after a comparison with its manifest, and
    verifies them by their digests.

    `targets` gives the shape, dtype and sharding of each leaf, by its dotted path; with `exact` the
    checkpoint may hold nothing else. `run` identifies the run that should have saved it. Raises
    Damaged where two attempts show that files are truncated, altered or missing. Raises ConfigError
    if the checkpoint is of another run or model, or cannot be read for another reason (memory,
    permissions, a failing file system), which says nothing about the checkpoint.
    """
    checkpoint = folder / str(step)
    read = functools.partial(_read_files, checkpoint, targets, exact, run or {})
    alone = all(leaf.sharding.is_fully_addressable for leaf in targets.values())
    share = jax.process_index(), jax.process_count()
    # A read that failed by chance, as over a network, succeeds the second time; damage does not go.
    for _ in range(2):
        try:
            # One process may find damage where another finds none.
            if alone:
                leaves, manifest = read()
            else:
                leaves, manifest = together(lambda: read(share), Altered)
            _require_digests(manifest, as_texts(digests(leaves)))
            return leaves
        except Altered as error:
            cause = error
    raise Damaged(f"{checkpoint}: {in_short(cause)}") from cause


def read_state(
    folder: Path,
    step: int,
    target: TargetT,
    *,
    run: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> TargetT:
    """Read a pytree from the checkpoint of `step`, with the shapes, dtypes and shardings of
    `target`. The leaves at the paths `without` are those of `target`. Raises what `read_checkpoint`
    does."""
    read = read_checkpoint(folder, step, flat_leaves(target, without=without), run=run)
    leaves = flat_leaves(target) | read
    return jax.tree.unflatten(jax.tree.structure(target), leaves.values())  # type: ignore[no-any-return]


def saved_shapes(folder: Path, step: int) -> dict[str, list[Any]]:
    """Return [shape, dtype, digest] of each leaf in the checkpoint of `step`, by its dotted path.
    Raises Damaged and ConfigError as `read_checkpoint` does."""
    checkpoint = folder / str(step)
    try:
        with _explained(checkpoint):
            return read_manifest(checkpoint)["leaves"]
    except Altered as error:
        raise Damaged(f"{checkpoint}: {in_short(error)}") from error


def _read_files(
    checkpoint: Path,
    targets: Mapping[str, TargetLeaf],
    exact: bool,
    run: Mapping[str, Any],
    share: tuple[int, int] = (0, 1),
) -> tuple[dict[str, jax.Array], Manifest]:
    """Return the leaves, of which each process holds what its devices do, and the manifest. Raises
    Altered for any damage.

    With `exact`, the bytes of the files are compared too; `share` is the index of this process and
    the number of processes that divide this work.
    """
    for entry in checkpoint.rglob("*"):
        if entry.is_fifo() or entry.is_char_device():  # TensorStore would wait for it
            raise Altered(f"{entry.name} is no regular file")
    kinds = ocp.checkpoint_utils.construct_restore_args(targets)
    with _explained(checkpoint):
        manifest = read_manifest(checkpoint)
        # Compared before anything is read: that takes no memory, and names every difference.
        saved = manifest["leaves"]
        problems = []
        for path, (shape, dtype) in shapes_of(targets).items():
            row = saved.get(path)
            if row is None:
                problems.append(f"{path}: not in the checkpoint")
            elif row[:2] != [shape, dtype]:
                problems.append(
                    f"{path}: {row[1]}{row[0]} in the checkpoint, {dtype}{shape} in the model"
                )
        for path in saved:
            if exact and path not in targets:
                problems.append(f"{path}: only in the checkpoint")
        if problems:
            raise ConfigError(
                f"the checkpoint {checkpoint} is of another model or optimizer; nothing was"
                f" changed:\n  {first_of(problems)}"
            )
        differences = []
        for name, entry in manifest["run"].items():
            if run.get(name, entry) != entry:
                differences.append(f"{name}: {entry} in the checkpoint, {run[name]} here")
        if differences:
            lines = "\n  ".join(differences)
            raise ConfigError(
                f"the checkpoint {checkpoint} is of another run; nothing was changed:\n  {lines}\n"
                "Move it back to its own run directory; train continues from what remains."
            )
        if exact:
            try:
                altered = altered_files(checkpoint, *share)
            except ConfigError as error:  # of a bucket that does not give a file
                raise failure_of(checkpoint, error) from error
            if altered:
                raise Altered(f"files are not as they were saved: {first_of(altered, 5, ', ')}")
        leaves = _restored(checkpoint, targets, kinds, not exact)
        return {path: leaves[path] for path in targets}, manifest


@contextlib.contextmanager
def _explained(checkpoint: Path) -> Iterator[None]:
    """Raise the errors of a read as `failure_of` says them."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise failure_of(checkpoint, error) from error


def failure_of(checkpoint: Path, error: Exception) -> Altered | ConfigError:
    """Return the error of a read in one sentence: Altered where the digests of its files show that
    the checkpoint is damaged, else ConfigError."""
    if isinstance(error, Altered):
        return error
    try:
        if altered := altered_files(checkpoint):
            listed = first_of(altered, 5, ", ")
            return Altered(f"{in_short(error)}; files are not as they were saved: {listed}")
    except Altered as problem:  # of the digests
        return problem
    except (OSError, ConfigError):  # a file exists and cannot be read
        pass
    return ConfigError(
        f"the checkpoint {checkpoint} cannot be read ({in_short(error)}), and that does not show"
        " that it is damaged; nothing was changed. Check memory, file system and permissions,"
        " and run the same command again. To continue from an earlier step, move"
        f" {checkpoint} elsewhere."
    )


def in_short(error: BaseException) -> str:
    """Return the message of an error in one line; the reason of those of TensorStore is at their
    end."""
    cause = error.__cause__ or error  # Orbax puts a long message around that of TensorStore
    name = "" if isinstance(cause, Altered) else f"{type(cause).__name__}: "
    # TensorStore repeats its whole specification, which is pages.
    text = " ".join(str(cause).split()).partition(" [tensorstore_spec")[0]
    if len(text) > 300:
        text = f"{text[:100]} ... {text[-200:]}"
    return name + text


def _restored(checkpoint: Path, targets: Any, kinds: Any, partial: bool) -> dict[str, Any]:
    """Return the leaves of `targets`, each restored as `kinds` says, without waiting for the other
    processes of a run. With `partial` the checkpoint may hold others."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )
    composite = ocp.CompositeOptions(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=composite)
    state = ocp.args.PyTreeRestore(targets, restore_args=kinds, partial_restore=partial)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        restored = reader.restore(orbax_path(checkpoint), args=ocp.args.Composite(state=state))
    return restored["state"]  # type: ignore[no-any-return]


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, which Orbax has written as JSON.

    Raises Altered where it is not what was written, and ConfigError for another format.
    """
    file = checkpoint / "manifest/metadata"
    if file.exists() and is_missing(file):
        raise Altered("metadata is no regular file")
    saved = json.loads(file.read_bytes())
    if not isinstance(saved, dict) or saved.pop("sha256", "") != checksum(saved):
        raise Altered("the manifest is not what was saved")
    number = saved["format"]
    if number != MANIFEST_FORMAT:
        raise ConfigError(
            f"the checkpoint {checkpoint} has a manifest of format {number}, and this"
            f" jaxformer reads format {MANIFEST_FORMAT}; nothing was changed. Continue the run with"
            " the jaxformer that began it, or begin a new one in another run directory."
        )
    return cast(Manifest, saved)


def _require_digests(manifest: Manifest, sums: Mapping[str, str]) -> None:
    wrong = [path for path, digest in sums.items() if manifest["leaves"][path][2] != digest]
    if wrong:
        listed = first_of(wrong, 5, ", ")
        raise Altered(f"the values of {listed} are not those that were saved (digests differ)")


def read_back(checkpoint: Path) -> None:
    """Read a checkpoint that was just saved back into the memory of this process, the smallest
    arrays first and up to READ_BACK_BYTES bytes, and verifies them. Raises Altered, or what Orbax
    raises."""
    manifest = read_manifest(checkpoint)
    shapes = dict[str, jax.ShapeDtypeStruct]()
    for path, (size, dtype, _) in manifest["leaves"].items():
        if not dtype.startswith("key<"):
            shapes[path] = jax.ShapeDtypeStruct(size, np.dtype(dtype))
    budget = READ_BACK_BYTES
    targets = {}
    # Small arrays first: the most paths within the bound.
    for path, shape in sorted(shapes.items(), key=lambda entry: math.prod(entry[1].shape)):
        budget -= math.prod(shape.shape) * shape.dtype.itemsize
        if budget >= 0:
            targets[path] = shape
    kinds = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in targets}
    leaves = _restored(checkpoint, targets, kinds, partial=True)
    _require_digests(manifest, {path: digest_on_host(leaves[path]) for path in targets})


def saved_steps(run_dir: Path) -> list[int]:
    """List the steps of the finished checkpoints in a run directory, ascending. Unfinished ones
    have other names, or, in a bucket, no marker. Raises ConfigError where a bucket cannot be
    listed."""
    folder = run_dir / "checkpoints"
    return sorted(steps_among(store_of(folder).folders(MARKER)))
