"""What a run directory holds of a model: its record, and the parameters of its checkpoints."""

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxformer.arrays.mesh import placement, replicated
from jaxformer.arrays.params import Params, Spec, Specs, is_custom, map_specs, rows
from jaxformer.checkpoints.averages import AVERAGES, AverageKind
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import (
    Damaged,
    flat_leaves,
    read_checkpoint,
    saved_shapes,
    saved_steps,
)
from jaxformer.config.adapter import Quantization
from jaxformer.config.train import Weights
from jaxformer.files import ConfigError, is_remote, located
from jaxformer.models.quantize import is_quantized, quantized_leaf
from jaxformer.tokenizer import Tokenizer

# Reads the leaves whose shapes it gets, by their paths.
Read = Callable[[dict[str, Any]], dict[str, Any]]


class SavedWeights(NamedTuple):
    """Which weights of a run are read: those of the checkpoint of `step`, or of the newest one that
    can be read, trained or averaged as `weights` says. `record` is what data.json holds."""

    run_dir: Path
    step: int | None
    weights: Weights
    record: Mapping[str, Any]


def params_of_run(
    saved: SavedWeights, table: Specs, mesh: Mesh | None, dtype: str, quantize: Quantization | None
) -> tuple[Params, int]:
    """The parameters of a run without an adapter, as `jf.load` gives them, and their step."""
    shapes = _shapes(table, mesh)
    leaf_shapes = flat_leaves({"params": shapes})
    matrices = {
        f"params.{path}": spec
        for path, spec in rows(table).items()
        if quantize is not None and is_quantized(spec, quantize)
    }

    def typed(read: Read) -> dict[str, Any]:
        """The leaves as `dtype`; each of the matrices that are quantized is read by itself, after
        all others."""
        together = {path: shape for path, shape in leaf_shapes.items() if path not in matrices}
        leaves = {path: leaf.astype(dtype) for path, leaf in read(together).items()}
        for path, spec in matrices.items():
            weight = read({path: leaf_shapes[path]})[path].astype(dtype)
            leaf = quantized_leaf(path, weight, spec, quantize)  # type: ignore[arg-type]
            leaves[path] = jax.block_until_ready(leaf)
        return {path: leaves[path] for path in leaf_shapes}

    leaves, saved_step = _from_newest(saved, typed)
    params: Params = jax.tree.unflatten(jax.tree.structure(shapes), list(leaves.values()))
    return params, saved_step


def adapted_params_of_run(
    saved: SavedWeights, table: Specs, below: Params, mesh: Mesh | None, dtype: str
) -> tuple[Params, int]:
    """The parameters of a run with an adapter over those `below`, as `dtype`, and their step."""
    from jaxformer.adapters.adapted_params import base_paths, over_base

    shapes = {"params": _shapes(table, mesh)}
    leaf_shapes, unsaved = flat_leaves(shapes), {f"params.{path}" for path in base_paths(table)}
    learned = {path: shape for path, shape in leaf_shapes.items() if path not in unsaved}
    leaves, saved_step = _from_newest(saved, lambda read: read(learned))
    tree = jax.tree.unflatten(jax.tree.structure(shapes), (leaf_shapes | leaves).values())
    params: Params = over_base(table, tree["params"], below)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params, is_leaf=is_custom)
    return params, saved_step


