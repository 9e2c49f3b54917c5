"""Which checkpoints are kept, by Orbax's preservation policies, and the manager that saves them."""

import functools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxformer.checkpoints.digests import write_file_digests
from jaxformer.checkpoints.faults import quiet_threads
from jaxformer.files import ConfigError, read_object, sync

METRICS = "*/metrics/metrics"  # where Orbax stores the metrics of an evaluation


class DurableDraft(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A directory that Orbax writes and then renames, with an fsync before and after: its content
    is on the disk before it gets its name, and the name before an older checkpoint is deleted.

    TensorStore syncs only arrays, and Orbax nothing. A complete checkpoint also gets the digests of
    its files. All this happens on the thread that saves.
    """

    async def finalize(self) -> None:
        draft, target = Path(self.get()), Path(self.get_final())
        if target.name.isdecimal():  # a checkpoint, rather than one of the folders in it
            write_file_digests(draft)
        sync(draft, *draft.rglob("*"))
        await super().finalize()  # which writes the marker of a complete checkpoint
        sync(*target.glob("*"), target, target.parent)


def make_manager(folder: Path, newest: int, each: int, best: int) -> ocp.CheckpointManager:
    """Orbax's manager, which keeps the `newest` checkpoints, those whose step is a multiple of
    `each`, and the `best` by their validation loss; it deletes others once a newer one is complete.

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
        temporary_path_class=DurableDraft,
    )
    quiet_threads()
    if jax.process_count() == 1:
        _leave_out_unreadable(folder)
    else:  # the others read them afterwards
        from jaxformer.cluster.processes import together

        together(functools.partial(_leave_out_unreadable, folder))
    return _Manager(folder, options=options)


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without JAX's notice of a preemption: `cluster.launch` turns that service
    off, since `fit` handles signals, and Orbax 0.11 raises an error where it is off."""

    def reached_preemption(self, step: int) -> bool:
        return False


def _leave_out_unreadable(folder: Path) -> None:
    """Renames evaluations that cannot be read, with which Orbax could not save anything more."""
    for path in folder.glob(METRICS) if jax.process_index() == 0 else ():
        try:
            if path.parts[-3].isdecimal():  # a finished checkpoint that is not set aside
                read_object(path, "it was renamed, and its checkpoint counts as not evaluated")
        except ConfigError as error:
            path.rename(path.with_name("damaged-metrics"))
            warnings.warn(str(error), stacklevel=2)


def _validation_loss(metrics: Mapping[str, Any]) -> float:
    """The loss by which the best checkpoints are chosen; infinity where it is missing or NaN."""
    loss = metrics.get("val_loss")
    return loss if isinstance(loss, float | int) and not math.isnan(loss) else math.inf
