"""Models read from disk: the checkpoint of a run, a Hugging Face directory, a GGUF file, or an
adapter over one of these, with the rows of tokens that a run adds."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxformer.arrays.mesh import place_array, placement, replicated, whole
from jaxformer.arrays.params import Params, Spec, Specs, dotted, is_custom, map_specs, rows
from jaxformer.checkpoints.averages import AVERAGES, AverageKind
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import (
    Damaged,
    flat_leaves,
    read_checkpoint,
    saved_shapes,
    saved_steps,
)
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.adapter import Quantization
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import ObjectiveName, RunSettings, TokenizerConfig, to_json
from jaxformer.config.settings import imported_table
from jaxformer.config.train import Weights
from jaxformer.files import ConfigError, is_remote, write_text
from jaxformer.interop.hf_config import check_dtype
from jaxformer.interop.peft_config import find_base
from jaxformer.models.quantize import check_quantization, is_quantized, quantized_leaf
from jaxformer.models.quantize import quantize as quantize_params
from jaxformer.models.transformer import specs as model_specs
from jaxformer.runs.model_files import KIND_NAMES, ModelFiles
from jaxformer.tokenizer import Tokenizer

# Reads the leaves whose shapes it gets, by their paths.
Read = Callable[[dict[str, Any]], dict[str, Any]]
BLOCK_ROWS = 4096  # rows of which sums are made at once


@dataclass(frozen=True)
class Loaded:
    """A model read from disk. `tokenizer` is None where the directory has none; `labels` are the
    names of its classes, and `problem_type` is what a Hugging Face config.json says that these
    answer. Where `params` have an adapter, `base` is the directory of the model below it, and
    `learned` are the branches of the params that learned with it. `step` is that of the checkpoint
    of a run, else None."""

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    labels: tuple[str, ...] = ()
    base: Path | None = None
    learned: tuple[str, ...] = ()
    step: int | None = None
    problem_type: str = ""


class Reading(TypedDict, total=False):
    """Keywords of `load` that functions around it pass on."""

    quantize: Quantization | None
    weights: Weights


def load(
    path: str | Path | ModelFiles,
    step: int | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    quantize: Quantization | None = None,
    base: str | Path | None = None,
    weights: Weights = "auto",
) -> Loaded:
    """The model of a run directory (its newest readable checkpoint, or that of `step`), of a
    Hugging Face directory, of a GGUF file (which needs the package gguf), or of an adapter in
    peft's format, over the base that it names or `base`.

    Leaves are read directly onto `mesh`, or onto this machine's first device, as `dtype`
    (float32, bfloat16, float16); those of an adapter of peft are float32. With `quantize` the
    weights that `jf.quantize` replaces are quantized, each before the next leaf is read: neither
    host nor device ever holds the whole model unquantized. `weights` of a run are those "trained"
    or their "average" (`train.ema`, schedule-free optimizers); "auto" reads the average where the
    checkpoint holds one. The params of an adapter, and of
    a run with one, are adapted ones, over the model that they were trained on; `base` is that
    model's directory where it was moved. Raises ConfigError if `path` is none of these, has no such
    step or average or cannot be read, or if its architecture, an option or a tensor is not
    supported.
    """
    if quantize is not None:
        check_quantization(quantize)
    check_dtype(dtype)
    if weights not in get_args(Weights):
        raise ConfigError(f"weights={weights!r} is not one of {', '.join(get_args(Weights))}.")
    files = path
    if not isinstance(files, ModelFiles):
        files = ModelFiles(files)
    if files.kind == "run":
        return _load_run(files, step, mesh, dtype, quantize, base, weights)
    if weights == "average":
        raise ConfigError(no_average(files.path))
    if step is not None:
        kind = KIND_NAMES[files.kind]
        raise ConfigError(f"{files} is a {kind}, which has no steps: leave out step={step}.")
    if files.kind == "adapter":
        below = files.below if base is None else ModelFiles(find_base(files.path, base))
        loaded = load(below, mesh=mesh, dtype=dtype, quantize=quantize)
        return _with_adapter(files, dataclasses.replace(loaded, base=below.path))
    if base is not None:
        raise ConfigError(f"{files} is no adapter: leave out base={str(base)!r}.")
    from jaxformer.interop.pretrained import load_pretrained

    opened = files.opened
    params = load_pretrained(opened, mesh, dtype, quantize)
    tokenizer: Tokenizer | None
    if files.kind == "gguf":
        tokenizer = Tokenizer.of_gguf(opened.files.metadata, str(files))
    else:
        tokenizer = Tokenizer.find(files.path)
    return Loaded(params, opened.config, tokenizer, opened.labels, problem_type=opened.problem_type)


def _with_adapter(files: ModelFiles, base: Loaded) -> Loaded:
    """An adapter of peft over its base."""
    from jaxformer.interop.peft_reading import adapted_config, learned_branches, read_adapter

    config = adapted_config(files.path, base.config)
    params = base.params
    if config != base.config:
        # The adapter has a head of its own, whose classes it does not name.
        shared_names = model_specs(config).keys() - {"head"}
        params = {name: branch for name, branch in params.items() if name in shared_names}
        base = dataclasses.replace(base, labels=(), problem_type="")
    return dataclasses.replace(
        base,
        params=read_adapter(files.path, params, config),
        config=config,
        tokenizer=Tokenizer.find(files.path) or base.tokenizer,
        learned=learned_branches(files.path, config),
        step=None,
    )


def _load_run(
    files: ModelFiles,
    step: int | None,
    mesh: Mesh | None,
    dtype: str,
    quantize: Quantization | None,
    base: str | Path | None,
    weights: Weights,
) -> Loaded:
    run = files.run
    record = files.record
    run_dir = files.path
    tokenizer = Tokenizer.find(run_dir)
    require_tokenizer(run_dir, tokenizer, record)
    labels = tuple(record.get("labels", ()))
    brought: Specs = {}
    # The objectives of this package bring no parameters, and code that adds one that does has
    # imported their table, which is not imported here for the sake of start-up.
    if imported_table(ObjectiveName) is not None:
        from jaxformer.runs.objectives import objective_specs

        brought = objective_specs(run.data.objective, run.model)
    saved = SavedWeights(run_dir, step, weights, record)
    if run.adapter.kind == "none":
        if base is not None:
            raise ConfigError(f"{run_dir} has no adapter: leave out base={str(base)!r}.")
        table = model_specs(run.model) | brought
        params, step = params_of_run(saved, table, mesh, dtype, quantize)
        return Loaded(params, run.model, tokenizer, labels, step=step)
    from jaxformer.models.adapt import adapted_table, quantization_of

    kind = quantization_of(run.adapter)
    if quantize not in (None, kind, run.adapter.base) and kind is not None:
        raise ConfigError(
            f"{run_dir} has an adapter over a base in {run.adapter.base}: leave out"
            f" quantize={quantize!r}."
        )
    base_files = base_below(run_dir, run.run.init_from, record, base)
    added = range(0)
    if run.tokenizer.added:
        # The tokenizer of the run says which rows are those of the added tokens.
        added = added_ids(run.tokenizer.added, tokenizer or Tokenizer.load(run_dir))
    below = load_base(base_files, mesh, kind, added, run.model.vocab_size).params
    learned = tuple(record.get("learned", ()))
    base_fingerprint = fingerprint_below(below, learned)
    if base_fingerprint != record.get("base", base_fingerprint):
        raise ConfigError(
            f"{base_files} is not the model that the adapter in {run_dir} was trained on: its"
            f" fingerprint is {base_fingerprint}, and data.json has {record['base']}. Restore that"
            " model, or name the directory that holds it, as in jf.load(path, base=DIRECTORY)."
        )
    if kind is None and quantize is not None:
        below = quantize_params(below, quantize)
    table = adapted_table(run.model, run.adapter, learned, added) | brought
    params, step = params_of_run(saved, table, mesh, dtype, below=below)
    return Loaded(params, run.model, tokenizer, labels, base_files.path, learned, step)


def load_base(
    files: ModelFiles,
    mesh: Mesh | None = None,
    quantize: Quantization | None = None,
    added: range = range(0),
    vocab_size: int = 0,
) -> Loaded:
    """A model to start from: an adapter there is merged, then the parameters are quantized, and
    there are rows for the tokens `added` to a vocabulary of `vocab_size`."""
    if files.has_adapter:
        from jaxformer.models.adapt import merge

        loaded = load(files, mesh=mesh)
        params = merge(loaded.params)
        if quantize:
            params = quantize_params(params, quantize)
        loaded = dataclasses.replace(loaded, params=params)
    else:
        loaded = load(files, mesh=mesh, quantize=quantize)
    if not added:
        return loaded
    config = dataclasses.replace(loaded.config, vocab_size=vocab_size)
    params = with_new_rows(loaded.params, config, added, mesh)
    return dataclasses.replace(loaded, params=params, config=config)


def require_exclusive(model: Loaded, path: str | Path) -> None:
    """ConfigError for a head whose classes are not those of which each text has one, as a run's."""
    if model.config.output == "classes" and (
        model.problem_type in ("multi_label_classification", "regression")
        or model.config.head.n_classes == 1
    ):
        raise ConfigError(
            f"{path} has a head of {model.config.head.n_classes} classes with problem_type="
            f"{model.problem_type!r}, and a run learns and measures one class of several:"
            " `jaxformer predict` gives the numbers of this head."
        )


