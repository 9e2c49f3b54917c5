"""Settings that change at stated steps, and the lengths of rows, which are one of them."""

import bisect

from jaxformer.config.run import DataConfig
from jaxformer.config.settings import divisors
from jaxformer.files import ConfigError


def phases(setting: str, text: str) -> list[tuple[int, str]]:
    """(first step, value) of each phase of 'FIRST; STEP: NEXT; ...', in order; the first phase
    begins at step 0.

    Raises ConfigError for steps that are no numbers or do not ascend, and for an empty value.
    """
    found: list[tuple[int, str]] = []
    for entry in text.split(";"):
        step, colon, value = entry.partition(":") if found else ("0", ":", entry)
        number = int(step) if step.strip().isdecimal() else -1
        if not colon or not value.strip() or number < 0 or (found and number <= found[-1][0]):
            raise ConfigError(
                f"{setting}={text!r}: {entry.strip()!r} is not allowed there. Write the first"
                " value, and then '; STEP: VALUE' for each change, steps ascending from 1."
            )
        found.append((number, value.strip()))
    return found


def row_lengths(data: DataConfig) -> list[tuple[int, int]]:
    """(first step, tokens of a row) of each phase of data.length_warmup; one phase where it is
    empty.

    Raises ConfigError for a length that does not divide data.sequence_length, or where that is not
    the last.
    """
    full, text = data.sequence_length, data.length_warmup
    if not text.strip():
        return [(0, full)]
    found = []
    for step, value in phases("data.length_warmup", text):
        length = int(value) if value.isdecimal() else 0
        if not length or full % length:
            raise ConfigError(
                f"data.length_warmup={text!r}: rows are cut evenly, so each length must divide"
                f" data.sequence_length={full}: choose among {divisors(full)}."
            )
        found.append((step, length))
    step, length = found[-1]
    if length != full:
        raise ConfigError(
            f"data.length_warmup={text!r} ends with rows of {length} tokens, and"
            f" data.sequence_length is {full}: add the step from which rows are whole, as in"
            f" '{text.strip()}; {step + 1000}: {full}', or set data.sequence_length={length}."
        )
    return found


def length_at(lengths: list[tuple[int, int]], step: int) -> int:
    """The tokens of a row of a step's batch; steps count from 0."""
    return lengths[bisect.bisect_right(lengths, step, key=lambda phase: phase[0]) - 1][1]
