"""Checkpoints by Orbax: saved on a thread, checked before an array is read, never silently replaced by a fresh start.

A checkpoint holds the train state as a flat table (dotted path to array) and a manifest of that table's paths, shapes and
dtypes. The run directory holds the resolved config and the tokenizer beside them.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxformer.config import ConfigError, DataConfig, ModelConfig, RunConfig, RunSettings, TokenizerConfig
from jaxformer.config_file import read_config, to_json
from jaxformer.interop.theirs import check_dtype, is_pretrained
from jaxformer.models.transformer import specs as model_specs
from jaxformer.params import Params, Spec, map_specs
from jaxformer.sharding import parameter_sharding
from jaxformer.tokenizer import Tokenizer
from jaxformer.train.state import TrainState

Say = Callable[[str], None]
ROW = 1024  # most tokens of a row when a model directory is evaluated, which says nothing of its rows in training


@dataclass(frozen=True)
class Loaded:
    """A model read from disk. `tokenizer` is None where none lies beside it; `labels` are its classes' names."""

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    labels: tuple[str, ...] = ()


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

    def restore(self, target: TrainState, say: Say) -> TrainState | None:
        """The newest checkpoint that can be read, placed as `target` says; None if there are none.

        Raises ConfigError if a checkpoint is of another model or optimizer, or if every one of them is damaged.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                leaves = _read(self.folder, step, flat_leaves(target))
            except ConfigError:
                raise
            except Exception as error:  # Orbax and tensorstore raise many kinds for a torn file
                damaged.append(f"  {self.folder / str(step)}: {_in_short(error)}")
                say(f"WARNING: the checkpoint of step {step} cannot be read; trying the one before it.\n{damaged[-1]}")
                continue
            for bad in [s for s in self.steps() if s > step]:
                self._manager.delete(bad)
            return jax.tree.unflatten(jax.tree.structure(target), leaves.values())  # type: ignore[no-any-return]
        if damaged:
            raise ConfigError("no checkpoint of this run can be read; nothing was overwritten:\n" + "\n".join(damaged))
        return None


def _read(folder: Path, step: int, wanted: dict[str, Any], whole: bool = True) -> dict[str, jax.Array]:
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


def _in_short(error: Exception) -> str:
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


def load(path: str | Path, step: int | None = None, *, mesh: Mesh | None = None, dtype: str = "float32") -> Loaded:
    """The model of a run directory (its newest readable checkpoint, or that of `step`) or of a Hugging Face directory.

    Leaves go straight to their place on `mesh`, or to this machine's first device, as `dtype` (float32, bfloat16, float16).
    Raises ConfigError if `path` is neither, has no such step, nothing in it can be read, or it is of an architecture, or has
    an option or a tensor, that jaxformer does not compute.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        hub = f" (to get one: hf download {path} --local-dir DIRECTORY)" * (not folder.exists())
        raise ConfigError(
            f"{folder} has no config.json: give the run.dir of a training run, or a Hugging Face model directory{hub}."
        )
    check_dtype(dtype)
    tokenizer = Tokenizer.beside(folder)
    if is_pretrained(folder):
        if step is not None:
            raise ConfigError(f"{folder} is a Hugging Face model directory, which has no steps: leave out step={step}.")
        from jaxformer.interop.pretrained import load_pretrained  # a side room, which no training run enters

        found = load_pretrained(folder, mesh, dtype)
        return Loaded(found.params, found.config, tokenizer, found.labels)
    return _load_run(folder, step, tokenizer, mesh, dtype)


def _load_run(run_dir: Path, step: int | None, tokenizer: Tokenizer | None, mesh: Mesh | None, dtype: str) -> Loaded:
    config = read_config(run_dir / "config.json").model
    steps = saved_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        held = f"it holds steps {steps}" if steps else "training has not saved one yet"
        raise ConfigError(f"{run_dir} has no checkpoint{'' if step is None else f' of step {step}'}: {held}.")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(_: str, spec: Spec) -> jax.ShapeDtypeStruct:
        place = here if mesh is None else parameter_sharding(mesh, spec.shape, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=place)

    shapes = map_specs(shape, model_specs(config))
    wanted = flat_leaves({"params": shapes})
    errors = []
    for candidate in [step] if step is not None else reversed(steps):
        try:
            leaves = _read(run_dir.absolute() / "checkpoints", candidate, wanted, whole=False)
        except ConfigError:
            raise
        except Exception as error:  # as in Checkpoints.restore
            errors.append(f"step {candidate}: {_in_short(error)}")
            warnings.warn(f"a checkpoint of {run_dir} cannot be read, so an older one is taken: {errors[-1]}", stacklevel=2)
            continue
        typed = [leaf.astype(dtype) for leaf in leaves.values()]
        return Loaded(jax.tree.unflatten(jax.tree.structure(shapes), typed), config, tokenizer, _labels(run_dir))
    raise ConfigError(f"no checkpoint of {run_dir} can be read:\n  " + "\n  ".join(errors))


def run_of(path: str | Path) -> RunConfig:
    """The settings of a run directory, or those under which a Hugging Face model directory is read: whole rows of its text.

    Raises ConfigError if `path` is neither.
    """
    folder = Path(path)
    if not is_pretrained(folder):
        return read_config(folder / "config.json")
    from jaxformer.interop.pretrained import pretrained_config

    model = pretrained_config(folder)
    length = min(model.max_length, ROW)
    return RunConfig(
        run=RunSettings(dir=str(folder)),
        model=model,
        data=DataConfig(
            train="", sequence_length=length, objective="pairs" if model.family == "encoder_decoder" else "auto"
        ),
        tokenizer=TokenizerConfig(path=str(folder)),
    )


def save_run(target: Path, model: Loaded, origin: Path) -> None:
    """Writes a model, read from the model directory `origin`, as a run directory whose one checkpoint is of step 0."""
    if model.tokenizer is not None:
        model.tokenizer.save(target / "tokenizer.json")
    with Checkpoints(target) as checkpoints:
        checkpoints.save({"params": model.params}, 0)
    if model.labels:
        (target / "data.json").write_text(json.dumps({"labels": list(model.labels)}) + "\n", encoding="utf-8")
    run = dataclasses.replace(run_of(origin), run=RunSettings(dir=str(target)), tokenizer=TokenizerConfig(path=str(target)))
    (target / "config.json").write_text(to_json(run), encoding="utf-8")


def _labels(run_dir: Path) -> tuple[str, ...]:
    record = run_dir / "data.json"
    return tuple(json.loads(record.read_text(encoding="utf-8")).get("labels", ())) if record.is_file() else ()


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the finished checkpoints in a run directory, ascending; unfinished ones carry another name."""
    return sorted(
        int(entry.name) for entry in (run_dir / "checkpoints").glob("*") if entry.is_dir() and entry.name.isdigit()
    )