def save_run(target: Path, model: Loaded, origin: ModelFiles, run_dir: Path | None = None) -> None:
    """Writes a model, read from `origin`, as a run directory with one checkpoint, of step 0.
    `run_dir` is its path, if it is moved afterwards."""
    run_dir = run_dir or target
    require_exclusive(model, origin.path)
    if model.tokenizer is not None:
        model.tokenizer.save(target / "tokenizer.json", follow=False)
    with Checkpoints(target) as checkpoints:
        checkpoints.save({"params": model.params}, 0)
    if model.labels:
        named = json.dumps({"labels": list(model.labels)}) + "\n"
        write_text(target / "data.json", named, follow=False)
    settings = RunSettings(dir=str(run_dir))
    tokenizer = TokenizerConfig(path=str(run_dir))
    run = dataclasses.replace(origin.run, run=settings, tokenizer=tokenizer)
    # Last, because a directory without it is no run: one in a bucket that is only half written is
    # not taken for a model.
    write_text(target / "config.json", to_json(run), follow=False)


class SavedWeights(NamedTuple):
    """Which weights of a run are read: those of the checkpoint of `step`, or of the newest one that
    can be read, trained or averaged as `weights` says. `record` is what data.json holds."""

    run_dir: Path
    step: int | None
    weights: Weights
    record: Mapping[str, Any]


