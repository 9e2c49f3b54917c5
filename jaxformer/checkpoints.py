"""Checkpoints by Orbax: saved on a thread, and checked before an array is read. A run never starts
anew in silence where they cannot be read.

A checkpoint holds the train state as a flat table (dotted path to array) and a manifest of that
table's paths, shapes and dtypes.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxformer.files import first_of
from jaxformer.params import dotted
from jaxformer.settings import ConfigError, Log

# TensorStore's status for files that are truncated, altered or missing, and a part of its message,
# under another status, for a chunk that cannot be decoded.
DAMAGE = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "INVALID_ARGUMENT")
UNDECODABLE = "compressed stream"


def flat_leaves(tree: Any) -> dict[str, Any]:
    """`{"params.blocks.attention.q": leaf, ...}`: names that do not depend on the containers."""
    return {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def manifest_of(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


class Checkpoints:
    """The checkpoints of one run directory, in `run_dir/checkpoints/<step>`. A context manager that
    waits for the last save at its end.

    `every` is the number of steps between two saves of `fit` (0: only at the end and on a signal);
    the newest `keep` are kept.
    """

    def __init__(self, run_dir: str | Path, keep: int = 2, every: int = 0) -> None:
        self.directory = Path(run_dir)
        self.folder = self.directory.absolute() / "checkpoints"
        self.every = every
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, create=True
        )
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be written ({error.strerror}): choose another directory."
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def wait(self) -> None:
        """Waits until all saves are on the disk."""
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: Any, step: int) -> None:
        """Copies the state to the host and returns; a thread writes it. A step that is already
        saved is not written again."""
        if step in self._manager.all_steps():
            return
        leaves = flat_leaves(state)
        manifest = ocp.args.JsonSave(manifest_of(leaves))
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), manifest=manifest)
        self._manager.save(step, args=args)

    def newest(self, state: Any, log: Log = warnings.warn) -> Any:
        """The newest checkpoint that can be read, placed as `state` is, if it is of a later step;
        else `state` itself.

        The arrays of `state` are freed before those of the checkpoint are read. Raises ConfigError
        as `restore` does.
        """
        if not self.steps() or self.steps()[-1] <= int(state.step):
            return state
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        jax.tree.map(lambda leaf: leaf.delete(), state)
        return self.restore(target, log)

    def restore(self, target: Any, log: Log) -> Any | None:
        """The newest checkpoint that can be read, placed as `target` says; None if there are none.

        Damaged checkpoints are renamed, with a file that says why, once an earlier one was read;
        none is deleted. Raises ConfigError if a checkpoint is of another model or optimizer, if all
        are damaged, or if one cannot be read for another reason.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                leaves = read_checkpoint(self.folder, step, flat_leaves(target))
            except Damaged as error:
                damaged[step] = str(error)
                log(
                    f"WARNING: the checkpoint of step {step} cannot be read; trying an earlier one."
                    f"\n  {error}"
                )
                continue
            self._set_aside(damaged, log)
            return jax.tree.unflatten(jax.tree.structure(target), leaves.values())
        if damaged:
            lines = "\n  ".join(damaged.values())
            raise ConfigError(
                f"no checkpoint of this run can be read; nothing was overwritten:\n  {lines}"
            )
        return None

    def _set_aside(self, damaged: Mapping[int, str], log: Log) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again."""
        if not damaged or jax.process_index() > 0:
            return
        for step in damaged:
            place, number = self.folder / f"damaged-{step}", 1
            while place.exists():
                number += 1
                place = self.folder / f"damaged-{step}-{number}"
            (self.folder / str(step)).rename(place)
            (place / "damage.txt").write_text(damaged[step] + "\n", encoding="utf-8")
            log(
                f"The checkpoint of step {step} was set aside as {place}; nothing in it was"
                " changed."
            )
        self._manager.reload()


class Damaged(Exception):
    """A checkpoint does not hold what was written; the message says where and why."""


def read_checkpoint(
    folder: Path, step: int, wanted: dict[str, Any], whole: bool = True
) -> dict[str, jax.Array]:
    """The leaves of `wanted` from the checkpoint of `step`, after a comparison with its manifest.

    Raises Damaged where two attempts show that its files are truncated, altered or missing. Raises
    ConfigError if it is of another model, or cannot be read for another reason (memory,
    permissions, a failing file system), which says nothing about the checkpoint.
    """
    place = folder / str(step)
    for _ in range(2):
        try:
            return _read(place, wanted, whole)
        except ConfigError:
            raise
        except Exception as error:  # Orbax and TensorStore raise many kinds
            cause = error
            if not _shows_damage(error):
                raise ConfigError(
                    f"the checkpoint {place} cannot be read ({_in_short(error)}), and that does not"
                    " show that it is damaged; nothing was changed. Check memory, file system and"
                    " permissions, and run the same command again. To continue from an earlier"
                    f" step, move {place} elsewhere."
                ) from error
    raise Damaged(f"{place}: {_in_short(cause)}") from cause


def _read(place: Path, wanted: dict[str, Any], whole: bool) -> dict[str, jax.Array]:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        only_manifest = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        saved = reader.restore(place, args=only_manifest)["manifest"]
        _compare(place, saved, manifest_of(wanted), whole)
        args = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=not whole,
        )
        leaves = reader.restore(place, args=ocp.args.Composite(state=args))["state"]
    return {path: leaves[path] for path in wanted}


def _shows_damage(error: BaseException) -> bool:
    """Whether an error, or one of its causes, says that a file of a checkpoint is missing,
    truncated or altered."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(one, (MemoryError, PermissionError)) for one in chain):
        return False
    missing = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError)
    if any(isinstance(one, missing) for one in chain):
        return True
    # TensorStore raises ValueError, and its message begins with the status.
    messages = [str(one) for one in chain if isinstance(one, ValueError)]
    return any(text.startswith(DAMAGE) or UNDECODABLE in text for text in messages)


def _in_short(error: Exception) -> str:
    cause = error.__cause__ or error  # Orbax puts a long message around that of TensorStore
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"


def _compare(place: Path, saved: dict[str, Any], wanted: dict[str, Any], whole: bool) -> None:
    """ConfigError where a manifest is not that of the leaves that are wanted."""
    problems = [f"{path}: not in the checkpoint" for path in wanted if path not in saved]
    if whole:
        problems += [f"{path}: only in the checkpoint" for path in saved if path not in wanted]
    for path, here in wanted.items():
        there = saved.get(path, here)
        if there != here:
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
