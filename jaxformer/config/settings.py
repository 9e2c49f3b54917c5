"""Settings: fields of frozen dataclasses whose types and ranges are checked at construction."""

import contextlib
import dataclasses
import functools
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxformer.files import ConfigError

RowT = TypeVar("RowT")
ValueT = TypeVar("ValueT")
ConfigT = TypeVar("ConfigT")
Log = Callable[[str], None]  # takes each line that a long operation reports


@dataclass(frozen=True)
class Bounds:
    """The range of a number: low <= value, and value < below, and value <= most."""

    low: float
    below: float = math.inf
    most: float = math.inf

    def __str__(self) -> str:
        text = f"at least {self.low:g}"
        if self.below < math.inf:
            text += f" and below {self.below:.10g}"
        if self.most < math.inf:
            text += f" and at most {self.most:.10g}"
        return text

    def hold(self, value: float) -> bool:
        """Return whether the value is within the bounds. Infinity never is, as `below` excludes
        it."""
        return self.low <= value <= self.most and value < self.below


@dataclass(frozen=True)
class Letters:
    """The letters of a pattern that is repeated over the layers, at least one, and what a message
    says of them."""

    letters: str
    meaning: str

    def __str__(self) -> str:
        return f"letters {self.meaning}"

    def hold(self, value: Any) -> bool:
        """Return whether the value is of these letters."""
        return value != "" and {*value} <= {*self.letters}


Count = Annotated[int, Bounds(1, most=2**31 - 1)]  # an int32
AutoCount = Annotated[int | Literal["auto"], Bounds(1, most=2**31 - 1)]
Natural = Annotated[int, Bounds(0, most=2**31 - 1)]
Rate = Annotated[float, Bounds(0, 1)]
AutoRate = Annotated[float | Literal["auto"], Bounds(0, 1)]
Fraction = Annotated[float, Bounds(0, most=1)]
NonNegative = Annotated[float, Bounds(0, below=1e30)]  # its square root and inverse are float32
Factor = Annotated[float, Bounds(1e-6, most=1e6)]

# Marks the type of a setting that a continued run may change, because the numbers of the run do not
# depend on it.
VOLATILE = "volatile"
Volatile = Annotated[ValueT, VOLATILE]
# Marks the type of a setting that makes a model wide, which model.mup_base may name. A model may be
# widened by wider heads or by more of them, so their number is one.
WIDTH_SETTING = "width"
Width = Annotated[Natural, WIDTH_SETTING]
# Marks the type of a setting of a model that says what a run computes and how, and not what its
# weights mean: a run takes it from its own config, and not from the model of run.init_from.
RUN_SETTING = "run"
PerRun = Annotated[ValueT, RUN_SETTING]


@dataclass(frozen=True)
class TableAt:
    """In `Annotated` with a `Literal`: the full name of the `Table` whose rows its values name."""

    path: str


@dataclass(frozen=True)
class ImportedRow:
    """A row that stands in a module which only those load that use it: "package.module:name"."""

    path: str


class Table(dict[str, RowT]):
    """The rows that a setting selects by name, to which users can add their own.

    `names` is the type of the setting: a `Literal`, alone or in `Annotated`. `besides` are those of
    its values that name no row, such as "auto". After `TABLE["mine"] = row`, config files and the
    command line accept "mine" in every such setting. Raises ConfigError if rows and names differ.
    An `ImportedRow` is imported when it is looked up by its name.
    """

    def __init__(
        self, names: Any, rows: Mapping[str, RowT | ImportedRow], besides: tuple[str, ...] = ()
    ) -> None:
        super().__init__(rows)  # type: ignore[arg-type]
        listed = get_args(_literal(names))
        different = {*rows, *besides} ^ {*listed}
        if different:
            raise ConfigError(f"the rows of a table and {names} differ in {sorted(different)}.")
        _TABLES[listed] = self

    def __getitem__(self, name: str) -> RowT:
        row = super().__getitem__(name)
        if isinstance(row, ImportedRow):
            self[name] = row = pkgutil.resolve_name(row.path)
        return row


# By the values of their Literal. A table is added when its module is imported, so that configs are
# read without JAX; code that adds a row has imported the table.
_TABLES: dict[tuple[str, ...], Table[Any]] = {}


