"""Whether the regular expressions of a stranger fit names, answered in a process of its own: an
expression may take longer than anybody waits (`BoundedProcess`)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.cluster.bounded import BoundedProcess, OutOfBounds
from jaxformer.files import ConfigError

FITTING_SECONDS = 10.0  # of a core, for all expressions of a file
WRITTEN_SHOWN = 80  # characters of an expression in a message


class Expression(NamedTuple):
    """A regular expression of a file: the key that holds it, what stands there, and what it is
    compiled from. It has to fit a name to its end if `entire`, else its beginning."""

    key: str
    written: str
    text: str
    entire: bool = False


Fits = Mapping[tuple[Expression, str], Sequence[str | None]]


def fits(expressions: Sequence[Expression], names: Sequence[str], path: Path) -> Fits:
    """The groups of each (expression, name) that fits; `path` is the file of the expressions.

    Raises ConfigError for what is no regular expression, and where all of them together take too
    long or too much memory.
    """
    if not expressions:
        return {}
    process = BoundedProcess(__name__, "_answer", FITTING_SECONDS)
    try:
        answer = process.ask([expressions, names])
    except OutOfBounds as error:
        keys = dict.fromkeys(expression.key for expression in expressions)
        texts = ", ".join(_shown(expression) for expression in expressions)
        raise ConfigError(
            f"{path}: fitting the regular expressions of {', '.join(keys)} to the names of the"
            f" modules {error}: {texts[:300]}. Write the names of the modules there."
        ) from None
    finally:
        process.close()
    if "wrong" in answer:
        expression = expressions[answer["wrong"]]
        raise ConfigError(
            f"{path}: {expression.key}: {_shown(expression)} is no regular expression"
            f" ({answer['reason']})."
        )
    return {(expressions[at], name): groups for at, name, groups in answer["fits"]}


def _shown(expression: Expression) -> str:
    written = expression.written
    return repr(written if len(written) <= WRITTEN_SHOWN else f"{written[:WRITTEN_SHOWN]}...")


def _answer(question: tuple[list[list[Any]], list[str]]) -> dict[str, Any]:
    """The answer of the process: (index of an expression, name, groups) of each pair that fits, or
    the index of one that is no expression."""
    expressions, names = question
    fitting = []
    for at, (_, _, text, entire) in enumerate(expressions):
        try:
            compiled = re.compile(text)
        except RecursionError:
            return {"wrong": at, "reason": "it is nested too deeply"}
        except (re.error, OverflowError) as error:
            return {"wrong": at, "reason": str(error)}
        for name in names:
            if match := (compiled.fullmatch if entire else compiled.match)(name):
                fitting.append((at, name, match.groups()))
    return {"fits": fitting}
