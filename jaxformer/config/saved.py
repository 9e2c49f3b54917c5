"""A run's config as JSON, with the version of its layout."""

import dataclasses
import json
from typing import Any

from jaxformer.config.run import RunConfig, flat, suggestion
from jaxformer.files import ConfigError, parse_object

# To be raised when a setting is renamed or removed, or means something else than before.
VERSION = 3


def to_json(config: RunConfig) -> str:
    """All settings of a run by section, after the version of their layout."""
    return json.dumps({"version": VERSION} | dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, where: str) -> RunConfig:
    """The inverse of `to_json`; `where` names the file in a ConfigError.

    A file of another version is refused. Settings that the file lacks have their defaults.

    run.compilation_cache keeps its default: the writer of the file must not choose the directory
    from which this machine loads compiled programs, or in which it stores them.
    """
    written = parse_object(text, where, "give the config.json of a run")
    version = written.pop("version", 1)
    if type(version) is not int:
        raise ConfigError(f"{where}: version={version!r} must be a whole number.")
    if version > VERSION:
        raise ConfigError(
            f"{where} was written by a newer jaxformer: its version is {version}, and this one"
            f" reads version {VERSION}. Upgrade jaxformer to read it."
        )
    if version < VERSION:
        raise ConfigError(
            f"{where} was written by an older jaxformer: its version is {version}, and this one"
            f" reads version {VERSION}. Read it with the jaxformer that wrote it, whose `jaxformer"
            " convert` writes a Hugging Face directory that this one takes too."
        )
    values = _dotted(written)
    values.pop("run.compilation_cache", None)
    settings = flat(RunConfig())
    unknown = [name for name in values if name not in settings]
    if unknown:
        lines = "".join(f"\n  {name}: {_unknown(name)}" for name in unknown)
        raise ConfigError(f"{where} has settings that this jaxformer does not know:{lines}")
    sections = {}
    try:
        for entry in dataclasses.fields(RunConfig):
            kind: Any = entry.default_factory
            names = {field.name: f"{entry.name}.{field.name}" for field in dataclasses.fields(kind)}
            sections[entry.name] = kind(
                **{field: values[name] for field, name in names.items() if name in values}
            )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return RunConfig(**sections)


def _dotted(written: dict[str, Any]) -> dict[str, Any]:
    """The settings of all sections by `section.field`."""
    values: dict[str, Any] = {}
    for section, entry in written.items():
        if isinstance(entry, dict):
            values |= {f"{section}.{name}": value for name, value in entry.items()}
        else:
            values[section] = entry
    return values


def _unknown(name: str) -> str:
    sections = [entry.name for entry in dataclasses.fields(RunConfig)]
    section = name.partition(".")[0]
    if section not in sections:
        return f"there is no such section; the sections are {', '.join(sections)}."
    return suggestion(name) if name != section else "a section must be an object of settings."
