"""Models read from disk: the checkpoint of a run, a Hugging Face directory, or an adapter."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, get_args

from jax.sharding import Mesh

from jaxformer.arrays.params import Params, Specs
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.adapter import Quantization
from jaxformer.config.config_file import check, read_config
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import (
    DataConfig,
    ObjectiveName,
    RunConfig,
    RunSettings,
    TokenizerConfig,
    named_sources,
    to_json,
)
from jaxformer.config.settings import imported_table
from jaxformer.config.train import LaunchConfig, Weights
from jaxformer.files import ConfigError, is_remote, located, write_text
from jaxformer.interop.gguf_files import is_gguf
from jaxformer.interop.hf_config import check_dtype, is_pretrained
from jaxformer.interop.peft_config import base_of, is_adapter
from jaxformer.models.quantize import check_quantization
from jaxformer.models.quantize import quantize as quantize_params
from jaxformer.models.transformer import specs as model_specs
from jaxformer.runs.added_tokens import new_rows_of, with_new_rows
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.run_reading import (
    SavedWeights,
    adapted_params_of_run,
    base_directory,
    no_average,
    params_of_run,
    require_base,
    require_tokenizer,
)
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import tokenizer_file

# The longest row when a model directory is evaluated, which does not say how it was trained.
MOST_EVALUATION_TOKENS = 1024


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
    base: str = ""
    learned: tuple[str, ...] = ()
    step: int | None = None
    problem_type: str = ""


class Reading(TypedDict, total=False):
    """Keywords of `load` that functions around it pass on."""

    quantize: Quantization | None
    weights: Weights


def load(
    path: str | Path,
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
    folder = located(path)
    if quantize is not None:
        check_quantization(quantize)
    check_dtype(dtype)
    if weights not in get_args(Weights):
        raise ConfigError(f"weights={weights!r} is not one of {', '.join(get_args(Weights))}.")
    if weights == "average" and (is_adapter(folder) or is_gguf(folder) or is_pretrained(folder)):
        raise ConfigError(no_average(folder))
    if is_adapter(folder):
        from jaxformer.interop.peft_reading import adapted_config, learned_of, read_adapter

        if step is not None:
            raise ConfigError(f"{folder} is an adapter, which has no steps: leave out step={step}.")
        base_dir = base_of(folder, base)
        below = load(base_dir, mesh=mesh, dtype=dtype, quantize=quantize)
        config, params, labels = adapted_config(folder, below.config), below.params, below.labels
        problem_type = below.problem_type
        if config != below.config:
            # The adapter has a head of its own.
            shared_names = model_specs(config).keys() - {"head"}
            params = {name: branch for name, branch in params.items() if name in shared_names}
            labels, problem_type = (), ""
        return Loaded(
            read_adapter(folder, params, config),
            config,
            Tokenizer.find(folder) or below.tokenizer,
            labels,
            str(base_dir),
            learned_of(folder, config),
            problem_type=problem_type,
        )
    from_gguf = is_gguf(folder)
    if not from_gguf:
        require_config(folder)
    if from_gguf or is_pretrained(folder):
        if base is not None:
            raise ConfigError(f"{folder} is no adapter: leave out base={str(base)!r}.")
        if step is not None:
            kind = "GGUF file" if from_gguf else "Hugging Face directory"
            raise ConfigError(f"{folder} is a {kind}, which has no steps: leave out step={step}.")
        from jaxformer.interop.pretrained import load_pretrained

        params, opened = load_pretrained(folder, mesh, dtype, quantize)
        tokenizer = (
            Tokenizer.of_gguf(opened.files.metadata, str(folder))
            if from_gguf
            else Tokenizer.find(folder)
        )
        return Loaded(
            params, opened.config, tokenizer, opened.labels, problem_type=opened.problem_type
        )
    return _load_run(folder, step, mesh, dtype, quantize, base, weights)


def _load_run(
    run_dir: Path,
    step: int | None,
    mesh: Mesh | None,
    dtype: str,
    quantize: Quantization | None,
    base: str | Path | None,
    weights: Weights,
) -> Loaded:
    run, record = read_config(run_dir / "config.json"), RunDirectory(run_dir).record()
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
    base_dir = base_directory(run_dir, run.run.init_from, record, base)
    loaded_base = load_base(base_dir, mesh, kind)
    below, added = loaded_base.params, range(0)
    if run.tokenizer.added:
        # The tokenizer of the run says which rows are those of the added tokens.
        new = new_rows_of(run.tokenizer, Tokenizer.load(run_dir), run.model.vocab_size)
        below = with_new_rows(below, loaded_base.config, new, mesh)
        added = range(new.first, new.stop)
    require_base(run_dir, base_dir, below, record)
    if kind is None and quantize is not None:
        below = quantize_params(below, quantize)
    learned = tuple(record.get("learned", ()))
    table = adapted_table(run.model, run.adapter, learned, added) | brought
    params, step = adapted_params_of_run(saved, table, below, mesh, dtype)
    return Loaded(params, run.model, tokenizer, labels, str(base_dir), learned, step)


def load_base(
    path: str | Path, mesh: Mesh | None = None, quantize: Quantization | None = None
) -> Loaded:
    """A model to start from: an adapter there is merged, and then the parameters are quantized."""
    if not has_adapter(located(path)):
        return load(path, mesh=mesh, quantize=quantize)
    from jaxformer.adapters.adapted_params import merge

    loaded = load(path, mesh=mesh)
    merged = merge(loaded.params)
    params = quantize_params(merged, quantize) if quantize else merged
    return dataclasses.replace(loaded, params=params)


def is_model(folder: Path) -> bool:
    """Whether a path is that of a run, a Hugging Face directory, an adapter or a GGUF file."""
    return is_adapter(folder) or is_gguf(folder) or (folder / "config.json").is_file()


def has_adapter(folder: Path) -> bool:
    """Whether a directory is that of an adapter, or of a run with one."""
    if is_adapter(folder):
        return True
    return (folder / "config.json").is_file() and run_of(folder).adapter.kind != "none"


def require_config(folder: Path) -> None:
    """Raises ConfigError for what is neither a run nor a model directory."""
    if not (folder / "config.json").is_file():
        hub = "" if folder.exists() else f" (hf download {folder} --local-dir DIRECTORY gets one)"
        raise ConfigError(
            f"{folder} has no config.json: give the run.dir of a training run, or a Hugging Face"
            f" model directory{hub}."
        )


def run_of(path: str | Path, weights: bool = True) -> RunConfig:
    """The settings of a run directory, or those with which a Hugging Face directory, a GGUF file or
    an adapter is evaluated; with weights=False the weights of a Hugging Face directory need not be
    there."""
    folder = located(path)
    if is_adapter(folder):
        from jaxformer.interop.peft_reading import adapted_config

        model = adapted_config(folder, run_of(base_of(folder), weights).model)
    elif is_gguf(folder) or is_pretrained(folder):
        from jaxformer.interop.pretrained import pretrained_config

        model = pretrained_config(folder, weights)
    else:
        require_config(folder)
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


def require_exclusive(model: Loaded, path: str | Path) -> None:
    """ConfigError for a head whose classes are not those of which each text has one, as a run's."""
    if model.config.output == "classes" and (
        model.problem_type in ("multi_label_classification", "regression")
        or model.config.n_classes == 1
    ):
        raise ConfigError(
            f"{path} has a head of {model.config.n_classes} classes with problem_type="
            f"{model.problem_type!r}, and a run learns and measures one class of several:"
            " `jaxformer predict` gives the numbers of this head."
        )


