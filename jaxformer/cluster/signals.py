"""Signals that ask a program to stop: noted where a state has to be saved first, obeyed at once
elsewhere.

This file imports only the standard library, so that a command watches signals before it imports
JAX.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.cluster.processes import StopAgreement

# A cluster ends a job by SIGTERM, announces it by SIGUSR1 (Slurm's --signal), and a terminal that
# closes sends SIGHUP.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
BURST = 1.0  # seconds within which a repeated signal is the same request, as `timeout` sends two
PATIENCE = 5.0  # seconds in which what can be ended at once has to end


class Stopped(KeyboardInterrupt):
    """A signal ended a program that had nothing to save. No `except Exception` holds it up."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {name_of(number)}")
        self.signal = number


class StopRequest:
    """Whether a signal has asked the program to stop, and what is done about it.

    `signal` is the number of the first one, None before. `while_doing` is printed where a signal
    ends the program at once: what it was doing, and what the same command does when it is started
    again. While `imports` is set, a signal ends the program without an exception, which the
    libraries that are imported might catch. `agree` is set where several processes have to stop
    together, `tell` informs the others of a signal that ends this one, and `waits` says for which
    of them it has waited too long. A `finished` program ignores signals.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.while_doing = ""
        self._holds = 0
        self.imports = False
        self.finished = False
        self.agree: StopAgreement | None = None
        self.tell: Callable[[int], None] = lambda number: None
        self.waits: Callable[[], str] = lambda: ""

    def asked(self, step: int) -> bool:
        """Whether the run has to save and stop after this step. `fit` asks once a step, when it is
        dispatched and the one before has ended."""
        agreed = self.signal if self.agree is None else self.agree.after(step, self.signal)
        self.signal = agreed or self.signal
        return agreed is not None

    def heed(self, batch: int | None = None) -> None:
        """Raises Stopped where a signal has asked for it, in all processes: before a batch of an
        evaluation, counted from 0, or (None) once everything is saved."""
        agreed = self.signal if self.agree is None else self.agree.before(batch, self.signal)
        if agreed is not None:
            self.signal = agreed
            self.obey()

    @property
    def name(self) -> str:
        """The name of the signal, such as SIGTERM; empty before there is one."""
        return "" if self.signal is None else name_of(self.signal)

    @property
    def holding(self) -> bool:
        """Whether a signal is only noted now."""
        return self._holds > 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Within this block signals are only noted, and the block polls `asked`. A signal on which
        it did not act raises Stopped at its end."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if not self._holds:
            self.obey()

    def obey(self) -> None:
        """Raises Stopped where a signal has asked for it."""
        if self.signal is not None:
            raise Stopped(self.signal)

    def note(self, number: int) -> None:
        """Handles a signal in the main thread. Only the first one counts here; the watch ends a
        program at the second one."""
        if self.signal is not None or self.finished:
            return
        self.signal = number
        if self.imports:
            end(number, self.ending())
        if not self.holding:
            self.obey()

    def ending(self) -> str:
        """The message where a signal ends a program at once."""
        text = f"interrupted: stopped by {self.name} {self.while_doing}".rstrip()
        if waits := self.waits():
            text += f" It waited: {waits}"
        return text


def end(number: int, message: str) -> None:
    """Ends the process with the exit status of a signal, without unwinding: a compiler would hold
    that up."""
    with contextlib.suppress(OSError):
        # No print, which would wait where the main thread holds the lock of standard error.
        os.write(2, f"{message}\n".encode())
    os._exit(128 + number)


_current: StopRequest | None = None  # that of this process, while signals are watched


def current() -> StopRequest | None:
    """The request of this process while signals are watched, else None."""
    return _current


@contextlib.contextmanager
def watched(ends: bool = False) -> Iterator[StopRequest]:
    """Watches signals while the block runs, and gives its request. Where signals are watched
    already, that request is given, and outside the main thread one that no signal reaches.

    Signals that the process ignores, as it does SIGHUP under `nohup`, stay ignored. `ends` says
    that the block is the entire program. A thread then ends it where a compiler or another library
    holds up the main thread: PATIENCE seconds after a signal if nothing has to be saved, and at a
    second signal always. Without `ends`, a second signal goes to the previous handler.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield _current or StopRequest()
        return
    request = StopRequest()
    first = 0.0
    unraisable = sys.unraisablehook
    previous: dict[int, Any] = {}
    for stopping in STOPPING:
        handler = signal.getsignal(stopping)
        # None is a handler that is no Python function, and could not be restored.
        if handler not in (signal.SIG_IGN, None):
            previous[stopping] = handler

    def handle(number: int, _: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        if not ends and time.monotonic() - first > BURST:
            signal.signal(number, previous[number])
            signal.raise_signal(number)
        request.note(number)

    def dropped(failure: Any) -> None:
        # A finalizer or a callback of the garbage collector lets no exception out. The signal comes
        # once more, when that has ended.
        if isinstance(failure.exc_value, Stopped):
            request.signal = None
            threading.Timer(0.01, os.kill, (os.getpid(), failure.exc_value.signal)).start()
        else:
            unraisable(failure)

    watch = _Watch(request, [*previous]) if ends else None
    for number in previous:
        signal.signal(number, handle)
    sys.unraisablehook = dropped
    _current = request
    try:
        yield request
    finally:
        _current = None
        sys.unraisablehook = unraisable
        for number, handler in previous.items():
            # After a finished run the process has only to exit, and the previous handler might end
            # it with the status of a failure.
            if ends and request.finished:
                handler = signal.SIG_IGN
            signal.signal(number, handler)
        if watch is not None:
            watch.close()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Names what the block does, for the message where a signal ends it."""
    if _current is None:
        yield
        return
    previous = _current.while_doing
    _current.while_doing = what
    try:
        yield
    except Stopped:
        raise  # the message names the innermost block
    except BaseException:
        _current.while_doing = previous
        raise
    _current.while_doing = previous


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A block that imports libraries and does nothing else, so that a signal may end the process in
    it without unwinding."""
    request = current() or StopRequest()
    request.imports = True
    try:
        yield
    finally:
        request.imports = False


def guarded(run: Callable[[], int]) -> int:
    """The exit status of a program that signals may end: 128 + the signal's number, 143 for SIGTERM
    and 130 for SIGINT."""
    with watched(ends=True) as request:
        try:
            return run()
        except KeyboardInterrupt as stop:
            request.signal = getattr(stop, "signal", signal.SIGINT)
            with contextlib.suppress(OSError):  # a terminal that was closed
                print(request.ending(), file=sys.stderr)
            return 128 + int(request.signal)


class _Watch:
    """A thread that Python's own handler wakes, whatever the main thread is doing."""

    def __init__(self, request: StopRequest, heeded: list[int]) -> None:
        self._request = request
        self._heeded = heeded
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def close(self) -> None:
        # Before the pipe is closed: otherwise a signal would be written to whatever file gets its
        # number next.
        signal.set_wakeup_fd(self._previous)
        os.close(self._write)  # which ends the thread

    def _run(self) -> None:
        first = 0.0  # when the first signal came
        while received := os.read(self._read, 1):
            number = received[0]
            if number not in self._heeded:
                continue
            if not first:
                first = time.monotonic()
                threading.Thread(target=self._wait, args=(number,), daemon=True).start()
            elif time.monotonic() - first > BURST:
                end(number, f"interrupted: stopped at once by a second signal, {name_of(number)}")
        os.close(self._read)

    def _wait(self, number: int) -> None:
        since = time.monotonic()
        while _current is self._request:
            # A state that waits for a process that hangs is not saved any more.
            holding = self._request.holding and not self._request.waits()
            if holding or self._request.finished:
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                self._request.signal = number  # the main thread may not have seen it
                self._request.tell(number)
                end(number, self._request.ending())
            time.sleep(0.1)


def name_of(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    return signal.Signals(number).name
