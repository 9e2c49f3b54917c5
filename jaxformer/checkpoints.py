"""Checkpoints by Orbax: saved on a thread, checked before an array is read, never silently replaced by a fresh start.

A checkpoint holds the train state as a flat table (dotted path to array) and a manifest of that table's paths, shapes and
dtypes. The run directory holds the resolved config and the tokenizer beside them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxformer.settings import ConfigError

Say = Callable[[str], None]


def flat_leaves(tree: Any) -> dict[str, Any]:
    """`{"params.blocks.attention.q": leaf, ...}`: names that survive any change of the containers."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def manifest_of(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


class Checkpoints:
    """The checkpoints of one run directory. Use as a context manager: leaving waits for the last save."""

    def __init__(self, run_dir: str | Path, keep: int = 2) -> None:
        self.folder = Path(run_dir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: Any, step: int) -> None:
        """Copies the state off the devices and returns; a thread writes it. A step already saved is left as it is."""
        if step in self._manager.all_steps():
            return
        leaves = flat_leaves(state)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), manifest=ocp.args.JsonSave(manifest_of(leaves)))
        )

    def restore(self, target: Any, say: Say) -> Any | None:
        """The newest checkpoint that can be read, placed as `target` says; None if there are none.

        Raises ConfigError if a checkpoint is of another model or optimizer, or if every one of them is damaged.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                leaves = read_checkpoint(self.folder, step, flat_leaves(target))
            except ConfigError:
                raise
            except Exception as error:  # Orbax and tensorstore raise many kinds for a torn file
                damaged.append(f"  {self.folder / str(step)}: {in_short(error)}")
                say(f"WARNING: the checkpoint of step {step} cannot be read; trying the one before it.\n{damaged[-1]}")
                continue
            for bad in [s for s in self.steps() if s > step]:
                self._manager.delete(bad)
            return jax.tree.unflatten(jax.tree.structure(target), leaves.values())
        if damaged:
            raise ConfigError("no checkpoint of this run can be read; nothing was overwritten:\n" + "\n".join(damaged))
        return None


def read_checkpoint(folder: Path, step: int, wanted: dict[str, Any], whole: bool = True) -> dict[str, jax.Array]:
    """The leaves of `wanted` from the checkpoint of `step`, after its manifest was held against them."""
    place = folder / str(step)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        saved = reader.restore(place, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))["manifest"]
        _compare(place, saved, manifest_of(wanted), whole)
        args = ocp.args.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=not whole
        )
        leaves = reader.restore(place, args=ocp.args.Composite(state=args))["state"]
    return {path: leaves[path] for path in wanted}


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _compare(place: Path, saved: dict[str, Any], wanted: dict[str, Any], whole: bool) -> None:
    problems = [f"{path}: not in the checkpoint" for path in wanted if path not in saved]
    problems += [f"{path}: only in the checkpoint" for path in saved if whole and path not in wanted]
    problems += [
        f"{path}: {saved[path][1]}{saved[path][0]} in the checkpoint, {wanted[path][1]}{wanted[path][0]} in the model"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]
    if problems:
        shown = "\n  ".join([*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])])
        raise ConfigError(f"the checkpoint {place} is of another model or optimizer; nothing was changed:\n  {shown}")


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the finished checkpoints in a run directory, ascending; unfinished ones carry another name."""
    return sorted(
        int(entry.name) for entry in (run_dir / "checkpoints").glob("*") if entry.is_dir() and entry.name.isdigit()
    )
