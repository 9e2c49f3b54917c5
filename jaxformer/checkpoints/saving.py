"""Checkpoints by Orbax: saved on a thread, kept by policy, and verified when they are read. A run
whose checkpoints cannot be read raises an error and does not start anew.

A checkpoint holds the train state as a flat table (dotted path to array) and a manifest of that
table (see `reading`). Which ones are kept is the matter of Orbax's preservation policies.
"""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxformer.arrays.params import dotted
from jaxformer.checkpoints.buckets import (
    DAMAGE_FILE,
    MARKER,
    orbax_path,
    remove_unfinished,
    require_savable,
)
from jaxformer.checkpoints.digests import write_file_digests
from jaxformer.checkpoints.reading import (
    Damaged,
    TargetT,
    flat_leaves,
    in_short,
    manifest_of,
    read_back,
    read_state,
    saved_steps,
)
from jaxformer.cluster.processes import together
from jaxformer.files import ConfigError, located, store_of
from jaxformer.files.stores import sync

# Orbax logs what it raises as well, and that a draft lacks what another of its threads is writing.
logging.getLogger("absl").addFilter(
    lambda record: not (record.exc_info or ".orbax-checkpoint-tmp/" in record.getMessage())
)


class Stepped(Protocol):
    """A pytree that counts its steps, as the train state does."""

    step: Any


StateT = TypeVar("StateT", bound=Stepped)


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
        self.directory = located(run_dir)
        self.folder = self.directory.absolute() / "checkpoints"
        self.every = every
        self._run = dict(run or {})
        self._without = frozenset(without)
        self._retention = (keep, keep_every, keep_best)
        self._manager: ocp.CheckpointManager | None = None  # made by the first save
        # Called with the state and its step before each save: what is written there is at its
        # place when the checkpoint is.
        self.before_save: Callable[[Any, int], None] = lambda state, step: None
        self._saving: int | None = None
        self._read_back = False
        require_savable(self.folder)
        store_of(self.folder).make_folder()

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
        """Wait until all saves are on the disk. Raises NotSaved where one failed.

        The first save is read back, up to `READ_BACK_BYTES` bytes.
        """
        # Of the last save alone: one is written at a time.
        step = self._saving
        self._saving = None
        if step is None or self._manager is None:
            return
        checkpoint = self.folder / str(step)
        with _as_not_saved(checkpoint):
            # The thread of Orbax keeps its error until it is waited for.
            self._manager.wait_until_finished()
            if jax.process_index() == 0 and not self._read_back:
                read_back(checkpoint)
                self._read_back = True

    def steps(self) -> list[int]:
        """Return steps of the finished checkpoints, ascending."""
        return saved_steps(self.directory)

    def save(self, state: Any, step: int, evaluation: Mapping[str, Any] | None = None) -> None:
        """Copy the state to the host and return; a thread writes it. A step that is already
        saved is not written again.

        `evaluation` has the metrics of an evaluation of this state, if there was one; the best
        checkpoints are chosen by its `val_loss`. Raises NotSaved if the previous save failed, or
        this one fails at once.
        """
        self.wait()
        if step in self.steps():
            return
        if self._manager is None:
            with store_of(self.folder).store_errors("written"):
                self._manager = make_manager(self.folder, *self._retention)
        leaves = flat_leaves(state, without=self._without)
        metrics = None
        if self._retention[2] and evaluation and "val_loss" in evaluation:
            metrics = {"val_loss": float(evaluation["val_loss"])}
        self.before_save(state, step)
        with _as_not_saved(self.folder / str(step)):
            manifest = ocp.args.JsonSave(manifest_of(leaves, self._run))
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), manifest=manifest)
            self._saving = step
            self._manager.save(step, args=args, metrics=metrics)

    def newest(self, state: StateT, log: Callable[[str], None] = warnings.warn) -> StateT:
        """Return the newest checkpoint that can be read, with the shardings of `state`, if it is of
        a later step; else `state` itself.

        The arrays of `state` are freed before those of the checkpoint are read. Raises ConfigError
        as `restore` does.
        """
        if not self.steps() or self.steps()[-1] <= int(state.step):
            return state

        def freed(path: Any, leaf: jax.Array) -> Any:
            if dotted(path) in self._without:
                return leaf
            # Or the state would be in memory twice while it is read.
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            leaf.delete()
            return shape

        target: StateT = jax.tree.map_with_path(freed, state)
        restored = self.restore(target, log)
        assert restored is not None  # there are checkpoints
        return restored

    def restore(self, target: TargetT, log: Callable[[str], None]) -> TargetT | None:
        """Return the newest checkpoint that can be read, with the shardings of `target`; None if
        there are no checkpoints. The leaves that are not saved are those of `target`.

        Once an earlier one was read, damaged checkpoints are renamed and get a file that says why;
        none is deleted. Raises ConfigError if a checkpoint is of another run, model or optimizer,
        if all are damaged, or if one cannot be read for another reason.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                state = read_state(self.folder, step, target, run=self._run, without=self._without)
            # Older checkpoints are there for this: hours of training are lost, and not all.
            except Damaged as error:
                damaged[step] = str(error)
                log(
                    f"WARNING: the checkpoint of step {step} cannot be read; trying an earlier one."
                    f"\n  {error}"
                )
                continue
            if damaged and jax.process_index() == 0:
                for number, reason in damaged.items():
                    checkpoint = store_of(self.folder / str(number))
                    place = checkpoint.set_aside(f"damaged-{number}", DAMAGE_FILE, reason, MARKER)
                    log(
                        f"The checkpoint of step {number} was set aside as {place}; nothing in it"
                        " was changed."
                    )
                if self._manager is not None:
                    self._manager.reload()
            return state
        if damaged:
            lines = "\n  ".join(damaged.values())
            raise ConfigError(
                f"no checkpoint of this run can be read; nothing was overwritten:\n  {lines}"
            )
        return None


@contextlib.contextmanager
def _as_not_saved(checkpoint: Path) -> Iterator[None]:
    """Convert the errors of a save to NotSaved, in one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise NotSaved(
            f"the checkpoint {checkpoint} could not be saved ({in_short(error)}). Those from before"
            " are untouched: make room, or look after the disk, and the same command continues from"
            " the newest."
        ) from error


