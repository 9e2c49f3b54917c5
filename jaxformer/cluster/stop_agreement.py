"""Where all processes of a run stop, where a signal may have reached only some of them."""

import contextlib
import json
import time

import jax

from jaxformer.cluster.processes import client, exchange, next_round, read_key

# A process that has dispatched step n has seen the end of step n - 1, in which all took part. So
# what one publishes before it dispatches step n + 1 is seen by all before they leave step n + 2.
LEAD = 2
LOOK_SECONDS = 1.0  # about the time between two looks of an evaluation


class StopAgreement:
    """The step after which all processes stop, or the batch before which they leave an evaluation.

    `steps` is the number of steps of the run. Every process calls the same methods in the same
    order, each with the signal that it received, or None; the result is the signal by which all
    stop.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._prefix = steps, f"jaxformer/stop/{next_round()}"
        self._agreed: tuple[int, int] | None = None  # the last step, and the signal
        self._step, self._published = 0, False
        # Evaluations begun; the batches of the last look and of the next one; the time of the last.
        self._evaluations, self._last_look, self._next_look, self._since = 0, 0, 0, 0.0

    def after(self, step: int, signal: int | None) -> int | None:
        """The signal by which the run stops after `step`, None where it does not. To be called once
        for each step, when it is dispatched and the one before has ended."""
        self._step = step
        if step == self._steps:  # there is no later one, so that all wait for an answer
            return self.at_end(signal)
        if self._agreed is None:
            self._publish(signal)
            self._agreed = self._request()
        if self._agreed is None or step < self._agreed[0]:
            return None
        return self._agreed[1]

    def before(self, batch: int | None, signal: int | None) -> int | None:
        """The signal by which all processes leave an evaluation before a batch, counted from 0,
        None where they do not; without a batch it is `at_end`.

        The first process decides, and says when all look again: after as many batches as take about
        LOOK_SECONDS, and at most twice as many as the last time.
        """
        if batch is None:
            return self.at_end(signal)
        if batch == 0:
            self._evaluations, self._last_look, self._next_look = self._evaluations + 1, 0, 0
            self._since = time.monotonic()
        self._publish(signal)
        if batch < self._next_look:
            return None
        key = f"{self._prefix}/evaluation/{self._evaluations}/{batch}"
        if jax.process_index() == 0:
            request = self._request()
            decision = [None if request is None else request[1], batch + self._pause(batch)]
            client().key_value_set(key, json.dumps(decision))
        number, self._next_look = json.loads(read_key(key))
        self._last_look = batch
        agreed: int | None = number
        return agreed

    def at_end(self, signal: int | None) -> int | None:
        """The signal that any process received, None where none did."""
        numbers = [text for text in exchange("" if signal is None else str(int(signal))) if text]
        return int(numbers[0]) if numbers else None

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

    def _pause(self, batch: int) -> int:
        """The number of batches until the next look."""
        done, now = batch - self._last_look, time.monotonic()
        seconds, self._since = now - self._since, now
        return max(min(int(done * LOOK_SECONDS / max(seconds, 1e-3)), 2 * done), 1)
