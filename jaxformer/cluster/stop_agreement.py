"""Where all processes of a run stop, where a signal may have reached only some of them."""

import contextlib
import json
import time

import jax

from jaxformer.cluster.processes import client, exchange, next_round, read_key

# A process that has dispatched step n has seen the end of step n - 1, in which all took part. So
# what one publishes before it dispatches step n + 1 is seen by all before they leave step n + 2.
LEAD = 2
SECONDS = 1.0  # between two looks of an evaluation, about


class StopAgreement:
    """The step after which all processes stop, or the batch before which they leave an evaluation.

    `steps` is the number of steps of the run. Every process calls the same methods in the same
    order, each with the signal that it got, or None; the answer is that by which all stop.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._place = steps, f"jaxformer/stop/{next_round()}"
        self._agreed: tuple[int, int] | None = None  # the last step, and the signal
        self._step, self._asked = 0, False
        self._evaluations, self._looked, self._due, self._since = 0, 0, 0, 0.0

    def after(self, step: int, signal: int | None) -> int | None:
        """The signal by which the run stops after `step`, None where it does not. To be called once
        for each step, when it is dispatched and the one before has ended."""
        self._step = step
        if step == self._steps:  # there is no later one, so that all wait for an answer
            return self.at_end(signal)
        if self._agreed is None:
            self._ask(signal)
            if found := client().key_value_dir_get(f"{self._place}/asked"):
                last, number = json.loads(found[0][1])
                self._agreed = last, number
        if self._agreed is None or step < self._agreed[0]:
            return None
        return self._agreed[1]

    def before(self, batch: int | None, signal: int | None) -> int | None:
        """The signal by which all processes leave an evaluation before a batch, counted from 0,
        None where they do not; with no batch `at_end`.

        The first process decides it, and when they look again: after as many batches as take about
        SECONDS, and at most twice as many as the last time.
        """
        if batch is None:
            return self.at_end(signal)
        if batch == 0:
            self._evaluations, self._looked, self._due = self._evaluations + 1, 0, 0
            self._since = time.monotonic()
        self._ask(signal)
        if batch < self._due:
            return None
        key = f"{self._place}/evaluation/{self._evaluations}/{batch}"
        if jax.process_index() == 0:
            found = client().key_value_dir_get(f"{self._place}/asked")
            number = json.loads(found[0][1])[1] if found else None
            client().key_value_set(key, json.dumps([number, batch + self._pause(batch)]))
        number, self._due = json.loads(read_key(key))
        self._looked = batch
        agreed: int | None = number
        return agreed

    def at_end(self, signal: int | None) -> int | None:
        """The signal that any process got, None where none did."""
        told = [text for text in exchange("" if signal is None else str(int(signal))) if text]
        return int(told[0]) if told else None

    def _ask(self, signal: int | None) -> None:
        """Tells the others of a signal, once."""
        if signal is None or self._asked:
            return
        self._asked = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            asked = json.dumps([self._step + LEAD, int(signal)])
            client().key_value_set(f"{self._place}/asked/step", asked)

    def _pause(self, batch: int) -> int:
        """The number of batches until the next look."""
        done, now = batch - self._looked, time.monotonic()
        seconds, self._since = now - self._since, now
        return max(min(int(done * SECONDS / max(seconds, 1e-3)), 2 * done), 1)
