"""What the processes of a run agree on, through the key-value store of JAX's coordination service.
A single process agrees with itself and asks nobody."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxformer.arrays.private_jax import private
from jaxformer.cluster.signals import current
from jaxformer.files import ConfigError, first_of

AgreedT = TypeVar("AgreedT")

LONG_SECONDS = 120.0  # of waiting for another process, after which it is named
BEATS = 24  # how often within them each process says how far it has come
LOST = 3  # the exit status of a process that has lost another
# Milliseconds that one request for a key waits. Between two requests Python handles signals.
POLL_MS = 1000
# A process that has dispatched step n has seen the end of step n - 1, in which all took part. So
# what one publishes before it dispatches step n + 1 is seen by all before they leave step n + 2.
LEAD = 2


@dataclass(frozen=True)
class Place:
    """How far a process has come: the name and the number of a point that all reach in one order.

    `came` and `said` are the beats of the roll call when it came there and when it last said so.
    """

    number: int = 0
    name: str = "its start"
    came: int = 0
    said: int = 0


_here = Place()


def here() -> Place:
    """How far this process has come."""
    return _here


def reached(name: str) -> int:
    """Notes that this process has come to a point that every process reaches in the same order, and
    gives its number."""
    global _here
    _here = Place(_here.number + 1, name)
    return _here.number


class LostProcess(RuntimeError):
    """Another process of the run did not come, has died or has failed, so that this one cannot go
    on; the same command, started in all processes, continues the run."""


def exchange(text: str) -> list[str]:
    """The texts of all processes, by their index. Every process of the run has to call it."""
    if jax.process_count() == 1:
        return [text]
    # The store refuses to set a key twice, so each meeting has keys of its own, by a number that
    # all processes count alike.
    prefix = f"jaxformer/exchange/{reached('a meeting of all')}"
    client().key_value_set(f"{prefix}/{jax.process_index()}", text)
    if jax.process_index() == 0:
        # One process reads the texts of all. If each did, the requests would grow with the square
        # of the number of processes.
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
    # Stopped is no Exception, and goes on at once: `joined` tells the other processes.
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
    lines = []
    for index, other in enumerate(others, start=1):
        for name in first | other:
            value = first.get(name)
            if value != other.get(name):
                lines.append(f"{name}: {value} in process 0, {other.get(name)} in process {index}")
    if lines:
        raise ConfigError(
            f"the processes of this run do not agree:\n  {first_of(lines)}\nStart the same command"
            " on the same data in all of them."
        )


def read_key(key: str) -> str:
    """The value of a key, once a process has set it. A process that takes long is waited for
    without a bound, and named by the roll call, which ends this process where one dies or fails.
    After `LONG_SECONDS` a signal ends the wait."""
    began = time.monotonic()
    while True:
        try:
            value: str = client().blocking_key_value_get(key, POLL_MS)
            return value
        except jax.errors.JaxRuntimeError as error:
            # JAX raises one class for all errors of its service; only the text says that a key is
            # not set yet.
            if "DEADLINE_EXCEEDED" not in str(error):
                raise LostProcess(f"the coordinator of the run does not answer: {error}") from error
        request = current()
        if request is not None and time.monotonic() - began >= LONG_SECONDS:
            request.obey()


def client() -> Any:
    """The key-value store of this process's connection to the coordinator."""
    # Orbax takes it from there too.
    return private("distributed.global_state", "a run of several processes").client


class StopAgreement:
    """The step after which all processes stop, or the batch before which they leave an evaluation.

    `steps` is the number of steps of the run. Every process calls the same methods in the same
    order, each with the signal that it received, or None; the result is the signal by which all
    stop.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._prefix = f"jaxformer/stop/{reached('the first step')}"
        self._agreed: tuple[int, int] | None = None  # the last step, and the signal
        self._step = 0
        self._published = False
        self._evaluations = 0

    def after(self, step: int, signal: int | None) -> int | None:
        """The signal by which the run stops after `step`, None where it does not. To be called once
        for each step, when it is dispatched and the one before has ended."""
        self._step = step
        reached(f"step {step}")
        if step == self._steps:  # there is no later one, so that all wait for an answer
            return self.at_end(signal)
        if self._agreed is None:
            self._publish(signal)
            self._agreed = self._request()
        if self._agreed is None or step < self._agreed[0]:
            return None
        return self._agreed[1]

    def before(self, batch: int | None, signal: int | None) -> int | None:
        """The signal by which all processes leave an evaluation before a batch, counted from 0, as
        the first process decides, None where they do not; without a batch it is `at_end`."""
        if batch is None:
            return self.at_end(signal)
        self._evaluations += batch == 0
        reached(f"batch {batch} of an evaluation after step {self._step}")
        self._publish(signal)
        # A signal reaches the processes at different batches, and a batch that only some of them
        # compute would never end. So the first one decides, at the price of a request for each
        # batch.
        key = f"{self._prefix}/evaluation/{self._evaluations}/{batch}"
        if jax.process_index() == 0:
            _, number = self._request() or (0, 0)
            client().key_value_set(key, str(number))
        return int(read_key(key)) or None

    def at_end(self, signal: int | None) -> int | None:
        """The signal that any process received, None where none did."""
        for text in exchange(str(int(signal or 0))):
            if text != "0":
                return int(text)
        return None

    def _publish(self, signal: int | None) -> None:
        """Tells the others of a signal, once."""
        if signal is None or self._published:
            return
        self._published = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            request = json.dumps([self._step + LEAD, int(signal)])
            client().key_value_set(f"{self._prefix}/request/step", request)

    def _request(self) -> tuple[int, int] | None:
        """The last step and the signal that the first process to receive one published."""
        entries = client().key_value_dir_get(f"{self._prefix}/request")
        if not entries:
            return None
        step, number = json.loads(entries[0][1])
        return step, number
