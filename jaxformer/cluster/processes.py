"""What the processes of a run agree on, by the key-value store of JAX's coordination service. A
single process agrees with itself and asks nobody."""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxformer.files import ConfigError, first_of

AgreedT = TypeVar("AgreedT")

_ROUNDS = itertools.count()  # Every process counts the same rounds.
LOST = 3  # the exit status of a process that has lost another
POLL_MS = 1000  # between two looks at signals, while an answer is waited for


class LostProcess(RuntimeError):
    """Another process of the run did not come, has died or has failed, so that this one cannot go
    on; the same command, started in all processes, continues the run."""


def exchange(text: str) -> list[str]:
    """The texts of all processes, by their index. Every process of the run has to call it."""
    if jax.process_count() == 1:
        return [text]
    place = f"jaxformer/exchange/{next_round()}"
    client().key_value_set(f"{place}/{jax.process_index()}", text)
    if jax.process_index() == 0:
        texts = [read_key(f"{place}/{index}") for index in range(jax.process_count())]
        client().key_value_set(f"{place}/all", json.dumps(texts))
    found: list[str] = json.loads(read_key(f"{place}/all"))
    return found


def together(work: Callable[[], AgreedT], *kinds: type[Exception]) -> AgreedT:
    """`work()`, which every process calls. Where it raises in one, it raises in all, so that none
    waits for another in vain.

    In the processes that did not fail themselves it raises what the first of the others did, if
    that is a ConfigError or one of `kinds`, else LostProcess.
    """
    if jax.process_count() == 1:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    told = exchange(json.dumps([type(error).__name__, str(error)] if error else []))
    if error is not None:
        raise error
    for index, entry in enumerate(map(json.loads, told)):
        if entry:
            name, text = entry
            known: tuple[type[Exception], ...] = (ConfigError, *kinds)
            same = [kind for kind in known if kind.__name__ == name]
            if same:
                raise same[0](f"process {index}: {text}")
            raise LostProcess(f"process {index} failed: {name}: {text}")
    return result


def require_same(values: dict[str, str]) -> None:
    """Raises ConfigError, in every process, where one has other values than the first."""
    if jax.process_count() == 1:
        return
    first, *others = (json.loads(text) for text in exchange(json.dumps(values)))
    lines = [
        f"{name}: {first.get(name)} in process 0, {found.get(name)} in process {index}"
        for index, found in enumerate(others, start=1)
        for name in first | found
        if first.get(name) != found.get(name)
    ]
    if lines:
        raise ConfigError(
            "the processes of this run do not agree:\n  "
            + first_of(lines)
            + "\nStart the same command on the same data in all of them."
        )


def next_round() -> int:
    """The number of an agreement, which every process counts alike."""
    return next(_ROUNDS)


def read_key(key: str) -> str:
    """The value of a key, once a process has set it."""
    while True:
        try:
            found: str = client().blocking_key_value_get(key, POLL_MS)
            return found
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise LostProcess(f"the coordinator of the run does not answer: {error}") from error


def client() -> Any:
    """The key-value store of this process's connection to the coordinator."""
    from jax._src import distributed  # JAX has no public name for it; Orbax takes it there too

    return distributed.global_state.client
