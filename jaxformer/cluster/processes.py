"""What the processes of a run agree on, through the key-value store of JAX's coordination service.
A single process agrees with itself and asks nobody."""

import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, cast

import jax

from jaxformer.files import ConfigError, first_of

AgreedT = TypeVar("AgreedT")

LOST = 3  # the exit status of a process that has lost another
# Milliseconds that one request for a key waits. Between two requests Python handles signals.
POLL_MS = 1000
DEPARTURE_SECONDS = 10.0  # how long a key is waited for, after another process has left the run

_ROUNDS = itertools.count()  # Every process counts the same rounds.
# When other processes left the run, in seconds of `time.monotonic`, by their names. The roll call
# keeps it while it watches over the run.
departures: dict[str, float] = {}


class LostProcess(RuntimeError):
    """Another process of the run did not come, has died or has failed, so that this one cannot go
    on; the same command, started in all processes, continues the run."""


class KeyValueStore(Protocol):
    """What is used here of JAX's client of the coordination service."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def exchange(text: str) -> list[str]:
    """The texts of all processes, by their index. Every process of the run has to call it."""
    if jax.process_count() == 1:
        return [text]
    prefix = f"jaxformer/exchange/{next_round()}"
    client().key_value_set(f"{prefix}/{jax.process_index()}", text)
    if jax.process_index() == 0:
        gathered = [read_key(f"{prefix}/{index}") for index in range(jax.process_count())]
        client().key_value_set(f"{prefix}/all", json.dumps(gathered))
    texts: list[str] = json.loads(read_key(f"{prefix}/all"))
    return texts


def together(work: Callable[[], AgreedT], *kinds: type[Exception]) -> AgreedT:
    """`work()`, which every process calls. If it raises in one process, it raises in all, so that
    none waits for another in vain.

    The processes in which it succeeds raise the error of the first one that failed, if that is a
    ConfigError or one of `kinds`, else LostProcess.
    """
    if jax.process_count() == 1:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    outcomes = exchange(json.dumps([type(error).__name__, str(error)] if error else []))
    if error is not None:
        raise error
    shared_kinds = {kind.__name__: kind for kind in (*kinds, ConfigError)}
    for index, outcome in enumerate(map(json.loads, outcomes)):
        if not outcome:
            continue
        name, text = outcome
        if name in shared_kinds:
            raise shared_kinds[name](f"process {index}: {text}")
        raise LostProcess(f"process {index} failed: {name}: {text}")
    return result


def require_same(values: Mapping[str, str]) -> None:
    """Raises ConfigError, in every process, where one has other values than the first."""
    if jax.process_count() == 1:
        return
    first, *others = (json.loads(text) for text in exchange(json.dumps(values)))
    lines = [
        f"{name}: {first.get(name)} in process 0, {other.get(name)} in process {index}"
        for index, other in enumerate(others, start=1)
        for name in first | other
        if first.get(name) != other.get(name)
    ]
    if lines:
        raise ConfigError(
            f"the processes of this run do not agree:\n  {first_of(lines)}\nStart the same command"
            " on the same data in all of them."
        )


def next_round() -> int:
    """The number of an agreement, which every process counts alike."""
    return next(_ROUNDS)


def read_key(key: str) -> str:
    """The value of a key, once a process has set it.

    A process that takes long is waited for without a bound; where one dies or fails, the roll call
    ends this process. Raises LostProcess where the coordinator does not answer, and where another
    process has left the run and the key is not set for DEPARTURE_SECONDS after that.
    """
    began = time.monotonic()
    while True:
        try:
            return client().blocking_key_value_get(key, POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise LostProcess(f"the coordinator of the run does not answer: {error}") from error
        for name, departed in [*departures.items()]:
            if time.monotonic() - max(began, departed) > DEPARTURE_SECONDS:
                raise LostProcess(f"{name} has left the run, and this process waits for {key}.")


def client() -> KeyValueStore:
    """The key-value store of this process's connection to the coordinator."""
    from jax._src import distributed  # JAX has no public name for it; Orbax takes it there too

    return cast(KeyValueStore, distributed.global_state.client)
