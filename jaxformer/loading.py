"""Models read from disk: the checkpoint of a run, or a Hugging Face directory."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.checkpoint_reading import Damaged, flat_leaves, read_checkpoint, saved_steps
from jaxformer.checkpoints import Checkpoints
from jaxformer.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    Quantization,
    RunConfig,
    RunSettings,
    TokenizerConfig,
)
from jaxformer.config_file import read_config
from jaxformer.config_json import to_json
from jaxformer.files import read_object, write_text
from jaxformer.interop.hf_config import check_dtype, is_pretrained
from jaxformer.mesh import parameter_sharding
from jaxformer.models.quantize import check_quantization, is_quantized, quantized_leaf
from jaxformer.models.transformer import specs as model_specs
from jaxformer.params import Params, Spec, map_specs, rows
from jaxformer.tokenizer import Tokenizer

# The longest row when a model directory is evaluated, which does not say how it was trained.
MOST_EVALUATION_TOKENS = 1024


@dataclass(frozen=True)
class Loaded:
    """A model read from disk. `tokenizer` is None where the directory has none; `labels` are the
    names of its classes."""

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    labels: tuple[str, ...] = ()


def load(
    path: str | Path,
    step: int | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    quantize: Quantization | None = None,
) -> Loaded:
    """The model of a run directory (its newest readable checkpoint, or that of `step`) or of a
    Hugging Face directory.

    Leaves go straight to their place on `mesh`, or to this machine's first device, as `dtype`
    (float32, bfloat16, float16). With `quantize` ("int8" or "nf4") the matrices of the blocks are
    quantized as by `jf.quantize`, each before the next leaf is read: neither host nor device ever
    holds the whole model unquantized. Raises ConfigError if `path` is neither, has no such step or
    cannot be read, or if its architecture, an option or a tensor is not supported.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        hub = "" if folder.exists() else f" (hf download {path} --local-dir DIRECTORY gets one)"
        raise ConfigError(
            f"{folder} has no config.json: give the run.dir of a training run, or a Hugging Face"
            f" model directory{hub}."
        )
    check_dtype(dtype)
    if quantize is not None:
        check_quantization(quantize)
    tokenizer = Tokenizer.find(folder)
    if is_pretrained(folder):
        if step is not None:
            raise ConfigError(
                f"{folder} is a Hugging Face directory, which has no steps: leave out step={step}."
            )
        from jaxformer.interop.pretrained import load_pretrained

        found = load_pretrained(folder, mesh, dtype, quantize)
        return Loaded(found.params, found.config, tokenizer, found.labels)
    return _load_run(folder, step, tokenizer, mesh, dtype, quantize)


def _load_run(
    run_dir: Path,
    step: int | None,
    tokenizer: Tokenizer | None,
    mesh: Mesh | None,
    dtype: str,
    quantize: Quantization | None,
) -> Loaded:
    config = read_config(run_dir / "config.json").model
    record = _record(run_dir)
    _require_tokenizer(run_dir, tokenizer, record)
    steps = saved_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        held = f"it holds steps {steps}" if steps else "training has not saved one yet"
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ConfigError(f"{run_dir} has {missing}: {held}.")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(_: str, spec: Spec) -> jax.ShapeDtypeStruct:
        place = here if mesh is None else parameter_sharding(mesh, spec.shape, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=place)

    table = model_specs(config)
    shapes = map_specs(shape, table)
    wanted = flat_leaves({"params": shapes})
    matrices = {f"params.{path}": spec for path, spec in rows(table).items() if is_quantized(spec)}
    errors, folder = [], run_dir.absolute() / "checkpoints"
    for candidate in [step] if step is not None else reversed(steps):
        try:
            read = functools.partial(read_checkpoint, folder, candidate, whole=False, run=record)
            leaves = _quantized(read, wanted, matrices, dtype, quantize)
        except Damaged as error:
            errors.append(f"step {candidate}: {error}")
            said = f"a checkpoint of {run_dir} cannot be read; an older one is used: {errors[-1]}"
            warnings.warn(said, stacklevel=2)
            continue
        params = jax.tree.unflatten(jax.tree.structure(shapes), list(leaves.values()))
        return Loaded(params, config, tokenizer, tuple(record.get("labels", ())))
    raise ConfigError(f"no checkpoint of {run_dir} can be read:\n  " + "\n  ".join(errors))


