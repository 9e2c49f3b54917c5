"""Checkpoints by Orbax: saved on a thread, kept by policy, and verified when they are read. A run
never starts anew in silence where they cannot be read.

A checkpoint holds the train state as a flat table (dotted path to array) and a manifest of that
table (`checkpoint_reading`).
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxformer.arrays.params import dotted
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError

# Characters for which Orbax saves files that nobody can read again: it takes the path of a
# checkpoint for a pattern of glob, and TensorStore a backslash for a slash.
UNSAVABLE = "*?[\\"


class NotSaved(RuntimeError):
    """A checkpoint could not be written; those from before are untouched."""


class Checkpoints:
    """The checkpoints of one run directory, in `run_dir/checkpoints/<step>`. A context manager that
    waits for the last save at its end.

    `every` is the number of steps between two saves of `fit` (0: only at the end and on a signal).
    Kept are the newest `keep`, those whose step is a multiple of `keep_every` (0: none), and the
    `keep_best` with the lowest validation loss (0: none); others are deleted once a newer one is
    on the disk. `run` identifies the run: checkpoints that say otherwise are refused. The leaves at
    the dotted paths of `without`, as those below an adapter, are not saved.
    """

    def __init__(
        self,
        run_dir: str | Path,
        keep: int = 2,
        every: int = 0,
        *,
        keep_every: int = 0,
        keep_best: int = 0,
        run: Mapping[str, Any] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self.directory = Path(run_dir)
        self.folder = self.directory.absolute() / "checkpoints"
        self.every = every
        self._run = dict(run or {})
        self._without = frozenset(without)
        self._kept = (keep, keep_every, keep_best)
        self._manager: ocp.CheckpointManager | None = None  # made by the first save
        self._saving: int | None = None
        self._read_back = False
        require_savable(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be written ({error.strerror}): choose another directory."
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.wait()
        except NotSaved:
            if kind is None:  # an error on its way is not replaced
                raise
        finally:
            if self._manager is not None:
                with contextlib.suppress(Exception):  # what `wait` has told
                    self._manager.close()

    def wait(self) -> None:
        """Waits until all saves are on the disk. Raises NotSaved where one failed.

        The first one is read back, as far as `READ_BACK` allows.
        """
        step, self._saving = self._saving, None
        if step is None or self._manager is None:
            return
        from jaxformer.checkpoints.reading import read_back

        place = self.folder / str(step)
        with _told(place):
            self._manager.wait_until_finished()
            if jax.process_index() == 0 and not self._read_back:
                read_back(place)
                self._read_back = True

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        from jaxformer.checkpoints.reading import saved_steps

        return saved_steps(self.directory)

    def save(self, state: Any, step: int, evaluation: Mapping[str, Any] | None = None) -> None:
        """Copies the state to the host and returns; a thread writes it. A step that is already
        saved is not written again.

        `evaluation` are the numbers of an evaluation of this state, if there was one, by which the
        best are kept. Raises NotSaved if the save before this one failed, or this one at once.
        """
        self.wait()
        if step in self.steps():
            return
        if self._manager is None:
            from jaxformer.checkpoints.retention import make_manager

            self._manager = make_manager(self.folder, *self._kept)
        from jaxformer.checkpoints.reading import flat_leaves, manifest_of

        leaves, metrics = flat_leaves(state), None
        leaves = {path: leaf for path, leaf in leaves.items() if path not in self._without}
        if self._kept[2] and "val_loss" in (evaluation or {}):
            metrics = {"val_loss": float(evaluation["val_loss"])}  # type: ignore[index]
        with _told(self.folder / str(step)):
            manifest = ocp.args.JsonSave(manifest_of(leaves, self._run))
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), manifest=manifest)
            self._saving = step
            self._manager.save(step, args=args, metrics=metrics)

    def newest(self, state: Any, log: Log = warnings.warn) -> Any:
        """The newest checkpoint that can be read, placed as `state` is, if it is of a later step;
        else `state` itself.

        The arrays of `state` are freed before those of the checkpoint are read. Raises ConfigError
        as `restore` does.
        """
        if not self.steps() or self.steps()[-1] <= int(state.step):
            return state

        def freed(path: Any, leaf: jax.Array) -> Any:
            if dotted(path) in self._without:
                return leaf
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            leaf.delete()
            return shape

        return self.restore(jax.tree.map_with_path(freed, state), log)

    def restore(self, target: Any, log: Log) -> Any | None:
        """The newest checkpoint that can be read, placed as `target` says; None if there are none.
        The leaves that are not saved are those of `target`.

        Damaged checkpoints are renamed, with a file that says why, once an earlier one was read;
        none is deleted. Raises ConfigError if a checkpoint is of another run, model or optimizer,
        if all are damaged, or if one cannot be read for another reason.
        """
        from jaxformer.checkpoints.faults import set_aside
        from jaxformer.checkpoints.reading import Damaged, flat_leaves, read_checkpoint

        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                given = flat_leaves(target)
                wanted = {path: leaf for path, leaf in given.items() if path not in self._without}
                leaves = read_checkpoint(self.folder, step, wanted, run=self._run, log=log)
            except Damaged as error:
                damaged[step] = str(error)
                log(
                    f"WARNING: the checkpoint of step {step} cannot be read; trying an earlier one."
                    f"\n  {error}"
                )
                continue
            if damaged and jax.process_index() == 0:
                set_aside(self.folder, damaged, log)
                if self._manager is not None:
                    self._manager.reload()
            whole = (given | leaves).values()
            return jax.tree.unflatten(jax.tree.structure(target), whole)
        if damaged:
            lines = "\n  ".join(damaged.values())
            raise ConfigError(
                f"no checkpoint of this run can be read; nothing was overwritten:\n  {lines}"
            )
        return None


def require_savable(folder: Path) -> None:
    """Raises ConfigError for a path below which Orbax saves what cannot be read."""
    if found := [mark for mark in UNSAVABLE if mark in str(folder)]:
        raise ConfigError(
            f"{folder} has {' and '.join(found)} in its path, and checkpoints saved there cannot be"
            " read again: choose a directory without any of *, ?, [ and \\ in its path."
        )


@contextlib.contextmanager
def _told(place: Path) -> Iterator[None]:
    """Errors of a save as NotSaved, in one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds
        from jaxformer.checkpoints.faults import why_not_saved

        reason, advice = why_not_saved(error)
        raise NotSaved(
            f"the checkpoint {place} could not be saved ({reason}). Those from before are"
            f" untouched: {advice}, and the same command continues from the newest."
        ) from error
