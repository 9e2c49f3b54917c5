"""Checkpoints by Orbax: saved on a thread, checked before an array is read, never silently replaced
by a fresh start.

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

from jaxformer.settings import ConfigError, Log

# What TensorStore says of files that are cut short, altered or gone.
DAMAGE = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "INVALID_ARGUMENT")
TRUNCATED = (  # in what it says, under another status, of a chunk that cannot be decoded
    "compressed stream"
)


def flat_leaves(tree: Any) -> dict[str, Any]:
    """`{"params.blocks.attention.q": leaf, ...}`: names that survive any change of the
    containers."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def manifest_of(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


class Checkpoints:
    """The checkpoints of one run directory, in `run_dir/checkpoints/<step>`. As a context manager,
    leaving waits for the last save.

    `every` is the number of steps between two saves of `fit` (0: at the end and on a signal alone);
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
        """Waits until what was saved is on disk."""
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: Any, step: int) -> None:
        """Copies the state off the devices and returns; a thread writes it. A step already saved is
        left as it is."""
        if step in self._manager.all_steps():
            return
        leaves = flat_leaves(state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(leaves), manifest=ocp.args.JsonSave(manifest_of(leaves))
            ),
        )

    def newest(self, state: Any, log: Log = warnings.warn) -> Any:
        """The newest checkpoint that can be read and is beyond `state.step`, placed as `state` is;
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

        A checkpoint that is proven to be damaged is set aside under a name that says why, once one
        before it was read; none is ever deleted. Raises ConfigError if a checkpoint is of another
        model or optimizer, if every one of them is damaged, or if one cannot be read for another
        reason.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                leaves = read_checkpoint(self.folder, step, flat_leaves(target))
            except Damaged as error:
                damaged[step] = str(error)
                log(
                    f"WARNING: the checkpoint of step {step} cannot be read; trying the one before"
                    f" it.\n  {error}"
                )
                continue
            self._set_aside(damaged, log)
            return jax.tree.unflatten(jax.tree.structure(target), leaves.values())
        if damaged:
            lines = "\n".join(f"  {line}" for line in damaged.values())
            raise ConfigError(
                "no checkpoint of this run can be read; nothing was overwritten:\n" + lines
            )
        return None

    def _set_aside(self, damaged: Mapping[int, str], log: Log) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again and nothing is
        lost."""
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
    """What a checkpoint holds is not what was written; the message says where and why."""


def read_checkpoint(
    folder: Path, step: int, wanted: dict[str, Any], whole: bool = True
) -> dict[str, jax.Array]:
    """The leaves of `wanted` from the checkpoint of `step`, after its manifest was held against
    them.

    Raises Damaged where the files are proven to be torn: twice in a row their content is not what a
    checkpoint has. Raises ConfigError if it is of another model, or cannot be read for another
    reason (memory, rights, a file system that fails), which says nothing about the checkpoint.
    """
    place = folder / str(step)
    try:
        return _read(place, wanted, whole)
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds
        if not _shows_damage(error):
            raise _unreadable(place, error) from error
    try:
        return _read(place, wanted, whole)
    except Exception as error:
        if _shows_damage(error):
            raise Damaged(f"{place}: {_in_short(error)}") from error
        raise _unreadable(place, error) from error


def _unreadable(place: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the checkpoint {place} cannot be read ({_in_short(error)}), and that does not show that"
        " it is damaged; nothing was changed. Free memory, or see to the file system and its"
        " rights, and run the same command again. To go on from an earlier step instead, move"
        f" {place} elsewhere."
    )


def _read(place: Path, wanted: dict[str, Any], whole: bool) -> dict[str, jax.Array]:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        saved = reader.restore(place, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))[
            "manifest"
        ]
        _compare(place, saved, manifest_of(wanted), whole)
        args = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=not whole,
        )
        leaves = reader.restore(place, args=ocp.args.Composite(state=args))["state"]
    return {path: leaves[path] for path in wanted}


def _shows_damage(error: BaseException) -> bool:
    """Whether an error, or one behind it, says that a file of a checkpoint is missing, cut short or
    altered."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(one, (MemoryError, PermissionError)) for one in chain):
        return False
    if any(
        isinstance(one, (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError))
        for one in chain
    ):
        return True
    # TensorStore raises ValueError with its status first.
    told = [str(one) for one in chain if isinstance(one, ValueError)]
    return any(text.startswith(DAMAGE) or TRUNCATED in text for text in told)


def _in_short(error: Exception) -> str:
    said = (
        error.__cause__ or error
    )  # TensorStore's own words, where Orbax puts a long error around them
    return f"{type(said).__name__}: {' '.join(str(said).split())[:200]}"


def _compare(place: Path, saved: dict[str, Any], wanted: dict[str, Any], whole: bool) -> None:
    problems = [f"{path}: not in the checkpoint" for path in wanted if path not in saved]
    problems += [
        f"{path}: only in the checkpoint" for path in saved if whole and path not in wanted
    ]
    problems += [
        f"{path}: {saved[path][1]}{saved[path][0]} in the checkpoint,"
        f" {wanted[path][1]}{wanted[path][0]} in the model"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]
    if problems:
        shown = "\n  ".join(
            [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
        )
        raise ConfigError(
            f"the checkpoint {place} is of another model or optimizer; nothing was changed:\n "
            f" {shown}"
        )


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the finished checkpoints in a run directory, ascending; unfinished ones carry
    another name."""
    return sorted(
        int(entry.name)
        for entry in (run_dir / "checkpoints").glob("*")
        if entry.is_dir() and entry.name.isdigit()
    )
