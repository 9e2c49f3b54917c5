"""Models read from disk: the checkpoint of a run, a Hugging Face directory, or an adapter."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
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
    RunConfig,
    RunSettings,
    TokenizerConfig,
)
from jaxformer.config_file import read_config
from jaxformer.config_json import to_json
from jaxformer.files import read_object, write_text
from jaxformer.interop.hf_config import check_dtype, is_pretrained
from jaxformer.interop.peft_config import ADAPTER_CONFIG, base_of, is_adapter
from jaxformer.mesh import parameter_sharding
from jaxformer.models.transformer import specs as model_specs
from jaxformer.params import Params, Spec, map_specs
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.files import tokenizer_file

# The longest row when a model directory is evaluated, which does not say how it was trained.
MOST_EVALUATION_TOKENS = 1024


@dataclass(frozen=True)
class Loaded:
    """A model read from disk. `tokenizer` is None where the directory has none; `labels` are the
    names of its classes. Where `params` have an adapter, `base` is the directory of the model below
    it, and `learned` are the branches of the params that learned with it."""

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    labels: tuple[str, ...] = ()
    base: str = ""
    learned: tuple[str, ...] = ()


def load(
    path: str | Path,
    step: int | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    base: str | Path | None = None,
) -> Loaded:
    """The model of a run directory (its newest readable checkpoint, or that of `step`), of a
    Hugging Face directory, or of an adapter in peft's format, over the base that it names or
    `base`.

    Leaves go straight to their place on `mesh`, or to this machine's first device, as `dtype`
    (float32, bfloat16, float16); those of an adapter are float32, and `jf.merge` adds them to its
    base. Raises ConfigError if `path` is none of these, has no such step or cannot be read, or if
    its architecture, an option or a tensor is not supported.
    """
    folder = Path(path)
    if is_adapter(folder):
        return _load_adapter(folder, step, mesh, dtype, base)
    if base is not None:
        raise ConfigError(
            f"{folder} is no adapter ({ADAPTER_CONFIG}): leave out base={str(base)!r}."
        )
    if not (folder / "config.json").is_file():
        hub = "" if folder.exists() else f" (hf download {path} --local-dir DIRECTORY gets one)"
        raise ConfigError(
            f"{folder} has no config.json: give the run.dir of a training run, or a Hugging Face"
            f" model directory{hub}."
        )
    check_dtype(dtype)
    tokenizer = Tokenizer.find(folder)
    if is_pretrained(folder):
        if step is not None:
            raise ConfigError(
                f"{folder} is a Hugging Face directory, which has no steps: leave out step={step}."
            )
        from jaxformer.interop.pretrained import load_pretrained

        found = load_pretrained(folder, mesh, dtype)
        return Loaded(found.params, found.config, tokenizer, found.labels)
    return _load_run(folder, step, tokenizer, mesh, dtype)


def _load_adapter(
    folder: Path, step: int | None, mesh: Mesh | None, dtype: str, base: str | Path | None
) -> Loaded:
    from jaxformer.interop.peft_read import adapted_config, learned_of, read_adapter

    if step is not None:
        raise ConfigError(f"{folder} is an adapter, which has no steps: leave out step={step}.")
    place = base_of(folder, base)
    below = load(place, mesh=mesh, dtype=dtype)
    config, params, labels = adapted_config(folder, below.config), below.params, below.labels
    if config != below.config:  # another head, which the adapter brings
        kept = model_specs(config).keys() - {"head"}
        params, labels = {name: part for name, part in params.items() if name in kept}, ()
    params = read_adapter(folder, params, config)
    tokenizer, learned = Tokenizer.find(folder) or below.tokenizer, learned_of(folder, config)
    return Loaded(params, config, tokenizer, labels, str(place), learned)


def _load_run(
    run_dir: Path, step: int | None, tokenizer: Tokenizer | None, mesh: Mesh | None, dtype: str
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

    shapes = map_specs(shape, model_specs(config))
    wanted = flat_leaves({"params": shapes})
    errors, folder = [], run_dir.absolute() / "checkpoints"
    for candidate in [step] if step is not None else reversed(steps):
        try:
            leaves = read_checkpoint(folder, candidate, wanted, whole=False, run=record)
        except Damaged as error:
            errors.append(f"step {candidate}: {error}")
            said = f"a checkpoint of {run_dir} cannot be read; an older one is used: {errors[-1]}"
            warnings.warn(said, stacklevel=2)
            continue
        typed = [leaf.astype(dtype) for leaf in leaves.values()]
        params = jax.tree.unflatten(jax.tree.structure(shapes), typed)
        return Loaded(params, config, tokenizer, tuple(record.get("labels", ())))
    raise ConfigError(f"no checkpoint of {run_dir} can be read:\n  " + "\n  ".join(errors))


def run_of(path: str | Path) -> RunConfig:
    """The settings of a run directory, or those with which a Hugging Face directory or an adapter
    is evaluated.

    Raises ConfigError if `path` is none of these.
    """
    folder = Path(path)
    model = _model_of(folder)
    if model is None:
        return read_config(folder / "config.json")
    length = min(model.max_length, MOST_EVALUATION_TOKENS)
    has_source = model.family == "encoder_decoder"
    return RunConfig(
        run=RunSettings(dir=str(folder)),
        model=model,
        data=DataConfig(
            train="", sequence_length=length, objective="seq2seq" if has_source else "auto"
        ),
        tokenizer=TokenizerConfig(path=str(text_directory(folder))),
    )


def _model_of(folder: Path) -> ModelConfig | None:
    """The config of a model that says nothing of its training; None for a run."""
    if is_adapter(folder):
        from jaxformer.interop.peft_read import adapted_config

        return adapted_config(folder, run_of(base_of(folder)).model)
    if not is_pretrained(folder):
        return None
    from jaxformer.interop.pretrained import pretrained_config

    return pretrained_config(folder)


def text_directory(path: str | Path) -> Path:
    """The directory with the tokenizer of a model: for an adapter without one, that of its base."""
    folder = Path(path)
    if is_adapter(folder) and not tokenizer_file(folder).is_file():
        return text_directory(base_of(folder))
    return folder


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