def _quantized(
    read: Callable[[dict[str, Any]], dict[str, jax.Array]],
    wanted: dict[str, Any],
    matrices: Mapping[str, Spec],
    dtype: str,
    quantize: Quantization | None,
) -> dict[str, Any]:
    """The leaves that `read` gives, as `dtype`; where they are quantized, each of the `matrices` is
    read by itself, after all others."""
    together = {path: leaf for path, leaf in wanted.items() if not (quantize and path in matrices)}
    found: dict[str, Any] = {path: leaf.astype(dtype) for path, leaf in read(together).items()}
    for path in (path for path in wanted if path not in together):
        weight = read({path: wanted[path]})[path].astype(dtype)
        leaf = quantized_leaf(path, weight, matrices[path], quantize)  # type: ignore[arg-type]
        found[path] = jax.block_until_ready(leaf)
    return {path: found[path] for path in wanted}


def run_of(path: str | Path) -> RunConfig:
    """The settings of a run directory, or those with which a Hugging Face directory is evaluated.

    Raises ConfigError if `path` is neither.
    """
    folder = Path(path)
    if not is_pretrained(folder):
        return read_config(folder / "config.json")
    from jaxformer.interop.pretrained import pretrained_config

    model = pretrained_config(folder)
    length = min(model.max_length, MOST_EVALUATION_TOKENS)
    has_source = model.family == "encoder_decoder"
    return RunConfig(
        run=RunSettings(dir=str(folder)),
        model=model,
        data=DataConfig(
            train="", sequence_length=length, objective="seq2seq" if has_source else "auto"
        ),
        tokenizer=TokenizerConfig(path=str(folder)),
    )


def save_run(target: Path, model: Loaded, origin: Path) -> None:
    """Writes a model, read from the model directory `origin`, as a run directory with one
    checkpoint, of step 0."""
    if model.tokenizer is not None:
        model.tokenizer.save(target / "tokenizer.json")
    with Checkpoints(target) as checkpoints:
        checkpoints.save({"params": model.params}, 0)
    if model.labels:
        write_text(target / "data.json", json.dumps({"labels": list(model.labels)}) + "\n")
    settings, tokenizer = RunSettings(dir=str(target)), TokenizerConfig(path=str(target))
    run = dataclasses.replace(run_of(origin), run=settings, tokenizer=tokenizer)
    write_text(target / "config.json", to_json(run))


def _record(run_dir: Path) -> dict[str, Any]:
    """What data.json of a run directory holds; nothing where there is none. Raises ConfigError."""
    path = run_dir / "data.json"
    record = read_object(path) if path.exists() else {}
    labels = record.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        shown = json.dumps(labels)[:80]
        raise ConfigError(f"{path}: labels={shown} must be a list of names: restore the file.")
    return record


def _require_tokenizer(
    run_dir: Path, tokenizer: Tokenizer | None, record: Mapping[str, Any]
) -> None:
    """Raises ConfigError if the tokenizer is not the one that the run was trained with."""
    wanted = record.get("tokenizer")
    found = tokenizer.fingerprint() if tokenizer is not None else None
    if wanted is not None and found is not None and wanted != found:
        raise ConfigError(
            f"{run_dir}/tokenizer.json is not the one that the run was trained with: its"
            f" fingerprint is {found}, and data.json has {wanted}. Restore the file: the same train"
            " command writes it again. To use this tokenizer with the model all the same, convert"
            " the run to a Hugging Face directory first, and replace it there."
        )
