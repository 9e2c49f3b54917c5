"""Which checkpoints are kept, by Orbax's preservation policies, and the manager that saves them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxformer.checkpoint_faults import quiet_threads
from jaxformer.files import sync


def make_manager(folder: Path, newest: int, each: int, best: int) -> ocp.CheckpointManager:
    """Orbax's manager, which keeps the `newest` checkpoints, those whose step is a multiple of
    `each`, and the `best` by their validation loss; it deletes others once a newer one is complete.

    It removes what an earlier process has left of a save that it did not finish. Make it only to
    save: a mere reader of the directory would remove what another process is writing.
    """
    kept: list[Any] = [policies.LatestN(newest)]
    if each:
        kept.append(policies.EveryNSteps(each))
    if best:
        kept.append(
            policies.BestN(
                get_metric_fn=_validation_loss,
                reverse=True,
                n=best,
                keep_checkpoints_without_metrics=False,
            )
        )

    def sync_drafts() -> None:
        """Puts what Orbax has written on the disk, on the thread that saves and before the
        checkpoint gets its name. TensorStore does so for arrays alone."""
        if jax.process_index() == 0:
            for draft in folder.glob("*orbax-checkpoint-tmp*"):
                sync(draft, *draft.rglob("*"))

    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept),
        best_fn=_validation_loss if best else None,
        best_mode="min",
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=sync_drafts),
    )
    quiet_threads()
    return ocp.CheckpointManager(folder, options=options)


def _validation_loss(metrics: Mapping[str, float]) -> float:
    """What the best checkpoints have least of; a loss that is no number is that of the worst."""
    loss = metrics["val_loss"]
    return math.inf if math.isnan(loss) else loss
