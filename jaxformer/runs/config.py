"""The config of a run: its file and the command line, over the model that the run begins from, if
it begins from one."""

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.config_file import check, parse_fields, read_config, with_vocabulary

# What a new run decides for itself, whatever the model it begins from has.
OWN = (
    "head",
    "n_classes",
    "pooling",
    "next_sentence",
    "dropout",
    "dtype",
    "layer_loop",
    "remat",
    "attention_kernel",
)


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


def parse_arguments(config: RunConfig, arguments: Sequence[str], program: str) -> RunConfig:
    """`config` with `--section.field value` arguments applied; exits as a command does: 0 for
    --help, 2 for a mistake."""
    if base := _given(arguments, "run.init_from", config.run.init_from):
        stated = {_name(argument).removeprefix("model.") for argument in arguments}
        config = with_base(
            config, Path(base), Path(_given(arguments, "run.dir", config.run.dir)), stated
        )
    return check(with_vocabulary(parse_fields(config, arguments, program)))


def with_base(
    config: RunConfig, base: Path, run_dir: Path, stated: AbstractSet[str] = frozenset()
) -> RunConfig:
    """`config` with the model's settings and the tokenizer of `base`, where it does not ask for
    others itself.

    A setting of the model is asked for where it is not the default of `ModelConfig`, but for those
    that the command line states and so decides (`stated`); those of `OWN` are always the config's.
    A run that was begun already in `run_dir` keeps the settings it has. Raises ConfigError where
    neither is there, or the settings asked for contradict those of the base.
    """
    origin = run_dir if (run_dir / "config.json").is_file() else base
    if not (origin / "config.json").is_file():
        raise ConfigError(
            f"run.init_from={str(base)!r} has no config.json: give a run directory, or one of a"
            " Hugging Face model."
        )
    from jaxformer.loading import run_of  # with it comes JAX, which a config alone can do without
    from jaxformer.tokenizer.files import tokenizer_file

    asked = {name: getattr(config.model, name) for name in {*OWN, *_changed(config.model)} - stated}
    try:
        model = dataclasses.replace(run_of(origin).model, **asked)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThese settings are asked for on top of run.init_from={str(base)!r}."
        ) from error
    tokenizer = config.tokenizer
    if not tokenizer.path:
        tokenizer = dataclasses.replace(tokenizer, path=str(tokenizer_file(origin)))
    return dataclasses.replace(config, model=model, tokenizer=tokenizer)


def _changed(model: ModelConfig) -> list[str]:
    """The settings that are not the default."""
    return [
        entry.name
        for entry in dataclasses.fields(model)
        if getattr(model, entry.name) != getattr(ModelConfig(), entry.name)
    ]


def _given(arguments: Sequence[str], name: str, default: str) -> str:
    """The value of a setting on the command line, or else the default."""
    value: Any = default
    for at, argument in enumerate(arguments):
        _, equals, rest = argument.partition("=")
        if _name(argument) == name:
            value = rest if equals else (arguments[at + 1] if at + 1 < len(arguments) else default)
    return str(value)


def _name(argument: str) -> str:
    """`section.field` of an argument `--section.field` or `--section.field=value`; empty for a
    value."""
    return (
        argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--")
        else ""
    )
