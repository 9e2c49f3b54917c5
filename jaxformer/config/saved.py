"""A run's config as JSON, with the version of its layout, so that older files stay readable."""

import dataclasses
import json
from typing import Any, get_args

from jaxformer.config.run import PreferenceObjective, RunConfig, flat, suggestion
from jaxformer.files import ConfigError, parse_object

# To be raised when a field is renamed, or when an older reader would misread the file.
VERSION = 2

# By the version that brought the new names: {3: {"model.old_name": "model.new_name"}}.
RENAMED: dict[int, dict[str, str]] = {}

# Settings that are gone, with their defaults: a file that states another value is refused.
REMOVED = {"data.length_warmup": ""}

PREFERENCES = get_args(PreferenceObjective)


def to_json(config: RunConfig) -> str:
    """All settings of a run by section, after the version of their layout."""
    return json.dumps({"version": VERSION} | dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, where: str) -> RunConfig:
    """The inverse of `to_json`; `where` names the file in a ConfigError.

    A file without a version is of version 1. Fields that an older file lacks have their defaults,
    and renamed ones are found under their old names. Raises ConfigError for a file of a newer
    version, for text that is not a config, for unknown sections and fields, all of which it names,
    and for a bad value.

    Where an older file lacks data.cut, data.bos, train.preference_dropout and optimizer.wsd_floor,
    they are what older versions did: "end", "never", "on" and "next_step".

    run.compilation_cache keeps its default: the writer of the file must not choose the directory
    from which this machine loads compiled programs, or in which it stores them.
    """
    written = parse_object(text, where, "give the config.json of a run")
    version = written.pop("version", 1)
    if type(version) is not int or version < 1:
        raise ConfigError(f"{where}: version={version!r} must be a whole number, at least 1.")
    if version > VERSION:
        raise ConfigError(
            f"{where} was written by a newer jaxformer: its version is {version}, and this one"
            f" reads versions 1 to {VERSION}. Upgrade jaxformer to read it."
        )
    values = _dotted(written)
    for later in range(version + 1, VERSION + 1):
        for old, new in RENAMED.get(later, {}).items():
            if old in values:
                values[new] = values.pop(old)
    values.pop("run.compilation_cache", None)
    for name, default in REMOVED.items():
        if values.pop(name, default) != default:
            raise ConfigError(
                f"{where} sets {name}, which this jaxformer no longer has: continue the run with"
                " the version that began it, or begin another one without it (run.init_from takes"
                " the parameters)."
            )
    _keep_former_choices(values)
    settings = flat(RunConfig())
    unknown = [name for name in values if name not in settings]
    if unknown:
        lines = "".join(f"\n  {name}: {_unknown(name)}" for name in unknown)
        raise ConfigError(f"{where} has settings that this jaxformer does not know:{lines}")
    try:
        return RunConfig(
            **{entry.name: _section(entry, values) for entry in dataclasses.fields(RunConfig)}
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _keep_former_choices(values: dict[str, Any]) -> None:
    """Adds the settings that an older file lacks, where what it meant is not today's default."""
    objective = values.get("data.objective")
    if values.get("optimizer.schedule") == "wsd":
        values.setdefault("optimizer.wsd_floor", "next_step")
    if objective == "sft":
        values.setdefault("data.cut", "end")
    # The templates of these objectives write the BOS.
    if objective not in ("sft", *PREFERENCES):
        values.setdefault("data.bos", "never")
    if objective in PREFERENCES and (values.get("model.dropout") or values.get("adapter.dropout")):
        values.setdefault("train.preference_dropout", "on")


def _dotted(written: dict[str, Any]) -> dict[str, Any]:
    """The settings of all sections by `section.field`."""
    values: dict[str, Any] = {}
    for section, entry in written.items():
        if isinstance(entry, dict):
            values |= {f"{section}.{name}": value for name, value in entry.items()}
        else:
            values[section] = entry
    return values


def _section(entry: dataclasses.Field[Any], values: dict[str, Any]) -> Any:
    kind: Any = entry.default_factory
    names = {field.name: f"{entry.name}.{field.name}" for field in dataclasses.fields(kind)}
    return kind(**{field: values[name] for field, name in names.items() if name in values})


def _unknown(name: str) -> str:
    sections = [entry.name for entry in dataclasses.fields(RunConfig)]
    section = name.partition(".")[0]
    if section not in sections:
        return f"there is no such section; the sections are {', '.join(sections)}."
    return suggestion(name) if name != section else "a section must be an object of settings."
