"""Steps of a run as a setting names them: "10:13" for 10, 11 and 12, or "10"."""

from jaxformer.settings import ConfigError


def step_range(text: str, name: str) -> range:
    """The steps, counted from 1, of a slice as in Python or of a single number; none for "".

    Raises ConfigError for any other text; `name` is that of the setting.
    """
    if not text:
        return range(0)
    first, colon, stop = text.partition(":")
    try:
        steps = range(int(first), int(stop) if colon else int(first) + 1)
    except ValueError:
        steps = range(0)
    if not steps or steps[0] < 1:
        raise ConfigError(
            f"{name}={text!r} names no steps: give the first and the one after the last, counted"
            " from 1, as in 10:13 for the steps 10, 11 and 12, or a single step."
        )
    return steps