class DurableDraft(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A directory that Orbax writes and then renames, with an fsync before and after: its content
    is on the disk before it gets its name, and the name before an older checkpoint is deleted.

    TensorStore syncs only arrays, and Orbax nothing. A complete checkpoint also gets the digests of
    its files. All this happens on the thread that saves.
    """

    async def finalize(self) -> None:
        draft = Path(self.get())
        target = Path(self.get_final())
        if target.name.isdecimal():  # a checkpoint, rather than one of the folders in it
            write_file_digests(draft)
        sync(draft, *draft.rglob("*"))
        await super().finalize()  # which writes the marker of a complete checkpoint
        sync(*target.glob("*"), target, target.parent)


class MarkedDraft(ocp.path.atomicity.CommitFileTemporaryPath):
    """The same in a bucket, where an object is stored for good once it is put: the last one is the
    marker of a complete checkpoint."""

    async def finalize(self) -> None:
        target = self.get_final()
        if target.name.isdecimal():
            write_file_digests(located(str(target)))
        await super().finalize()


def make_manager(folder: Path, newest: int, each: int, best: int) -> ocp.CheckpointManager:
    """Return Orbax's manager, which keeps the `newest` checkpoints, those whose step is a multiple
    of `each`, and the `best` by their validation loss; it deletes others once a newer one is
    complete.

    It removes what an earlier process left of an unfinished save. Make it only to save: a reader of
    the directory would remove what another process is writing.
    """
    rules: list[policies.PreservationPolicy] = [policies.LatestN(newest)]
    if each:
        rules.append(policies.EveryNSteps(each))
    if best:
        rules.append(
            policies.BestN(
                get_metric_fn=_validation_loss,
                reverse=True,
                n=best,
                keep_checkpoints_without_metrics=False,
            )
        )

    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(rules),
        best_fn=_validation_loss if best else None,
        best_mode="min",
        cleanup_tmp_directories=True,
        temporary_path_class=DurableDraft if store_of(folder).renames else MarkedDraft,
    )
    # By one process, before any writes: the others would see half of it.
    together(lambda: remove_unfinished(folder) if jax.process_index() == 0 else None)
    return _Manager(orbax_path(folder), options=options)


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without JAX's notice of a preemption: `cluster.launch` turns that service
    off, since `fit` handles signals, and Orbax 0.11 raises an error where it is off."""

    def reached_preemption(self, step: int) -> bool:
        return False


def _validation_loss(metrics: Mapping[str, Any]) -> float:
    """Return the loss by which the best checkpoints are chosen; infinity where it is missing or
    NaN."""
    loss = metrics.get("val_loss")
    if isinstance(loss, float | int) and not math.isnan(loss):
        return loss
    return math.inf
