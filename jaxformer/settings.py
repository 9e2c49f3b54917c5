"""What a setting is: a field of a frozen dataclass that knows its type, its range, and how to say
that it is wrong."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

RowT = TypeVar("RowT")
Log = Callable[[str], None]  # takes each line that a long operation reports


class ConfigError(ValueError):
    """A setting or an input that cannot work; the message says what, where, what is allowed and
    what to do."""


@dataclass(frozen=True)
class Bounds:
    """The range of a number: low <= value, and value < below or value <= most where given."""

    low: float
    below: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        below = "" if self.below is None else f" and below {self.below:g}"
        most = "" if self.most is None else f" and at most {self.most:g}"
        return f"at least {self.low:g}{below}{most}"

    def hold(self, value: float) -> bool:
        if not math.isfinite(value) or value < self.low:
            return False
        below = self.below is None or value < self.below
        return below and (self.most is None or value <= self.most)


Count = Annotated[int, Bounds(1)]
Natural = Annotated[int, Bounds(0)]
Rate = Annotated[float, Bounds(0, 1)]
Fraction = Annotated[float, Bounds(0, most=1)]
NonNegative = Annotated[float, Bounds(0)]


@dataclass(frozen=True)
class TableAt:
    """Says of a `Literal` in `Annotated` which `Table` its values name rows of, by its full
    name."""

    path: str


class Table(dict[str, RowT]):
    """The rows that a setting chooses from by name. A row added from outside is a value of it.

    `names` is the type of the setting: a `Literal`, alone or in `Annotated`. `besides` are those of
    its values that name no row, such as "auto". After `TABLE["mine"] = row`, configs, config files,
    config.json and the command line accept "mine" in every setting of that `Literal`.
    Raises ConfigError where the rows and the `Literal` do not agree.
    """

    def __init__(self, names: Any, rows: Mapping[str, RowT], besides: tuple[str, ...] = ()) -> None:
        super().__init__(rows)
        listed = get_args(_literal(names))
        if apart := {*rows, *besides} ^ {*listed}:
            raise ConfigError(
                f"a table of {sorted(rows)} does not agree with {names}: "
                f"add {sorted(apart)} to, or remove them from, one of the two."
            )
        _TABLES[listed] = self


# By the values of their Literal. A table is here from the import of its file on, so that configs
# are read without JAX: who adds a row has imported the table.
_TABLES: dict[tuple[str, ...], Table[Any]] = {}


def _literal(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def choices(hint: Any) -> tuple[str, ...]:
    """The allowed values of a setting: those of its `Literal`, and the rows added to its table."""
    listed = get_args(_literal(hint))
    return (*listed, *(name for name in _TABLES.get(listed, ()) if name not in listed))


@dataclass(frozen=True)
class Section:
    """A group of settings. Construction raises ConfigError naming every field that is out of its
    type or range."""

    def __post_init__(self) -> None:
        problems = [*_field_problems(self), *([] if [*_field_problems(self)] else self.conflicts())]
        if problems:
            raise ConfigError("\n".join(f"{type(self).section}.{problem}" for problem in problems))

    section = "config"

    def conflicts(self) -> list[str]:
        """Messages about fields that are fine alone and impossible together."""
        return []


def _field_problems(section: Section) -> Iterator[str]:
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        value: Any = getattr(section, name)
        bounds = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bounds)]
        kind = _literal(hint)
        if get_origin(kind) is Literal:
            if value not in choices(kind):
                allowed = ", ".join(map(repr, choices(kind)))
                yield f"{name}={value!r} is not one of {allowed}.{_how_to_add(hint)}"
        elif not isinstance(value, (int, float) if kind is float else kind) or isinstance(
            value, bool
        ) is not (kind is bool):
            yield f"{name}={value!r} is not of type {kind.__name__}."
        elif not all(bound.hold(value) for bound in bounds):
            yield f"{name}={value!r} must be {bounds[0]}."


def _how_to_add(hint: Any) -> str:
    """The sentence that says where a new value is added; empty where none can be."""
    extras = getattr(hint, "__metadata__", ())
    tables = [extra.path for extra in extras if isinstance(extra, TableAt)]
    how = "A name of your own must be a row of {} first: import the code that adds it."
    return "".join(" " + how.format(path) for path in tables)


def divisors(number: int) -> str:
    """In words, what divides a number."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def first_of(problems: Sequence[str], most: int = 20, between: str = "\n  ") -> str:
    """The first problems for a message, and how many more there are."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return between.join([*problems[:most], *more])
