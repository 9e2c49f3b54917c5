"""Settings that change at stated steps."""

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
