"""Checkpoints by Orbax: saved on a thread, kept by policy, and verified when they are read. A run
whose checkpoints cannot be read raises an error and does not start anew.

A checkpoint holds the train state as a flat table (dotted path to array) and a manifest of that
table (see `reading`).
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxformer.arrays.params import dotted
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError

# With these characters in its path a checkpoint is saved but cannot be read: Orbax takes the path
# for a glob pattern, and TensorStore a backslash for a slash.
UNSAVABLE = "*?[\\"


class Stepped(Protocol):
    """A pytree that counts its steps, as the train state does."""

    step: Any


StateT = TypeVar("StateT", bound=Stepped)
TargetT = TypeVar("TargetT")


class NotSaved(RuntimeError):
    """A checkpoint could not be written; those from before are untouched."""


class Checkpoints:
    """The checkpoints of one run directory, in `run_dir/checkpoints/<step>`. A context manager that
    waits for the last save at its end.

    `every` is the number of steps between two saves of `fit` (0: only at the end and on a signal).
    The newest `keep` checkpoints are kept, those whose step is a multiple of `keep_every` (0:
    none), and the `keep_best` with the lowest validation loss (0: none); others are deleted once a
    newer one is on the disk. `run` identifies the run; checkpoints of another run are refused. The
    leaves at the dotted paths of `without`, such as the frozen weights below an adapter, are not
    saved.
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
        self._retention = (keep, keep_every, keep_best)
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
                with contextlib.suppress(Exception):  # which `wait` has raised already
                    self._manager.close()

    def wait(self) -> None:
        """Waits until all saves are on the disk. Raises NotSaved where one failed.

        The first save is read back, up to `READ_BACK` bytes.
        """
        step, self._saving = self._saving, None
        if step is None or self._manager is None:
            return
        from jaxformer.checkpoints.reading import read_back

        checkpoint = self.folder / str(step)
        with _as_not_saved(checkpoint):
            self._manager.wait_until_finished()
            if jax.process_index() == 0 and not self._read_back:
                read_back(checkpoint)
                self._read_back = True

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        from jaxformer.checkpoints.reading import saved_steps

        return saved_steps(self.directory)

    def save(self, state: Any, step: int, evaluation: Mapping[str, Any] | None = None) -> None:
        """Copies the state to the host and returns; a thread writes it. A step that is already
        saved is not written again.

        `evaluation` has the metrics of an evaluation of this state, if there was one; the best
        checkpoints are chosen by its `val_loss`. Raises NotSaved if the previous save failed, or
        this one fails at once.
        """
        self.wait()
        if step in self.steps():
            return
        if self._manager is None:
            from jaxformer.checkpoints.retention import make_manager

            self._manager = make_manager(self.folder, *self._retention)
        from jaxformer.checkpoints.reading import flat_leaves, manifest_of

        leaves, metrics = flat_leaves(state), None
        leaves = {path: leaf for path, leaf in leaves.items() if path not in self._without}
        if self._retention[2] and "val_loss" in (evaluation or {}):
            metrics = {"val_loss": float(evaluation["val_loss"])}  # type: ignore[index]
        with _as_not_saved(self.folder / str(step)):
            manifest = ocp.args.JsonSave(manifest_of(leaves, self._run))
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), manifest=manifest)
            self._saving = step
            self._manager.save(step, args=args, metrics=metrics)

    def newest(self, state: StateT, log: Log = warnings.warn) -> StateT:
        """The newest checkpoint that can be read, with the shardings of `state`, if it is of a
        later step; else `state` itself.

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

        target: StateT = jax.tree.map_with_path(freed, state)
        restored = self.restore(target, log)
        assert restored is not None  # there are checkpoints
        return restored

    def restore(self, target: TargetT, log: Log) -> TargetT | None:
        """The newest checkpoint that can be read, with the shardings of `target`; None if there are
        no checkpoints. The leaves that are not saved are those of `target`.

        Once an earlier one was read, damaged checkpoints are renamed and get a file that says why;
        none is deleted. Raises ConfigError if a checkpoint is of another run, model or optimizer,
        if all are damaged, or if one cannot be read for another reason.
        """
        from jaxformer.checkpoints.faults import set_aside
        from jaxformer.checkpoints.reading import Damaged, flat_leaves, read_checkpoint

        damaged: dict[int, str] = {}
        current = flat_leaves(target)
        saved = {path: leaf for path, leaf in current.items() if path not in self._without}
        for step in reversed(self.steps()):
            try:
                leaves = read_checkpoint(self.folder, step, saved, run=self._run, log=log)
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
            return jax.tree.unflatten(jax.tree.structure(target), (current | leaves).values())
        if damaged:
            lines = "\n  ".join(damaged.values())
            raise ConfigError(
                f"no checkpoint of this run can be read; nothing was overwritten:\n  {lines}"
            )
        return None


def require_savable(folder: Path) -> None:
    """Raises ConfigError for a directory in which Orbax saves checkpoints that cannot be read."""
    if marks := [mark for mark in UNSAVABLE if mark in str(folder)]:
        raise ConfigError(
            f"{folder} has {' and '.join(marks)} in its path, and checkpoints saved there cannot be"
            " read again: choose a directory without any of *, ?, [ and \\ in its path."
        )


@contextlib.contextmanager
def _as_not_saved(checkpoint: Path) -> Iterator[None]:
    """Converts the errors of a save to NotSaved, in one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds
        from jaxformer.checkpoints.faults import why_not_saved

        reason, advice = why_not_saved(error)
        raise NotSaved(
            f"the checkpoint {checkpoint} could not be saved ({reason}). Those from before are"
            f" untouched: {advice}, and the same command continues from the newest."
        ) from error
