"""What the files of a checkpoint hold, verified before anything uses it.

Its manifest lists the path, shape, dtype and digest of every array, the run that saved it, and the
versions of the packages that did. Beside it are the digests of the bytes of all these files.
"""

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformer.arrays.params import dotted
from jaxformer.checkpoints.digests import (
    FILES,
    Altered,
    altered_files,
    as_text,
    digest_on_host,
    digests,
)
from jaxformer.checkpoints.faults import failure_of, in_short, quiet_reads
from jaxformer.checkpoints.versions import versions
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError, first_of

# Of the manifest. Format 1 was the table of shapes and dtypes alone; format 2 had no digests of the
# files beside it.
LATEST = 3
ORBAX = "orbax-checkpoint"  # whose version tells whether its metadata can be read
READ_BACK = 256 * 2**20  # bytes of a checkpoint that `read_back` reads at most


class Damaged(Exception):
    """A checkpoint does not hold what was written; the message says where and why."""


def flat_leaves(tree: Any) -> dict[str, Any]:
    """`{"params.blocks.attention.q": leaf, ...}`: names that do not depend on the containers."""
    return {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def shapes_of(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


def manifest_of(leaves: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a state, with the digests of its arrays; `run` says who saved it."""
    sums = jax.device_get(digests(leaves))
    table = {path: [*row, as_text(sums[path])] for path, row in shapes_of(leaves).items()}
    manifest = {"format": LATEST, "run": dict(run), "versions": versions(), "leaves": table}
    return manifest | {"sha256": _checksum(manifest)}


def _checksum(manifest: Mapping[str, Any]) -> str:
    own = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def read_checkpoint(
    folder: Path,
    step: int,
    wanted: dict[str, Any],
    whole: bool = True,
    *,
    run: Mapping[str, Any] | None = None,
    log: Log = warnings.warn,
) -> dict[str, jax.Array]:
    """The leaves of `wanted` from the checkpoint of `step`, after a comparison with its manifest,
    and verified by their digests. `whole`: the checkpoint may hold nothing else.

    `run` is what identifies the run that should have saved it. Raises Damaged where two attempts
    show that its files are truncated, altered or missing. Raises ConfigError if it is of another
    run or model, or cannot be read for another reason (memory, permissions, a failing file system),
    which says nothing about the checkpoint.
    """
    place = folder / str(step)
    for _ in range(2):
        try:
            with quiet_reads():
                leaves, verified = _read(place, wanted, whole, run or {})
        except ConfigError:
            raise
        except Altered as error:
            cause = error
            continue
        if not verified:
            log(
                f"the checkpoint {place} was saved by an earlier jaxformer, without digests: its"
                " arrays are not verified."
            )
        return leaves
    raise Damaged(f"{place}: {in_short(cause)}") from cause


def _read(
    place: Path, wanted: dict[str, Any], whole: bool, run: Mapping[str, Any]
) -> tuple[dict[str, jax.Array], bool]:
    """The leaves, and whether the manifest has digests of them."""
    read = functools.partial(_read_files, place, wanted, whole, run)
    if all(leaf.sharding.is_fully_addressable for leaf in wanted.values()):
        found, manifest = read()
    else:  # of several processes, one may find damage where another finds none
        from jaxformer.cluster.processes import together

        share = jax.process_index(), jax.process_count()
        found, manifest = together(functools.partial(read, share), Altered)
    if manifest["format"] == 1:
        return found, False
    sums = jax.device_get(digests(found))
    _require_digests(manifest, {path: as_text(digest) for path, digest in sums.items()})
    return found, True


def _read_files(
    place: Path,
    wanted: dict[str, Any],
    whole: bool,
    run: Mapping[str, Any],
    share: tuple[int, int] = (0, 1),
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The leaves as this process's devices hold them, and the manifest. Raises Altered for any
    damage. The bytes of the files are compared too where the whole state is read; `share` are the
    index and number of the processes that do so together."""
    for entry in place.rglob("*"):
        if not entry.is_file() and not entry.is_dir():  # TensorStore would wait for a pipe
            raise Altered(f"{entry.name} is no regular file")
    own = False
    args = ocp.args.PyTreeRestore(
        wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=not whole,
    )
    try:
        with reader_of_one_process() as reader:
            manifest = read_manifest(place, reader)
            _compare(place, manifest["leaves"], shapes_of(wanted), whole)
            _require_run(place, manifest["run"], run)
            if whole and manifest["format"] > 2:
                _require_files(place, share)
            own = manifest["versions"].get(ORBAX) == versions()[ORBAX]
            leaves = reader.restore(place, args=ocp.args.Composite(state=args))["state"]
        return {path: leaves[path] for path in wanted}, manifest
    except ConfigError:
        raise
    except Exception as error:
        problem = failure_of(place, error, own)
    # Raised here, so that nothing holds the error of Orbax: what it left behind can then be thrown
    # away within `quiet_reads`.
    raise problem


def reader_of_one_process() -> ocp.Checkpointer:
    """Reads checkpoints without waiting for the other processes of a run."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )
    composite = ocp.CompositeOptions(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=composite)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read_manifest(place: Path, reader: ocp.Checkpointer) -> dict[str, Any]:
    """The manifest of a checkpoint, of any format in the form of this one.

    Raises Altered where it is not what was written, and ConfigError for that of a newer format.
    """
    args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
    saved = reader.restore(place, args=args)["manifest"]
    if isinstance(saved, dict) and saved and all(isinstance(row, list) for row in saved.values()):
        return {"format": 1, "run": {}, "versions": {}, "leaves": saved}
    if not isinstance(saved, dict) or saved.get("sha256") != _checksum(saved):
        raise Altered("the manifest is not what was saved")
    if saved["format"] not in (2, LATEST):
        raise ConfigError(
            f"the checkpoint {place} was saved by jaxformer {saved['versions']['jaxformer']}, whose"
            f" manifest has format {saved['format']}; this one reads formats 1 to {LATEST}. Upgrade"
            " jaxformer to read it."
        )
    return saved


def _require_digests(manifest: Mapping[str, Any], found: Mapping[str, str]) -> None:
    wrong = [path for path, digest in found.items() if manifest["leaves"][path][2] != digest]
    if wrong:
        listed = first_of(wrong, 5, ", ")
        raise Altered(f"the values of {listed} are not those that were saved (digests differ)")


def _require_files(place: Path, share: tuple[int, int]) -> None:
    altered = altered_files(place, *share)
    if altered is None:
        raise Altered(f"{FILES} is missing")
    if altered:
        raise Altered(f"files are not as they were saved: {first_of(altered, 5, ', ')}")


def read_back(place: Path) -> None:
    """Reads a checkpoint that was just saved into this process's memory, its smallest arrays first
    and up to READ_BACK bytes, and verifies them. Raises Altered, or what Orbax raises."""
    with reader_of_one_process() as reader:
        manifest = read_manifest(place, reader)
        shapes = {
            path: jax.ShapeDtypeStruct(row[0], np.dtype(row[1]))
            for path, row in manifest["leaves"].items()
            if not row[1].startswith("key<")
        }
        left, wanted = READ_BACK, {}
        for path, shape in sorted(shapes.items(), key=lambda entry: math.prod(entry[1].shape)):
            left -= math.prod(shape.shape) * shape.dtype.itemsize
            if left >= 0:
                wanted[path] = shape
        kinds = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in wanted}
        args = ocp.args.PyTreeRestore(wanted, restore_args=kinds, partial_restore=True)
        leaves = reader.restore(place, args=ocp.args.Composite(state=args))["state"]
    _require_digests(manifest, {path: digest_on_host(leaves[path]) for path in wanted})


def _require_run(place: Path, saved: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raises ConfigError where a checkpoint was saved by another run."""
    apart = [
        f"{name}: {saved[name]} in the checkpoint, {run[name]} here"
        for name in saved
        if name in run and saved[name] != run[name]
    ]
    if apart:
        raise ConfigError(
            f"the checkpoint {place} is of another run; nothing was changed:\n  "
            + "\n  ".join(apart)
            + "\nMove it back to its own run directory; train continues from what remains."
        )


def _compare(place: Path, saved: dict[str, Any], wanted: dict[str, Any], whole: bool) -> None:
    """ConfigError where a manifest is not that of the leaves that are wanted."""
    problems = [f"{path}: not in the checkpoint" for path in wanted if path not in saved]
    if whole:
        problems += [f"{path}: only in the checkpoint" for path in saved if path not in wanted]
    for path, here in wanted.items():
        there = saved.get(path, here)
        if there[:2] != here:
            problems.append(
                f"{path}: {there[1]}{there[0]} in the checkpoint, {here[1]}{here[0]} in the model"
            )
    if problems:
        raise ConfigError(
            f"the checkpoint {place} is of another model or optimizer; nothing was changed:\n  "
            + first_of(problems)
        )


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the finished checkpoints in a run directory, ascending; unfinished ones have other
    names."""
    return sorted(
        int(entry.name)
        for entry in (run_dir / "checkpoints").glob("*")
        if entry.is_dir() and entry.name.isascii() and entry.name.isdecimal()
    )
