"""A run's config as JSON, with the version of its layout, so that older files stay readable."""

import dataclasses
import difflib
import json
from typing import Any

from jaxformer.config import ConfigError, RunConfig, flat

VERSION = 2  # To be raised when a field is renamed, or an older reader would misread the file.

# By the version that brought the new names: {3: {"model.old_name": "model.new_name"}}.
RENAMED: dict[int, dict[str, str]] = {}


def to_json(config: RunConfig) -> str:
    """All settings of a run by section, behind the version of their layout."""
    return json.dumps({"version": VERSION} | dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, where: str) -> RunConfig:
    """The inverse of `to_json`; `where` names the file in a ConfigError.

    A file without a version is of version 1. Fields that an older file lacks have their defaults,
    and renamed ones are found under their old names. Raises ConfigError for a file of a newer
    version, for what is not a config, naming every unknown section and field, and for a bad value.
    """
    values = _flat(text, where)
    version = values.pop("version", 1)
    if type(version) is not int or version < 1:
        raise ConfigError(f"{where}: version={version!r} must be a whole number, at least 1.")
    if version > VERSION:
        raise ConfigError(
            f"{where} was written by a newer jaxformer: it has version {version}, and this one "
            f"reads versions 1 to {VERSION}. Upgrade jaxformer to read it."
        )
    for later in range(version + 1, VERSION + 1):
        for old, new in RENAMED.get(later, {}).items():
            if old in values:
                values[new] = values.pop(old)
    if unknown := [name for name in values if name not in flat(RunConfig())]:
        named = "".join(f"\n  {_told(name)}" for name in unknown)
        raise ConfigError(f"{where} has settings that this jaxformer does not know:{named}")
    try:
        sections = dataclasses.fields(RunConfig)
        return RunConfig(**{entry.name: _section(entry, values) for entry in sections})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _flat(text: str, where: str) -> dict[str, Any]:
    """The values of a file by dotted name; what is in no section, by its own name."""
    try:
        written = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not a config: it is no JSON ({error}).") from error
    if not isinstance(written, dict):
        raise ConfigError(f"{where} is not a config: it must be a JSON object of sections.")
    values: dict[str, Any] = {}
    for name, entry in written.items():
        if isinstance(entry, dict):
            values |= {f"{name}.{field}": value for field, value in entry.items()}
        else:
            values[name] = entry
    return values


def _section(entry: dataclasses.Field[Any], values: dict[str, Any]) -> Any:
    kind: Any = entry.default_factory
    names = {field.name: f"{entry.name}.{field.name}" for field in dataclasses.fields(kind)}
    return kind(**{field: values[name] for field, name in names.items() if name in values})


def _told(unknown: str) -> str:
    """An unknown name with what it may stand for."""
    sections = [entry.name for entry in dataclasses.fields(RunConfig)]
    section, _, field = unknown.rpartition(".")
    if (section or field) not in sections:
        return f"{unknown}: there is no such section; the sections are {', '.join(sections)}."
    if not section:
        return f"{unknown}: a section must be an object of fields."
    near = difflib.get_close_matches(unknown, flat(RunConfig()), 1)
    meant = f"; perhaps you meant {near[0]}" if near else ""
    return f"{unknown}: there is no such field{meant}."
