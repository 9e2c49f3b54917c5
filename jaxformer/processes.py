"""What the processes of a run agree on, by the key-value store of JAX's coordination service. A
single process agrees with itself and asks nobody."""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxformer.files import first_of
from jaxformer.settings import ConfigError

AgreedT = TypeVar("AgreedT")

_ROUNDS = itertools.count()  # Every process counts the same rounds.
LOST = 3  # the exit status of a process that has lost another
POLL_MS = 1000  # between two looks at signals, while an answer is waited for

# A process that has dispatched step n has seen the end of step n - 1, in which all took part. So
# what one publishes before it dispatches step n + 1 is seen by all before they leave step n + 2.
LEAD = 2


class LostProcess(RuntimeError):
    """Another process of the run did not come, has died or has failed, so that this one cannot go
    on; the same command, started in all processes, continues the run."""


def exchange(text: str) -> list[str]:
    """The texts of all processes, by their index. Every process of the run has to call it."""
    if jax.process_count() == 1:
        return [text]
    client, place = _client(), f"jaxformer/exchange/{next(_ROUNDS)}"
    client.key_value_set(f"{place}/{jax.process_index()}", text)
    if jax.process_index() == 0:
        texts = [_read(client, f"{place}/{index}") for index in range(jax.process_count())]
        client.key_value_set(f"{place}/all", json.dumps(texts))
    found: list[str] = json.loads(_read(client, f"{place}/all"))
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


class StopAgreement:
    """The step after which all processes stop, where a signal may have reached only some."""

    def __init__(self, steps: int) -> None:
        self._steps, self._place = steps, f"jaxformer/stop/{next(_ROUNDS)}"
        self._agreed: tuple[int, int] | None = None

    def after(self, step: int, signal: int | None) -> int | None:
        """The signal by which the run stops after `step`, None where it does not; `signal` is the
        one that this process got. To be called once for each step, when it is dispatched and the
        one before has ended."""
        if step == self._steps:  # there is no later one, so that all wait for an answer
            told = [text for text in exchange("" if signal is None else str(int(signal))) if text]
            return int(told[0]) if told else None
        if self._agreed is None:
            client = _client()
            found = client.key_value_dir_get(self._place)
            if signal is not None and not found:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
                    client.key_value_set(
                        f"{self._place}/step", json.dumps([step + LEAD, int(signal)])
                    )
                found = client.key_value_dir_get(self._place)
            if not found:
                return None
            last, number = json.loads(found[0][1])
            self._agreed = last, number
        return self._agreed[1] if step >= self._agreed[0] else None


def _read(client: Any, key: str) -> str:
    while True:
        try:
            found: str = client.blocking_key_value_get(key, POLL_MS)
            return found
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise LostProcess(f"the coordinator of the run does not answer: {error}") from error


def _client() -> Any:
    from jax._src import distributed  # JAX has no public name for it; Orbax takes it there too

    return distributed.global_state.client
