"""The config of a run: its file and the command line, on top of the model from which the run
starts, if any."""

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from jaxformer.config.config_file import (
    check,
    known_vocabulary,
    parse_fields,
    read_config,
    settings_in,
)
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, RunSettings, named_sources
from jaxformer.config.settings import RUN_SETTING, flat, names_marked, with_settings
from jaxformer.config.train import LaunchConfig, OptimizerConfig
from jaxformer.files import ConfigError, is_remote

if TYPE_CHECKING:
    from jaxformer.runs.model_files import ModelFiles


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a file, with `"section.field=value"` overrides applied.

    `path` is a Python file that defines `config` (or another name: `file.py:name`), or a run's
    `config.json`. With `run.init_from`, the model's settings are those of that model where neither
    file nor overrides say otherwise. Raises ConfigError for a file that is missing or fails, an
    unknown field or a value that is not allowed.
    """
    arguments = []
    for override in overrides:
        name, equals, value = override.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(
                f"override {override!r} has no '=': write it as section.field=value, as in"
                " model.n_layers=2."
            )
        arguments += [f"--{name}", value]
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(message):
            return parse_arguments(read_config(path), arguments, program=str(path))
    except SystemExit as stop:
        raise ConfigError(message.getvalue().strip()) from stop


def parse_arguments(
    config: RunConfig, arguments: Sequence[str], program: str, weights: bool = True
) -> RunConfig:
    """`config` with `--section.field value` arguments applied. Exits with status 0 after --help, 2
    after a mistake. With weights=False the weights of a Hugging Face model to start from need not
    be there."""
    stated = settings_in(arguments)
    if base := stated.get("run.init_from", config.run.init_from):
        # Imported here, because it imports JAX, which a config alone does not need.
        from jaxformer.runs.model_files import ModelFiles

        # The settings of the base are the defaults to which the arguments are applied, so it is
        # needed before tyro parses them. The settings that say where it is are read from the texts
        # of the arguments.
        settings = dataclasses.replace(
            config.run,
            dir=stated.get("run.dir", config.run.dir),
            restart=stated.get("run.restart", str(config.run.restart)) == "True",
        )
        origin = ModelFiles(base, weights).or_begun(settings)
        names = {name.removeprefix("model.") for name in stated}
        config = dataclasses.replace(
            config,
            model=with_base(config.model, origin, base, names),
            tokenizer=origin.with_tokenizer(config.tokenizer),
        )
    before = config
    config = parse_fields(config, arguments, program)
    if "train.steps" in stated and "optimizer.warmup_steps" not in stated:
        optimizer = with_warmup_within(config.optimizer, before.train.steps, config.train.steps)
        config = dataclasses.replace(config, optimizer=optimizer)
    size = config.model.vocab_size or known_vocabulary(config.tokenizer)
    model = dataclasses.replace(config.model, vocab_size=size)
    return check(dataclasses.replace(config, model=model))


def with_warmup_within(optimizer: OptimizerConfig, planned: int, steps: int) -> OptimizerConfig:
    """The settings of an optimizer for a run of `steps` steps, which are fewer than its warm-up. It
    is then the same fraction of the run as of the `planned` steps of its config, with a warning."""
    warmup = optimizer.warmup_steps
    if warmup <= steps or optimizer.decay_steps > warmup:
        return optimizer
    shortened = warmup * steps // planned
    warnings.warn(
        f"optimizer.warmup_steps={warmup} of the config is longer than the run,"
        f" train.steps={steps}, and is {shortened} here, the same fraction of the run as in the"
        " config: state it to choose another.",
        stacklevel=2,
    )
    return dataclasses.replace(optimizer, warmup_steps=shortened)


def with_base(
    model: ModelConfig, origin: "ModelFiles", base: str, stated: AbstractSet[str] = frozenset()
) -> ModelConfig:
    """`model` with the settings of the model `origin` where it sets none itself, for a run with
    run.init_from=`base`.

    A config sets a model setting if it is not the default of `ModelConfig` and not among those
    `stated` on the command line, which are applied later; those marked `RUN_SETTING` are always
    the config's.
    """
    try:
        base_model = origin.config
    except ConfigError as error:
        raise ConfigError(f"run.init_from={base!r}: {error}") from error
    chosen = flat(model)
    default = flat(ModelConfig())
    changed = {name for name, value in chosen.items() if value != default[name]}
    own = {*names_marked(ModelConfig, RUN_SETTING)}
    if chosen["head.pooling"] == "auto" and model.output not in ("classes", "projection"):
        own.remove("head.pooling")  # then that of the vectors of texts, which the base states
    asked = {name: chosen[name] for name in (own | changed) - stated}
    try:
        return with_settings(base_model, asked)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThe config sets these on top of the model of run.init_from={base!r}."
        ) from error


def looked_at(
    files: "ModelFiles",
    cache_dir: str | Path = "",
    train: str = "",
    validation: str = "",
    init_from: str | None = "",
) -> RunConfig:
    """Return the settings of a model for somebody who only looks at it and may not have made it:
    what the run is, without the places, tasks and options of whoever trained it.

    Tokenized text is kept in `cache_dir`, by default that of this user. `train`, `validation` and
    `init_from` replace data.train, data.validation and run.init_from, the last of which is not read
    where it is None. Raises ConfigError for text or a model at a URL or on the hub that they do not
    name, since it is asked for with the credentials of the reader.
    """
    run = files.run
    if run.grpo.reward:
        raise ConfigError(
            f"{files} learned from grpo.reward={run.grpo.reward!r}, a function that whoever made"
            " this directory has chosen and that training alone calls: its metrics.jsonl has the"
            " rewards, and `jaxformer convert` writes a model that can be evaluated on a text."
        )
    unnamed = dict[str, str]()
    if not train:
        unnamed["data.train"] = run.data.train
    if not validation:
        unnamed["data.validation"] = run.data.validation
    if init_from == "":
        unnamed["run.init_from"] = run.run.init_from
    for name, stated in unnamed.items():
        for source in named_sources(stated):
            # The name of a data set may be a directory, which is read without credentials.
            kind, _, rest = source.partition(":")
            folder = Path(rest.partition(":")[0]).expanduser()
            of_hub = kind == "datasets" and not folder.exists()
            if is_remote(source) or of_hub:
                raise ConfigError(
                    f"{files} was trained with {name}={stated!r}, which whoever made this directory"
                    f" has chosen: add --{name} {stated!r} to read it."
                )
    data = dataclasses.replace(
        run.data,
        cache_dir=str(cache_dir or own_cache()),
        train=train or run.data.train,
        validation=validation or run.data.validation,
    )
    tokenizer = dataclasses.replace(run.tokenizer, path=str(files.tokenizer), chat_template="")
    own = RunSettings(
        dir=str(files), init_from=init_from or run.run.init_from, seed=run.run.seed, sample_tokens=0
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