def _shapes(table: Specs, mesh: Mesh | None) -> Any:
    """Parameters as shapes, each with its sharding."""

    def shape(_: str, spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = placement(mesh, spec.shape, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    return map_specs(shape, table)


def _from_newest(
    saved: SavedWeights, take: Callable[[Read], dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """What `take` makes of the newest checkpoint that can be read, or of that of the step asked
    for, and its step."""
    run_dir, step = saved.run_dir, saved.step
    steps = saved_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        present = f"it holds steps {steps}" if steps else "training has not saved one yet"
        of_step = "" if step is None else f" of step {step}"
        raise ConfigError(f"{run_dir} has no checkpoint{of_step}: {present}.")
    errors = []
    for candidate in [step] if step is not None else reversed(steps):
        try:
            return take(reader_of(saved, candidate)), candidate
        except Damaged as error:
            errors.append(f"step {candidate}: {error}")
            warnings.warn(
                f"a checkpoint of {run_dir} cannot be read; an older one is used: {errors[-1]}",
                stacklevel=2,
            )
    reasons = "\n  ".join(errors)
    raise ConfigError(f"no checkpoint of {run_dir} can be read:\n  {reasons}")


def reader_of(saved: SavedWeights, step: int) -> Read:
    """Reads weights from the checkpoint of a step, trained or averaged."""
    folder = saved.run_dir.absolute() / "checkpoints"
    read = functools.partial(read_checkpoint, folder, step, exact=False, run=saved.record)
    if saved.weights == "trained":
        return read
    leaves = saved_shapes(folder, step)
    for kind in AVERAGES:
        # Of each parameter that learns, by its dotted path: the names of its array and its number.
        names = dict[str, tuple[str, str]]()
        for scalar in leaves:
            if not scalar.startswith("optimizer.") or not scalar.endswith(f".{kind.scalar}"):
                continue
            prefix = f"{scalar.removesuffix(kind.scalar)}{kind.leaves}."
            for name in leaves:
                if name.startswith(prefix):
                    names[name.removeprefix(prefix)] = (name, scalar)
        if names:
            return functools.partial(read_average, read, kind, names, leaves)
    if saved.weights == "average":
        raise ConfigError(no_average(saved.run_dir))
    return read


def read_average(
    read: Callable[[dict[str, Any]], dict[str, Any]],
    kind: AverageKind,
    names_by_path: Mapping[str, tuple[str, str]],
    saved: Mapping[str, Any],
    shapes: dict[str, Any],
) -> dict[str, Any]:
    """The average of each leaf of `shapes`, as its dtype; a leaf that does not learn is itself.
    `read` reads leaves of a checkpoint, and `saved` has their [shape, dtype] by name."""
    names = {path: names_by_path.get(path.removeprefix("params.")) for path in shapes}
    formula, wanted = kind.formula, dict[str, Any]()
    for path, shape in shapes.items():
        pair = names[path]
        if pair is None:
            wanted[path] = shape
            continue
        leaf_dtype = jnp.dtype(saved[pair[0]][1])
        wanted[pair[0]] = jax.ShapeDtypeStruct(shape.shape, leaf_dtype, sharding=shape.sharding)
        if formula is not None:
            wanted[path] = shape
            dtype = jnp.dtype(saved[pair[1]][1])
            sharding = shape.sharding
            if isinstance(sharding, NamedSharding):
                sharding = replicated(sharding.mesh)
            wanted[pair[1]] = jax.ShapeDtypeStruct((), dtype, sharding=sharding)
    leaves = read(wanted)

    def averaged(path: str, shape: Any) -> Any:
        pair = names[path]
        if pair is None:
            return leaves[path]
        leaf = leaves[pair[0]]
        if formula is not None:
            leaf = formula(leaves[path], leaf, leaves[pair[1]])
        return leaf.astype(shape.dtype)

    return {path: averaged(path, shape) for path, shape in shapes.items()}


def no_average(path: Path) -> str:
    """The message of `weights="average"` for a model that has none."""
    return (
        f"{path} keeps no average of its weights: leave out weights=average (--weights), or train"
        " with train.ema."
    )


def base_directory(
    run_dir: Path, init_from: str, record: Mapping[str, Any], base: str | Path | None
) -> Path:
    """The directory of the model below the adapter of a run: `base`, or where the run found it."""
    # A record is no setting: it has no URL but that of the setting, and may be a stranger's.
    recorded = record.get("base_path", "")
    stated = [init_from, "" if is_remote(recorded) else recorded]
    paths = [str(base)] if base is not None else stated
    paths = list(dict.fromkeys(filter(None, paths)))
    for path in paths:
        if located(path).exists():
            return located(path)
    raise ConfigError(
        f"{run_dir} holds an adapter, and the model below it is not at {' and '.join(paths)}: put"
        " it there, or name its directory, as in jf.load(path, base=DIRECTORY)."
    )


def require_base(run_dir: Path, base_dir: Path, below: Params, record: Mapping[str, Any]) -> None:
    """Raises ConfigError if a model is not the one that the adapter of a run was trained on."""
    base_fingerprint = fingerprint_below(below, record.get("learned", ()))
    if base_fingerprint != record.get("base", base_fingerprint):
        raise ConfigError(
            f"{base_dir} is not the model that the adapter in {run_dir} was trained on: its"
            f" fingerprint is {base_fingerprint}, and data.json has {record['base']}. Restore that"
            " model, or name the directory that holds it, as in jf.load(path, base=DIRECTORY)."
        )


def fingerprint_below(params: Params, learned: Collection[str]) -> str:
    """The fingerprint of the model below an adapter, without the branches that learn with it."""
    base_params = {name: branch for name, branch in params.items() if name not in learned}
    return fingerprint(flat_leaves(base_params))


def require_tokenizer(
    run_dir: Path, tokenizer: Tokenizer | None, record: Mapping[str, Any]
) -> None:
    """Raises ConfigError if the tokenizer is not the one that the run was trained with."""
    recorded = record.get("tokenizer")
    actual = tokenizer.fingerprint() if tokenizer is not None else None
    if recorded is not None and actual is not None and recorded != actual:
        raise ConfigError(
            f"{run_dir}/tokenizer.json is not the one that the run was trained with: its"
            f" fingerprint is {actual}, and data.json has {recorded}. Restore the file: the same"
            " train command writes it again. To use this tokenizer with the model all the same,"
            " convert the run to a Hugging Face directory first, and replace it there."
        )