def params_of_run(
    saved: SavedWeights,
    table: Specs,
    mesh: Mesh | None,
    dtype: str,
    quantize: Quantization | None = None,
    below: Params | None = None,
) -> tuple[Params, int]:
    """The parameters of a run, as `jf.load` gives them, and their step. A `table` with an adapter
    is over the parameters `below`, which no checkpoint has."""

    def shape_of(_: str, spec: Spec) -> jax.ShapeDtypeStruct:
        # Each with its sharding, on which it is read directly.
        sharding = placement(mesh, spec.shape, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    shapes = {"params": map_specs(shape_of, table)}
    leaf_shapes = flat_leaves(shapes)
    together = dict(leaf_shapes)
    if below is not None:
        from jaxformer.adapters.adapted_params import base_paths, over_base

        for path in base_paths(table):
            del together[f"params.{path}"]
    matrices = dict[str, Spec]()
    if quantize is not None:
        for path, spec in rows(table).items():
            if is_quantized(spec, quantize):
                matrices[path] = spec
                del together[f"params.{path}"]

    def typed(read: Read) -> dict[str, Any]:
        """The leaves as `dtype`; each of the matrices that are quantized is read by itself, after
        all others."""
        leaves = {path: leaf.astype(dtype) for path, leaf in read(together).items()}
        for name, spec in matrices.items():
            path = f"params.{name}"
            weight = read({path: leaf_shapes[path]})[path].astype(dtype)
            leaf = quantized_leaf(path, weight, spec, quantize)  # type: ignore[arg-type]
            # Waits, so that no two matrices are in memory unquantized.
            leaves[path] = jax.block_until_ready(leaf)
        return leaves

    leaves, saved_step = _from_newest(saved, typed)
    # Leaves that no checkpoint has stay shapes here, and `over_base` replaces them.
    ordered = [leaves.get(path, shape) for path, shape in leaf_shapes.items()]
    params: Params = jax.tree.unflatten(jax.tree.structure(shapes), ordered)["params"]
    if below is not None:
        params = over_base(table, params, below)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params, is_leaf=is_custom)
    return params, saved_step