def labels_of(path: str | Path) -> tuple[str, ...]:
    """The names of the classes or tags of a model directory, in the order of their numbers; empty
    where it has or names none."""
    folder = located(path)
    if is_adapter(folder):
        base_dir = base_of(folder)
        return labels_of(base_dir) if run_of(folder).model == run_of(base_dir).model else ()
    if not is_pretrained(folder):
        return tuple(RunDirectory(folder).record().get("labels", ()))
    from jaxformer.interop.pretrained import pretrained_labels

    return pretrained_labels(folder)


def lacks_weights(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory, or an adapter over one, whose weights are not
    there."""
    folder = located(path)
    if is_adapter(folder):
        return lacks_weights(base_of(folder))
    from jaxformer.interop.tensor_files import has_tensors

    return is_pretrained(folder) and not has_tensors(folder)


def text_directory(path: str | Path) -> Path:
    """The directory with the tokenizer of a model: for an adapter without one, that of its base."""
    folder = located(path)
    if is_adapter(folder) and not tokenizer_file(folder).is_file():
        return text_directory(base_of(folder))
    return folder


def looked_at(
    run: RunConfig,
    path: str | Path,
    cache_dir: str | Path = "",
    train: str = "",
    validation: str = "",
    init_from: str | None = "",
) -> RunConfig:
    """The config of the model directory `path` for somebody who only looks at it and may not have
    made it: what the run is, without the places, tasks and options of whoever trained it.

    Tokenized text is kept in `cache_dir`, by default that of this user. `train`, `validation` and
    `init_from` replace data.train, data.validation and run.init_from, the last of which is not read
    where it is None. Raises ConfigError for text or a model at a URL or on the hub that they do not
    name, since it is asked for with the credentials of the reader.
    """
    stated_and_named = {
        "data.train": (run.data.train, train),
        "data.validation": (run.data.validation, validation),
        "run.init_from": (run.run.init_from, init_from),
    }
    for name, (stated, named) in stated_and_named.items():
        for source in named_sources(stated) if named == "" else ():
            of_hub = source.startswith("datasets:") and not Path(source[9:]).exists()
            if is_remote(source) or of_hub:
                raise ConfigError(
                    f"{path} was trained with {name}={stated!r}, which whoever made this directory"
                    f" has chosen: add --{name} {stated!r} to read it."
                )
    data = dataclasses.replace(
        run.data,
        cache_dir=str(cache_dir or own_cache()),
        train=train or run.data.train,
        validation=validation or run.data.validation,
    )
    folder = located(path)
    tokenizer = dataclasses.replace(
        run.tokenizer, path=str(tokenizer_file(text_directory(folder))), chat_template=""
    )
    own = RunSettings(
        dir=str(folder),
        init_from=init_from or run.run.init_from,
        seed=run.run.seed,
        sample_tokens=0,
    )
    shown = dataclasses.replace(
        run,
        run=own,
        data=data,
        tokenizer=tokenizer,
        train=dataclasses.replace(run.train, eval_tasks="", eval_tasks_every=0),
        launch=LaunchConfig(),
    )
    return check(shown)


def own_cache() -> str:
    """The directory in which this user keeps tokenized text: that of the environment variable
    JAXFORMER_DATA_CACHE, else the default of data.cache_dir."""
    return os.environ.get("JAXFORMER_DATA_CACHE") or DataConfig.cache_dir


def save_run(target: Path, model: Loaded, origin: Path, run_dir: Path | None = None) -> None:
    """Writes a model, read from the model directory `origin`, as a run directory with one
    checkpoint, of step 0. `run_dir` is its path, if it is moved afterwards."""
    run_dir = run_dir or target
    require_exclusive(model, origin)
    if model.tokenizer is not None:
        model.tokenizer.save(target / "tokenizer.json", follow=False)
    with Checkpoints(target) as checkpoints:
        checkpoints.save({"params": model.params}, 0)
    if model.labels:
        named = json.dumps({"labels": list(model.labels)}) + "\n"
        write_text(target / "data.json", named, follow=False)
    settings, tokenizer = RunSettings(dir=str(run_dir)), TokenizerConfig(path=str(run_dir))
    run = dataclasses.replace(run_of(origin), run=settings, tokenizer=tokenizer)
    write_text(target / "config.json", to_json(run), follow=False)
