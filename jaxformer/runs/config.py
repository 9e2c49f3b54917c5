"""The config of a run: its file and the command line, on top of the model from which the run
starts, if any."""

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from jaxformer.config.config_file import (
    check,
    known_vocabulary,
    parse_fields,
    read_config,
    settings_in,
)
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig, TokenizerConfig
from jaxformer.config.variants import SECOND_HEADS
from jaxformer.files import ConfigError, located

# Model settings that say how a model is computed and trained, and not what its weights mean.
OF_THE_PROGRAM = (
    "dropout",
    "attention_dropout",
    "dtype",
    "layer_loop",
    "remat",
    "attention_kernel",
    "expert_kernel",
)
# Model settings that a new run does not take from the model it starts from.
OWN = ("head", "n_classes", "pooling", *SECOND_HEADS, *OF_THE_PROGRAM)


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
        run_dir = located(stated.get("run.dir", config.run.dir))
        names = {name.removeprefix("model.") for name in stated}
        origin = origin_of(run_dir, located(base))
        config = dataclasses.replace(
            config,
            model=with_base(config.model, origin, base, names, weights),
            tokenizer=with_tokenizer_of(origin, config.tokenizer),
        )
    config = parse_fields(config, arguments, program)
    size = config.model.vocab_size or known_vocabulary(config.tokenizer)
    model = dataclasses.replace(config.model, vocab_size=size)
    return check(dataclasses.replace(config, model=model))


def origin_of(run_dir: Path, base: Path) -> Path:
    """Where a run with run.init_from finds its model and tokenizer: in its own directory if it was
    begun already, else in `base`."""
    return run_dir if (run_dir / "config.json").is_file() else base


def with_base(
    model: ModelConfig,
    origin: Path,
    base: str,
    stated: AbstractSet[str] = frozenset(),
    weights: bool = True,
) -> ModelConfig:
    """`model` with the settings of the model directory `origin` where it sets none itself, for a
    run with run.init_from=`base`.

    A config sets a model setting if it is not the default of `ModelConfig` and not among those
    `stated` on the command line, which are applied later; those of `OWN` are always the config's.
    `weights` is that of `loading.run_of`.
    """
    # Imported here, because it imports JAX, which a config alone does not need.
    from jaxformer.runs.loading import is_model, run_of

    if not is_model(origin):
        raise ConfigError(
            f"run.init_from={base!r} has no config.json: give a run directory, one of a Hugging"
            " Face model or an adapter, or a GGUF file."
        )

    chosen, default = dataclasses.asdict(model), dataclasses.asdict(ModelConfig())
    changed = {name for name, value in chosen.items() if value != default[name]}
    own = {*OWN}
    if chosen["pooling"] == "auto" and model.output not in ("classes", "projection"):
        own.remove("pooling")  # then that of the vectors of texts, which the base states
    asked = {name: chosen[name] for name in (own | changed) - stated}
    try:
        return dataclasses.replace(run_of(origin, weights).model, **asked)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThe config sets these on top of the model of run.init_from={base!r}."
        ) from error


def with_tokenizer_of(origin: Path, settings: TokenizerConfig) -> TokenizerConfig:
    """`settings` with the tokenizer of a model directory if they name none."""
    from jaxformer.tokenizer.metadata import tokenizer_file

    if settings.path:
        return settings
    if (origin / "adapter_config.json").is_file():
        from jaxformer.runs.loading import text_directory

        origin = text_directory(origin)
    return dataclasses.replace(settings, path=str(tokenizer_file(origin)))