def _from_newest(
    saved: SavedWeights, take: Callable[[Read], dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """What `take` makes of the newest checkpoint that can be read, or of that of the step asked
    for, and its step."""
    run_dir = saved.run_dir
    steps = saved_steps(run_dir)
    if not steps:
        raise ConfigError(f"{run_dir} has no checkpoint: training has not saved one yet.")
    if saved.step is not None:
        if saved.step not in steps:
            raise ConfigError(
                f"{run_dir} has no checkpoint of step {saved.step}: it holds steps {steps}."
            )
        steps = [saved.step]
    # A damaged checkpoint costs the steps since the one before it, and not the run.
    errors = []
    for candidate in reversed(steps):
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
    # Found by their names: the optimizer that made them is not built to read a model.
    leaves = saved_shapes(folder, step)
    for kind in AVERAGES:
        # Of each parameter that learns, by its dotted path: the names of its array and its number.
        names = dict[str, tuple[str, str]]()
        for name in leaves:
            before, field, path = name.partition(f".{kind.leaves}.")
            scalar = f"{before}.{kind.scalar}"
            if before.startswith("optimizer") and field and scalar in leaves:
                names[path] = (name, scalar)
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
    wanted = dict(shapes)
    averages = dict[str, tuple[str, str]]()
    for path, shape in shapes.items():
        pair = names_by_path.get(path.removeprefix("params."))
        if pair is None:
            continue
        averages[path] = pair
        name, scalar = pair
        sharding = shape.sharding
        # As the dtype in which it was saved, which may be more exact than that of the weight.
        dtype = jnp.dtype(saved[name][1])
        wanted[name] = jax.ShapeDtypeStruct(shape.shape, dtype, sharding=sharding)
        if kind.formula is None:
            # The average stands for the weight itself, which is not read.
            del wanted[path]
            continue
        if isinstance(sharding, NamedSharding):
            sharding = replicated(sharding.mesh)
        dtype = jnp.dtype(saved[scalar][1])
        wanted[scalar] = jax.ShapeDtypeStruct((), dtype, sharding=sharding)
    leaves = read(wanted)
    for path, (name, scalar) in averages.items():
        leaf = leaves[name]
        if kind.formula is not None:
            leaf = kind.formula(leaves[path], leaf, leaves[scalar])
        leaves[path] = leaf.astype(shapes[path].dtype)
    return {path: leaves[path] for path in shapes}


def no_average(path: Path) -> str:
    """The message of `weights="average"` for a model that has none."""
    return (
        f"{path} keeps no average of its weights: leave out weights=average (--weights), or train"
        " with train.ema."
    )


def base_below(
    run_dir: Path, init_from: str, record: Mapping[str, Any], base: str | Path | None
) -> ModelFiles:
    """The model below the adapter of a run: that at `base`, or where the run found it."""
    candidates = [str(base)]
    if base is None:
        candidates = [init_from]
        recorded = record.get("base_path", "")
        # A record is no setting: it has no URL but that of the setting, and may be a stranger's.
        if recorded != init_from and not is_remote(recorded):
            candidates.append(recorded)
    paths = list(filter(None, candidates))
    for path in paths:
        files = ModelFiles(path)
        if files.path.exists():
            return files
    raise ConfigError(
        f"{run_dir} holds an adapter, and the model below it is not at {' and '.join(paths)}: put"
        " it there, or name its directory, as in jf.load(path, base=DIRECTORY)."
    )


def fingerprint_below(params: Params, learned: Collection[str]) -> str:
    """The fingerprint of the model below an adapter, without the branches that learn with it."""
    base_params = {name: branch for name, branch in params.items() if name not in learned}
    return fingerprint(flat_leaves(base_params))


def require_tokenizer(
    run_dir: Path, tokenizer: Tokenizer | None, record: Mapping[str, Any]
) -> None:
    """Raises ConfigError if the tokenizer is not the one that the run was trained with."""
    if tokenizer is None:
        return
    actual = tokenizer.fingerprint()
    recorded = record.get("tokenizer", actual)
    if recorded != actual:
        raise ConfigError(
            f"{run_dir}/tokenizer.json is not the one that the run was trained with: its"
            f" fingerprint is {actual}, and data.json has {recorded}. Restore the file: the same"
            " train command writes it again. To use this tokenizer with the model all the same,"
            " convert the run to a Hugging Face directory first, and replace it there."
        )


def added_ids(names: tuple[str, ...], tokenizer: Tokenizer) -> range:
    """The ids of the tokens that a run adds, whose tokenizer may have them or not."""
    grown = tokenizer.with_special_tokens(names)
    ids = [index for name in names if (index := grown.id_of(name)) is not None]
    if not ids:
        return range(0)
    return range(min(ids), max(ids) + 1)


def with_new_rows(
    params: Params, config: ModelConfig, added: range, mesh: Mesh | None = None
) -> Params:
    """The params of a model with the rows of added tokens, in every leaf with an axis "vocab": the
    table of tokens, the output layer where it is another, and its bias. `config` has the vocabulary
    with them; each new row is the mean of those before them.

    Rows that only fill the old table up keep their values, unless an added token takes them. Sums
    are float64 on the host, so that a laptop finds the rows of any mesh. Host memory: one table.
    """
    grown_table = rows(model_specs(config))

    def leaf_of(path: str, leaf: Any) -> Any:
        spec = grown_table.get(path)
        if spec is None or "vocab" not in spec.axes or is_custom(leaf):
            return leaf
        leaf = whole(leaf)
        axis = spec.axes.index("vocab")
        table = np.moveaxis(np.asarray(leaf), axis, 0)
        old = table[: added.start]
        # Blocks, so that float64 takes little memory.
        mean = sum(
            old[start : start + BLOCK_ROWS].astype(np.float64).sum(axis=0)
            for start in range(0, len(old), BLOCK_ROWS)
        ) / len(old)
        grown = np.zeros((config.vocab_size, *table.shape[1:]), leaf.dtype)
        grown[: len(table)] = table
        grown[added.start : added.stop] = mean
        grown = np.ascontiguousarray(np.moveaxis(grown, 0, axis))
        return place_array(grown, placement(mesh, spec.shape, spec.axes))

    return jax.tree.map_with_path(  # type: ignore[no-any-return]
        lambda path, leaf: leaf_of(dotted(path), leaf), params, is_leaf=is_custom
    )
