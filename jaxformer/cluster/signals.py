"""Signals that ask a program to stop: noted where a state has to be saved first, obeyed at once
elsewhere.

Imports nothing but the standard library, so that a command watches signals before it imports JAX.
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
    from jaxformer.cluster.stop_agreement import StopAgreement

# A cluster ends a job by SIGTERM, announces it by SIGUSR1 (Slurm's --signal), and a terminal that
# closes sends SIGHUP.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
BURST = 1.0  # seconds within which a repeated signal is the same request, as `timeout` sends two
PATIENCE = 5.0  # seconds in which what can be ended at once has to end
RESEND_DELAY = 0.01  # seconds after which a signal whose exception was dropped is sent again


class Stopped(KeyboardInterrupt):
    """A signal ended a program that had nothing to save. No `except Exception` holds it up."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {name_of(number)}")
        self.signal = number


class StopRequest:
    """Whether a signal has asked the program to stop, and what is done about it.

    `signal` is the number of the first one, None before. `while_doing` is said where a signal ends
    the program at once: what it was doing, and what the same command then does. While `imports`, a
    signal ends it without an exception, which the libraries that are imported might catch. `agree`
    is set where several processes have to stop together, and `tell` where the others are told of a
    signal that ends this one. A `finished` program ignores signals.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.while_doing = ""
        self._held, self.imports, self.finished = 0, False, False
        self.agree: StopAgreement | None = None
        self.tell: Callable[[int], None] = lambda number: None

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
        """Of the signal: SIGTERM and so on."""
        return "" if self.signal is None else name_of(self.signal)

    @property
    def held(self) -> bool:
        """Whether a signal is only noted now."""
        return self._held > 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Within this block signals are noted, and the block asks `asked`. One that it did not act
        on raises Stopped at its end."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held:
            self.obey()

    def obey(self) -> None:
        """Raises Stopped where a signal has asked for it."""
        if self.signal is not None:
            raise Stopped(self.signal)

    def note(self, number: int) -> None:
        """The handler of the signals, in the main thread. Only the first one counts here; a second
        one ends a program by its watch."""
        if self.signal is not None or self.finished:
            return
        self.signal = number
        if self.imports:
            end(number, self.ending())
        if not self.held:
            self.obey()

    def send_again(self, number: int) -> None:
        """Forgets a signal whose exception was dropped, and sends it to this process again after
        RESEND_DELAY. If that code still runs then, its exception is dropped and it is sent again.
        """
        self.signal = None

        def send() -> None:
            time.sleep(RESEND_DELAY)
            if _current is self:
                os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()

    def ending(self) -> str:
        """What is said where a signal ends a program at once."""
        return " ".join(filter(None, [f"interrupted: stopped by {self.name}", self.while_doing]))


def end(number: int, message: str) -> None:
    """Ends the process by a signal's exit status without another line of Python, since a compiler
    does not let go."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())
    os._exit(128 + number)


_current: StopRequest | None = None  # that of this process, while signals are watched


def current() -> StopRequest | None:
    """The request of this process while signals are watched, else None."""
    return _current


@contextlib.contextmanager
def watched(ends: bool = False) -> Iterator[StopRequest]:
    """Watches signals while the block runs, unless it is watched already or this is no main thread;
    both give the request that is there or an inert one.

    Signals that the process ignores, as `nohup` has it ignore SIGHUP, stay ignored. `ends`: the
    block is the whole program, which a thread ends where the main thread is held up by a compiler
    or another library: PATIENCE seconds after a signal if nothing has to be saved, and at a second
    signal always. Else a second signal goes to the handler from before.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield _current or StopRequest()
        return
    request, first = StopRequest(), 0.0
    before: dict[int, Any] = {}
    for stopping in STOPPING:
        handler = signal.getsignal(stopping)
        # None is a handler that is no Python function, and could not be put back.
        if handler not in (signal.SIG_IGN, None):
            before[stopping] = handler

    def handle(number: int, _: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        if not ends and time.monotonic() - first > BURST:  # a second one: to whom it was before
            signal.signal(number, before[number])
            signal.raise_signal(number)
        request.note(number)

    watch = _Watch(request, [*before]) if ends else None
    for number in before:
        signal.signal(number, handle)
    _current = request
    try:
        with _resending(request):
            yield request
    finally:
        _current = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends and request.finished else handler)
        if watch is not None:
            watch.close()


@contextlib.contextmanager
def _resending(request: StopRequest) -> Iterator[None]:
    """Within this block a signal is sent again if Python drops its exception. Python prints and
    drops what is raised in a destructor or in a callback of the garbage collector, such as JAX's.
    """
    report = sys.unraisablehook

    def resend(found: Any) -> None:
        if isinstance(found.exc_value, Stopped):
            request.send_again(found.exc_value.signal)
        else:
            report(found)

    sys.unraisablehook = resend
    try:
        yield
    finally:
        sys.unraisablehook = report


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """In this block libraries are imported, and nothing else is done that had to be undone."""
    request = _current or StopRequest()
    request.imports = True
    try:
        yield
    finally:
        request.imports = False


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Says, where a signal ends this block, what it ended."""
    if _current is None:
        yield
        return
    before, _current.while_doing = _current.while_doing, what
    try:
        yield
    except Stopped:
        raise  # with the words of the innermost block
    except BaseException:
        _current.while_doing = before
        raise
    _current.while_doing = before


class _Watch:
    """A thread that Python's own handler wakes, whatever the main thread is doing."""

    def __init__(self, request: StopRequest, heeded: list[int]) -> None:
        self._request, self._heeded = request, heeded
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._write, self._before = write, signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
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
            if self._request.held or self._request.finished:
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                self._request.signal = number  # the main thread may not have seen it
                self._request.tell(number)
                end(number, self._request.ending())
            time.sleep(0.1)


def name_of(number: int) -> str:
    """SIGTERM and so on."""
    return signal.Signals(number).name


def guarded(run: Callable[[], int]) -> int:
    """The exit status of a program that signals may end: 128 + the signal's number, 143 for
    SIGTERM and 130 for SIGINT."""
    with watched(ends=True) as request:
        try:
            return run()
        except KeyboardInterrupt as stop:
            request.signal = getattr(stop, "signal", signal.SIGINT)
            with contextlib.suppress(OSError):  # a terminal that was closed
                print(request.ending(), file=sys.stderr)
            return 128 + int(request.signal)
