"""Settings that change at stated steps, and the lengths of rows, which are one."""

import bisect

from jaxformer.config import ConfigError, DataConfig
from jaxformer.settings import divisors


def phases(setting: str, text: str) -> list[tuple[int, str]]:
    """(first step, value) of each phase of 'FIRST; STEP: NEXT; ...', in order; steps count from 0,
    the first phase's.

    Raises ConfigError, naming the setting, for steps that are no numbers or do not ascend, and for
    an empty value.
    """
    found: list[tuple[int, str]] = []
    for entry in text.split(";"):
        step, colon, value = entry.partition(":") if found else ("0", ":", entry)
        number = int(step) if step.strip().isdecimal() else -1
        if not colon or not value.strip() or number < 0 or (found and number <= found[-1][0]):
            raise ConfigError(
                f"{setting}={text!r}: {entry.strip()!r} is not allowed there. Write what holds at"
                " first, and then each change as STEP: VALUE, steps ascending from 1, apart by"
                " ';'."
            )
        found.append((number, value.strip()))
    return found


def row_lengths(data: DataConfig) -> list[tuple[int, int]]:
    """(first step, tokens of a row) of each phase of data.length_warmup; one phase where there is
    none.

    Raises ConfigError for a length that does not divide data.sequence_length, or where that is not
    the last.
    """
    full, text = data.sequence_length, data.length_warmup
    if not text.strip():
        return [(0, full)]
    found = [
        (step, int(value) if value.isdecimal() else 0)
        for step, value in phases("data.length_warmup", text)
    ]
    for _, length in found:
        if not length or full % length:
            raise ConfigError(
                f"data.length_warmup={text!r}: rows are cut evenly, so each length must divide"
                f" data.sequence_length={full}, and one does not: choose among {divisors(full)}."
            )
    if found[-1][1] != full:
        raise ConfigError(
            f"data.length_warmup={text!r} ends with rows of {found[-1][1]} tokens, and"
            f" data.sequence_length is {full}: add the step from which rows are whole, as in"
            f" '{text.strip()}; {found[-1][0] + 1000}: {full}', or set"
            f" data.sequence_length={found[-1][1]}."
        )
    return found


def length_at(lengths: list[tuple[int, int]], step: int) -> int:
    """The tokens of a row of a step's batch, counted from 0."""
    return lengths[bisect.bisect_right(lengths, step, key=lambda phase: phase[0]) - 1][1]