def _literal(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def imported_table(hint: Any) -> Table[Any] | None:
    """Return the table of a setting; None where its module has not been imported, which code that
    adds a row to it has."""
    return _TABLES.get(get_args(_literal(hint)))


def choices(hint: Any) -> tuple[str, ...]:
    """Return the allowed values of a setting: those of its `Literal`, and the rows added to its
    table."""
    listed = get_args(_literal(hint))
    return (*listed, *(name for name in _TABLES.get(listed, ()) if name not in listed))


@dataclass(frozen=True)
class Section:
    """A group of settings. Construction raises ConfigError naming every invalid field."""

    def __post_init__(self) -> None:
        problems = []
        for name, hint in _hints(type(self)).items():  # type: ignore[arg-type]
            value: Any = getattr(self, name)
            kind = _literal(hint)
            extras = getattr(hint, "__metadata__", ())
            words: tuple[str, ...] = ()
            if get_origin(kind) in (Union, UnionType):
                # The setting may be a word instead, as of int | Literal["auto"].
                kind, literal = get_args(kind)
                words = get_args(literal)
            if isinstance(value, str) and value in words:
                continue
            types = (int, float) if kind is float else kind
            problem = ""
            if get_origin(kind) is Literal:
                if value not in choices(kind):
                    problem = f"is not one of {', '.join(map(repr, choices(kind)))}."
                    for table in extras:
                        if isinstance(table, TableAt):
                            problem += f" Import the code that adds your own row to {table.path}."
            elif issubclass(kind, Section):
                if not isinstance(value, kind):
                    problem = f"is not a record: give {kind.__name__}(...)."
            # bool is a subclass of int: without the second test a True would pass for the number 1.
            elif not isinstance(value, types) or isinstance(value, bool) is not (kind is bool):
                allowed = " or ".join([f"of type {kind.__name__}", *map(repr, words)])
                problem = f"is not {allowed}."
            else:
                for rule in extras:
                    if isinstance(rule, Bounds | Letters) and not rule.hold(value):
                        problem = f"must be {rule}."
            if problem:
                problems.append(f"{name}={value!r} {problem}")
        # These rules compute with several fields, so they are asked only where each field is of its
        # type and within its bounds.
        problems = problems or self.conflicts()
        if problems:
            raise ConfigError("\n".join(f"{type(self).section}.{problem}" for problem in problems))

    section = "config"

    def conflicts(self) -> list[str]:
        """Messages about fields that are valid alone but not together."""
        return []


@functools.cache
def _hints(section: Any) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def hints(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every setting of a section by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in _hints(section).items():
        if dataclasses.is_dataclass(hint):
            found |= hints(hint, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = hint
    return found


def names_marked(section: Any, marker: str) -> list[str]:
    """Return the dotted names of the settings whose types have a marker, such as `VOLATILE`."""
    names = []
    for name, hint in hints(section).items():
        if marker in getattr(hint, "__metadata__", ()):
            names.append(name)
    return names


def flat(config: Any) -> dict[str, Any]:
    """Return every setting of a config by its dotted name, as in `{"model.rope.theta": 1e4}`."""
    return dotted(dataclasses.asdict(config))


def dotted(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested dicts by their dotted names."""
    entries: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            entries |= dotted(value, f"{prefix}{name}.")
        else:
            entries[f"{prefix}{name}"] = value
    return entries


def with_settings(config: ConfigT, settings: Mapping[str, Any]) -> ConfigT:
    """Return a config with other values of some settings, by their dotted names or nested:
    `with_settings(model, {"d_model": 64, "rope.theta": 1e6})`. Raises ConfigError for a value that
    is not allowed."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        record, _, inner = name.partition(".")
        if inner:
            changes.setdefault(record, {})[inner] = value
        else:
            changes[record] = value
    names = [entry.name for entry in dataclasses.fields(config)]  # type: ignore[arg-type]
    unknown = sorted(changes.keys() - {*names})
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no setting of {type(config).__name__}: {names}.")
    for record, values in changes.items():
        if isinstance(values, Mapping):
            changes[record] = with_settings(getattr(config, record), values)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def divisors(number: int) -> str:
    """Return the divisors of a number, separated by commas."""
    found = set[int]()
    for divisor in range(1, math.isqrt(number) + 1):
        if number % divisor == 0:
            found |= {divisor, number // divisor}
    return ", ".join(map(str, sorted(found)))


def parts_of(text: str, separator: str = ",") -> list[str]:
    """Return the entries of a setting that are separated by commas, but for empty ones."""
    entries = map(str.strip, text.split(separator))
    return list(filter(None, entries))


def parsed_groups(text: str, words: tuple[str, ...]) -> list[tuple[str, dict[str, float]]]:
    """Return the numbers of a setting groups by pattern, for "embed: lr 0.3, norm: lr 2 decay 0" as
    [("embed", {"lr": 0.3}), ("norm", {"lr": 2.0, "decay": 0.0})]. `words` are those that it
    knows."""
    groups = []
    for entry in parts_of(text):
        pattern, _, stated = entry.partition(":")
        pieces = stated.split()
        numbers = {}
        with contextlib.suppress(ValueError):
            for word, number in zip(pieces[::2], map(float, pieces[1::2]), strict=True):
                if word in words and 0 <= number < math.inf:
                    numbers[word] = number
        # A word that is repeated or unknown, or has no such number, is not among them.
        if not pattern.strip() or not numbers or len(pieces) != 2 * len(numbers):
            raise ConfigError(
                f"groups: {entry!r} is not of the form 'PATTERN: {words[0]} NUMBER {words[1]}"
                f" NUMBER', with one of the two or both, and finite numbers of at least 0. Groups"
                f" are separated by commas, as in 'embed: {words[0]} 2, ffn: {words[1]} 1'."
            )
        groups.append((pattern.strip(), numbers))
    return groups


def step_range(text: str, name: str) -> range:
    """Return the steps, counted from 1, of a slice as in Python or of a single number; none for
    an empty text."""
    if not text:
        return range(0)
    first, colon, stop = text.partition(":")
    try:
        steps = range(int(first), int(first) + 1)
        if colon:
            steps = range(int(first), int(stop))
    except ValueError:
        steps = range(0)
    if not steps or steps[0] < 1:
        raise ConfigError(
            f"{name}={text!r} names no steps: give the first and the one after the last, counted"
            " from 1, as in 10:13 for the steps 10, 11 and 12, or a single step."
        )
    return steps
