"""The roll call of the processes of a run: which of them have come and, while the run lasts, which
have ended.

`jax.distributed` aborts a process that waits in vain for another, or has lost one, without naming
it. So the processes first meet at the coordinator's port, before JAX's service takes it, and keep
these connections. The operating system closes those of a process that dies at once, and those of a
machine that is gone after 40 s.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from jaxformer.arrays.out_of_memory import is_out_of_memory
from jaxformer.cluster.processes import LOST, LostProcess, departures
from jaxformer.cluster.signals import Stopped, current, name_of
from jaxformer.files import ConfigError

LONGEST_MESSAGE = 2**16  # characters
GRACE = 10.0  # seconds in which a process may end by itself, after another has failed
STOP_GRACE = 2.0  # the same, after a signal has ended another, where there is nothing to save
SAVE_GRACE = 45.0  # the same, where there is something to save
# Process 0 sends an answer by its own deadline; seconds beyond launch.timeout in which the others
# wait for it.
ANSWER_MARGIN = 5.0
RETRY_SECONDS = 0.3  # between two attempts to reach process 0
ACCEPT_SECONDS = 0.1  # between two looks of process 0 at who has come
VERDICT_SECONDS = 15.0  # to wait for word of another process, after a collective has failed
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
START_AGAIN = "Start the same command in all processes again; it continues the run."


class Channel:
    """A connection to another process that carries JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection = connection
        self._input = connection.makefile("r", encoding="utf-8", errors="replace")

    def send(self, **message: Any) -> bool:
        """Sends a message; False where the connection is closed."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> dict[str, Any]:
        """The next message; empty where the connection has ended, or sends something else."""
        try:
            message = json.loads(self._input.readline(LONGEST_MESSAGE))
        except (OSError, ValueError):
            return {}
        return message if isinstance(message, dict) else {}

    def is_open(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


class RollCall:
    """The processes of a run that have come, and the watch over them.

    `hosts` are their host names, by index. `lost` says which other process was the first to end,
    and `signal` is the number of the signal that ended it, None for another reason. Raises
    LostProcess where a process does not come within `timeout` seconds, and ConfigError where the
    processes do not agree on their number and indices.
    """

    def __init__(self, index: int, count: int, coordinator: str, timeout: float) -> None:
        self.index, self.count, self.coordinator = index, count, coordinator
        self.hosts = [""] * count
        self.lost = ""
        self.signal: int | None = None
        self._another_ended = threading.Event()
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._gathering = True
        self._channels: dict[int, Channel] = {}
        self._watches: list[threading.Thread] = []
        deadline = time.monotonic() + timeout
        if index == 0:
            self._gather(deadline, timeout)
        else:
            self._join(deadline, timeout)
        for other, channel in self._channels.items():
            watch = threading.Thread(target=self._watch, args=(other, channel), daemon=True)
            watch.start()
            self._watches.append(watch)

    def _gather(self, deadline: float, timeout: float) -> None:
        """Process 0 waits for the others. Each connection has a thread of its own, so that a slow
        or silent one holds up nobody."""
        refusals: list[str] = []
        with _server(self.coordinator) as server:
            server.settimeout(ACCEPT_SECONDS)
            while not self._is_complete():
                if time.monotonic() > deadline:
                    raise LostProcess(self._report_missing(timeout, refusals))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                admission = (connection, deadline, refusals)
                threading.Thread(target=self._admit, args=admission, daemon=True).start()
        self.hosts[0] = socket.gethostname()
        self._send(hosts=self.hosts)

    def _is_complete(self) -> bool:
        """Whether all have come; nobody is admitted afterwards."""
        with self._guard:
            self._gathering = len(self._channels) < self.count - 1
            return not self._gathering

    def _admit(self, connection: socket.socket, deadline: float, refusals: list[str]) -> None:
        """Reads the first message of a connection, which may come late from a process that is slow,
        and enters the process."""
        connection.settimeout(max(deadline - time.monotonic(), ACCEPT_SECONDS))
        channel = Channel(connection)
        message = channel.read()
        index, count, host = (message.get(name) for name in ("index", "count", "host"))
        with self._guard:
            if type(index) is not int or not isinstance(host, str) or not self._gathering:
                connection.close()  # no process of this run, or too late
                return
            if problem := self._problem(index, count):
                refusals.append(f"A process {index} on {host} was refused: {problem}.")
                channel.send(refused=f"{problem}: launch.process or launch.processes is wrong.")
                connection.close()
                return
            connection.settimeout(None)
            self._channels[index], self.hosts[index] = channel, host
            channel.send(came=index)

    def _problem(self, index: int, count: Any) -> str:
        """Why a process cannot be admitted; empty where it can."""
        if count != self.count:
            return f"it counts {count} processes, and process 0 counts {self.count}"
        if not 0 < index < self.count:
            return f"the indices are 0 to {self.count - 1}"
        if index in self._channels and self._channels[index].is_open():
            return f"process {index} has come already, on {self.hosts[index]}"
        return ""

    def _report_missing(self, timeout: float, refusals: list[str]) -> str:
        """Tells those that came which processes did not; the message of the error."""
        with self._guard:
            self._gathering = False
        missing = [str(index) for index in range(1, self.count) if index not in self._channels]
        text = (
            f"{'process' if len(missing) == 1 else 'processes'} {', '.join(missing)} of"
            f" {self.count} did not come within launch.timeout={timeout:g} seconds. Look at how"
            f" they were started and whether they reach {self.coordinator};"
            f" {len(self._channels) + 1} of {self.count} came."
        )
        self._send(missing=text)
        return " ".join([text, *refusals])

    def _join(self, deadline: float, timeout: float) -> None:
        """The others connect to process 0 and wait for its answer. Where the connection is closed
        without one, they connect again until the deadline."""
        host, _, port = self.coordinator.rpartition(":")
        reason = "nothing answers there"
        while (seconds := deadline - time.monotonic()) > 0:
            try:
                connection = socket.create_connection(
                    (host.strip("[]"), int(port)), min(seconds, 5)
                )
            except OSError as error:
                reason = f"nothing answers there ({error.strerror or error})"
                time.sleep(min(RETRY_SECONDS, seconds))
                continue
            if self._is_admitted(connection, timeout):
                return
            connection.close()
            reason = "what answers there is not process 0 of this run"
            time.sleep(min(RETRY_SECONDS, seconds))
        raise LostProcess(
            f"process 0 of {self.count} did not come within launch.timeout={timeout:g} seconds: it"
            f" should be at {self.coordinator}, and {reason}."
        )

    def _is_admitted(self, connection: socket.socket, timeout: float) -> bool:
        """Introduces this process. False where process 0 is not at the other end, or closed the
        connection before it admitted this process."""
        channel = Channel(connection)
        channel.send(index=self.index, count=self.count, host=socket.gethostname())
        # Process 0 may have begun to wait just now. Where it ends it closes the connection.
        connection.settimeout(timeout + ANSWER_MARGIN)
        reply = channel.read()
        if "came" in reply:  # from here on process 0 is lost where it does not answer
            reply = channel.read()
            if not reply:
                raise LostProcess(
                    f"process 0 of {self.count}, at {self.coordinator}, has ended before all had"
                    f" come, or does not answer. {START_AGAIN}"
                )
        if "refused" in reply:
            raise ConfigError(f"process {self.index} was refused: {reply['refused']}")
        if "missing" in reply:
            raise LostProcess(reply["missing"])
        if "hosts" not in reply:
            return False
        connection.settimeout(None)
        self.hosts, self._channels = reply["hosts"], {0: channel}
        return True

    def _watch(self, other: int, channel: Channel) -> None:
        """Reads what another process sends, until it has ended."""
        name = f"process {other} ({self.hosts[other]})"
        ended_well = False
        while message := channel.read():
            if "bye" in message:
                ended_well = True
                self._note_departure(name)
            if text := message.get("failed"):
                ended_well = True
                self._end_with(f"{name} failed: {text}")
            elif text := message.get("lost"):
                self._end_with(text, message.get("signal"))
        if not ended_well:
            self._end_with(f"{name} has died: it was killed, or its machine is gone.")

    def _note_departure(self, name: str) -> None:
        """Another process has left the run: whoever still waits for its answer waits in vain."""
        with self._guard:
            if not self._closed.is_set():
                departures[name] = time.monotonic()

    def _end_with(self, text: str, signal: int | None = None) -> None:
        """Another process has ended, by itself or by a signal: tells the rest, and ends this one
        unless it ends by itself."""
        with self._guard:
            if self._another_ended.is_set():
                return
            self.lost, self.signal = text, signal
            self._another_ended.set()
        if self.index == 0:
            self._send(lost=text, signal=signal)
        grace = GRACE if signal is None else self._stop_by(signal)
        if not self._closed.wait(grace):
            self._exit()

    def _stop_by(self, number: int) -> float:
        """Stops this process as if it had received the signal too; the seconds that it may take."""
        request = current()
        if not self._closed.is_set() and (request is None or request.signal is None):
            os.kill(os.getpid(), number)
        return SAVE_GRACE if request is not None and request.holding else STOP_GRACE

    def _exit(self) -> NoReturn:
        error = self._error()
        kind = "interrupted" if isinstance(error, Stopped) else "lost process"
        print(f"{kind}: {error}", file=sys.stderr, flush=True)
        os._exit(128 + error.signal if isinstance(error, Stopped) else LOST)

    def _error(self) -> LostProcess | Stopped:
        """The error by which this process ends, after another one has ended."""
        if self.signal is None:
            return LostProcess(f"{self.lost} {START_AGAIN}")
        return Stopped(self.signal, f"{self.lost} {START_AGAIN}")

    def stopped(self, number: int) -> None:
        """Tells the others of a signal that ends this process."""
        name = f"process {self.index} ({self.hosts[self.index]}) was stopped by {name_of(number)}."
        self._send(lost=name, signal=number)

    def verdict(self, error: BaseException, expected: tuple[type[BaseException], ...]) -> None:
        """Tells the others of an error that ends this process. Raises LostProcess or Stopped
        instead where another process that has ended is the cause."""
        seconds = 0.0 if isinstance(error, expected) else 1.0
        if _comes_of_jax(error):
            seconds = VERDICT_SECONDS
        if seconds and self._another_ended.wait(seconds):
            raise self._error() from error
        self._send(failed=f"{type(error).__name__}: {error}"[: LONGEST_MESSAGE // 8])

    def _send(self, **message: Any) -> None:
        for channel in self._channels.values():
            channel.send(**message)

    def close(self) -> None:
        """Leaves the run: this process needs the others no more."""
        with self._guard:
            self._closed.set()
            departures.clear()
        self._send(bye=True)

    def leave(self, status: int) -> NoReturn:
        """Ends the process at once: JAX would wait for the others at its end."""
        self.close()
        sys.stdout.flush()
        sys.stderr.flush()
        self.wait_for_others(GRACE)
        os._exit(status)

    def wait_for_others(self, seconds: float) -> None:
        """Waits in process 0 until the others have ended, for at most `seconds` in all: JAX aborts
        them when its service is gone, so process 0 has to end last."""
        deadline = time.monotonic() + seconds
        for watch in self._watches if self.index == 0 else ():
            watch.join(max(deadline - time.monotonic(), 0.0))

    def catch_aborts(self) -> None:
        """Replaces the message and status of an abort by JAX, whose own watch may be faster."""
        libc = ctypes.CDLL(None)

        def handler(_: int) -> None:
            if self._another_ended.wait(5):
                self._exit()
            libc.signal(signal.SIGABRT, None)  # the default

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
        libc.signal(signal.SIGABRT, self._handler)


def _comes_of_jax(error: BaseException | None) -> bool:
    """Whether JAX raised the error, or one that caused it, for another reason than memory: a save
    whose collective fails raises NotSaved."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and not is_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _server(coordinator: str) -> socket.socket:
    port = int(coordinator.rpartition(":")[2])
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"launch.coordinator={coordinator!r}: port {port} of this machine cannot be used"
            f" ({error.strerror}): choose another port."
        ) from error
