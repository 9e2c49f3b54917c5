"""Configs from files, from the command line, and back from a run directory."""

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxformer.config import ConfigError, RunConfig, flat, named_sources
from jaxformer.config_json import from_json
from jaxformer.settings import choices

BYTE_VOCABULARY = 257  # 256 bytes and the end-of-text token
# fields that say nothing about the numbers of a run, so a continued run may change them
VOLATILE = (
    *(
        "data.train",
        "data.validation",
        "tokenizer.path",
    ),  # these may move; what they hold is held against data.json
    *("run.dir", "run.compilation_cache", "run.progress", "run.sample_prompt", "run.sample_tokens"),
    *(
        "data.cache_dir",
        "data.prefetch",
        "mesh.data",
        "mesh.fsdp",
        "mesh.tensor",
        "model.attention_kernel",
    ),
    *(
        "model.layer_loop",
        "model.remat",
        "train.steps",
        "train.log_every",
        "train.eval_every",
        "train.eval_batches",
    ),
    *("train.checkpoint_every", "train.keep_checkpoints"),
)


def parse_fields(config: RunConfig, arguments: Sequence[str], program: str) -> RunConfig:
    """`config` with `--section.field value` arguments applied, not yet checked as a whole.

    Exits as a command does: 0 for --help, 2 for a mistake.
    """
    import tyro

    _require_fields(arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The field .* is annotated with type .*Literal")
        return tyro.cli(
            RunConfig,
            prog=program,
            description="Every field can be set; the defaults shown are those of the config file.",
            args=arguments,
            default=config,
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
            registry=_registry(),
        )


def _registry() -> Any:
    """How tyro reads a setting of named values, with the rows that were added to its table."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def named(info: Any) -> Any:
        # tyro widens the type to Union[Literal, str] where the default is an added name.
        kinds = [kind for kind in (info.type, *get_args(info.type)) if get_origin(kind) is Literal]
        if not kinds:
            return None
        allowed = choices(kinds[0])
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(allowed) + "}",
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: value in allowed,
            str_from_instance=lambda value: [value],
            choices=allowed,
        )

    return registry


def read_config(path: str | Path) -> RunConfig:
    """The config as its file states it, not yet checked as a whole."""
    file, _, name = str(path).partition(":")
    source = Path(file)
    if not source.is_file():
        raise ConfigError(
            f"config {file}: no such file. Give a Python file that defines `config`, as in"
            " configs/quickstart.py."
        )
    if source.suffix == ".json":
        return from_json(source.read_text(encoding="utf-8"), str(source))
    if source.suffix != ".py":
        raise ConfigError(
            f"config {file}: neither a Python file (.py) nor the config.json of a run."
        )
    try:
        with _importable(source.parent):
            spec = importlib.util.spec_from_file_location(f"jaxformer_config_{source.stem}", source)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
    except ConfigError as error:
        raise ConfigError(f"config {file}: {error}") from error
    except Exception as error:
        line = next(
            (
                f.lineno
                for f in reversed(traceback.extract_tb(error.__traceback__))
                if f.filename == str(source)
            ),
            "?",
        )
        raise ConfigError(
            f"config {file}, line {getattr(error, 'lineno', line)}: {type(error).__name__}:"
            f" {error}{_meant(error)}"
        ) from error
    found = getattr(module, name or "config", None)
    if not isinstance(found, RunConfig):
        named = [key for key, value in vars(module).items() if isinstance(value, RunConfig)]
        raise ConfigError(
            f"config {file} defines no RunConfig named {name or 'config'!r}; it defines"
            f" {named or 'none'}."
        )
    return found


def _meant(error: Exception) -> str:
    """Which field an unknown one in a config file may stand for."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return f". {_instead_of(unknown[1])}" if unknown else ""


def _require_fields(arguments: Sequence[str]) -> None:
    """ConfigError for the first `--section.field` that there is not, with the field that was
    meant."""
    known = {*flat(RunConfig()), "help"}
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name not in known:
            raise ConfigError(f"there is no setting {name}. {_instead_of(name)}")


def _instead_of(unknown: str) -> str:
    """The settings that a wrong name resembles, or else those of its section."""
    section, _, field = unknown.rpartition(".")
    fields = {name: name.rpartition(".")[2] for name in flat(RunConfig())}
    near = difflib.get_close_matches(field, fields.values())
    close = [name for name, last in fields.items() if last in near[:1]] or [
        name for name in fields if name.partition(".")[0] == section
    ]
    if not close:
        sections = dict.fromkeys(name.partition(".")[0] for name in fields)
        return (
            f"Settings are named section.field, in the sections {', '.join(sections)}; CONFIG"
            " --help lists them."
        )
    meant = (
        f"Perhaps you meant {' or '.join(close[:3])}"
        if near
        else f"Those of {section} are {', '.join(close)}"
    )
    return f"{meant}; CONFIG --help tells of each."


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def with_vocabulary(config: RunConfig, size: int = 0) -> RunConfig:
    """`config` with model.vocab_size filled where it is 0 and the tokenizer's size is known (or
    given as `size`)."""
    kind = "given" if _has_tokenizer(config) else config.tokenizer.kind
    known = size or {"bpe": config.tokenizer.vocab_size, "bytes": BYTE_VOCABULARY}.get(kind, 0)
    if config.model.vocab_size or not known:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=known))


def _has_tokenizer(config: RunConfig) -> bool:
    """Whether the tokenizer is there already: named, or in a prepared directory that data.train
    names."""
    return bool(config.tokenizer.path) or any(
        os.path.isfile(os.path.join(os.path.expanduser(spec), "tokenizer.json"))
        for spec in named_sources(config.data.train)
    )


def check(config: RunConfig) -> RunConfig:
    """`config`, or ConfigError where two sections contradict each other."""
    problems = []
    if config.data.sequence_length > config.model.max_length:
        problems.append(
            f"data.sequence_length={config.data.sequence_length} is longer than"
            f" model.max_length={config.model.max_length}: raise model.max_length or shorten the"
            " sequences."
        )
    trained = config.tokenizer.kind == "bpe" and not _has_tokenizer(config)
    if trained and 0 < config.model.vocab_size < config.tokenizer.vocab_size:
        problems.append(
            f"tokenizer.vocab_size={config.tokenizer.vocab_size} exceeds"
            f" model.vocab_size={config.model.vocab_size}: raise model.vocab_size, or set it to 0"
            " to follow the tokenizer."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def differences(written: RunConfig, asked: RunConfig) -> list[str]:
    """A line for each field that changes the numbers of a run and differs between the two."""
    before, now = flat(written), flat(asked)
    return [
        f"{name}: {before[name]!r} there, {now[name]!r} asked for"
        for name in now
        if name not in VOLATILE and before[name] != now[name]
    ]
