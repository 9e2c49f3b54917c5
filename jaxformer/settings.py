"""What a setting is: a field of a frozen dataclass that knows its type, its range, and how to say that it is wrong."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A setting or an input that cannot work; the message says what, where, what is allowed and what to do."""


@dataclass(frozen=True)
class Bounds:
    """The closed or half-open range of a number: low <= value, and value < below where that is given."""

    low: float
    below: float | None = None

    def __str__(self) -> str:
        return f"at least {self.low:g}" + ("" if self.below is None else f" and below {self.below:g}")

    def hold(self, value: float) -> bool:
        return math.isfinite(value) and value >= self.low and (self.below is None or value < self.below)


Count = Annotated[int, Bounds(1)]
Natural = Annotated[int, Bounds(0)]
Rate = Annotated[float, Bounds(0, 1)]
Fraction = Annotated[float, Bounds(0, 1.000001)]
NonNegative = Annotated[float, Bounds(0)]


@dataclass(frozen=True)
class Section:
    """A group of settings. Construction raises ConfigError naming every field that is out of its type or range."""

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
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                yield f"{name}={value!r} is not one of {', '.join(map(repr, get_args(kind)))}."
        elif not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) is not (kind is bool):
            yield f"{name}={value!r} is not of type {kind.__name__}."
        elif not all(bound.hold(value) for bound in bounds):
            yield f"{name}={value!r} must be {bounds[0]}."


def divisors(number: int) -> str:
    """In words, what divides a number."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"model.n_layers": 6, ...}`: every field of a config by its dotted name."""
    out: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        out |= flat(value, f"{prefix}{entry.name}.") if dataclasses.is_dataclass(value) else {f"{prefix}{entry.name}": value}
    return out
