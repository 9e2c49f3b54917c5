"""The roll call of the processes of a run: which of them came, and, while the run lasts, which has
ended.

jax.distributed ends a process that waits for another in vain, or that has lost one, by an abort
that does not name it. So the processes meet at the coordinator's port first, before JAX's service
takes the port, and keep these connections: the operating system closes those of a process that
dies, and after 40 s those of a machine that is gone.
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
from jaxformer.cluster.processes import LOST, LostProcess
from jaxformer.cluster.signals import Stopped, current, name_of
from jaxformer.files import ConfigError

LONGEST = 2**16  # characters of a message
GRACE = 10.0  # seconds in which a process may end by itself, after another has failed
TO_STOP = 2.0  # the same, after a signal has ended another, for one that has nothing to save
TO_SAVE = 45.0  # and for one that has
ADMISSION = 5.0  # seconds for the first message of a connection
VERDICT = 15.0  # seconds to wait for word of another process, after a collective has failed
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Line:
    """A connection to another process: JSON objects, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection = connection
        self._input = connection.makefile("r", encoding="utf-8", errors="replace")

    def send(self, **message: Any) -> bool:
        """Whether it could be sent."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> dict[str, Any]:
        """The next message; empty when there will be none."""
        try:
            found = json.loads(self._input.readline(LONGEST))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def is_open(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


class RollCall:
    """The processes of a run that have come, and the watch over them. `hosts` are their names."""

    def __init__(self, index: int, count: int, coordinator: str, timeout: float) -> None:
        self.index, self.count, self.coordinator = index, count, coordinator
        self.hosts = [""] * count
        self.lost, self._known = "", threading.Event()  # which process has ended, and that one has
        self.signal: int | None = None  # that by which it has
        self._ended = threading.Event()
        self._guard = threading.Lock()
        self._lines: dict[int, Line] = {}
        self._threads: list[threading.Thread] = []
        deadline = time.monotonic() + timeout
        if index == 0:
            self._call(deadline, timeout)
        else:
            self._answer(deadline, timeout)
        for other, line in self._lines.items():
            watch = threading.Thread(target=self._watch, args=(other, line), daemon=True)
            watch.start()
            self._threads.append(watch)

    def _call(self, deadline: float, timeout: float) -> None:
        """Process 0: waits for the others."""
        refused: list[str] = []
        with _server(self.coordinator) as server:
            while len(self._lines) < self.count - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise LostProcess(self._missing(timeout, refused)) from None
                self._admit(connection, refused)
        self.hosts[0] = socket.gethostname()
        for line in self._lines.values():
            line.send(hosts=self.hosts)

    def _admit(self, connection: socket.socket, refused: list[str]) -> None:
        connection.settimeout(ADMISSION)
        line = Line(connection)
        asked = line.read()
        index, count, host = (asked.get(name) for name in ("index", "count", "host"))
        if type(index) is not int or not isinstance(host, str):
            connection.close()  # not a process of ours
            return
        problem = ""
        if count != self.count:
            problem = f"it counts {count} processes, and process 0 counts {self.count}"
        elif not 0 < index < self.count:
            problem = f"the indices are 0 to {self.count - 1}"
        elif index in self._lines and self._lines[index].is_open():
            problem = f"process {index} has come already, on {self.hosts[index]}"
        if problem:
            refused.append(f"A process {index} on {host} was refused: {problem}.")
            line.send(refused=f"{problem}: launch.process or launch.processes is wrong.")
            connection.close()
            return
        connection.settimeout(None)
        self._lines[index], self.hosts[index] = line, host
        line.send(came=index)

    def _missing(self, timeout: float, refused: list[str]) -> str:
        absent = [index for index in range(1, self.count) if index not in self._lines]
        names = f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of {self.count}"
        text = (
            f"{names} did not come within launch.timeout={timeout:g} seconds. Look at how they were"
            f" started and whether they reach {self.coordinator}; {len(self._lines) + 1} of"
            f" {self.count} came."
        )
        for line in self._lines.values():
            line.send(missing=text)
        return " ".join([text, *refused])

    def _answer(self, deadline: float, timeout: float) -> None:
        """The others: connect to process 0 and wait for its word."""
        host, _, port = self.coordinator.rpartition(":")
        found = "nothing answers there"
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LostProcess(
                    f"process 0 of {self.count} did not come within launch.timeout={timeout:g}"
                    f" seconds: it should be at {self.coordinator}, and {found}."
                )
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), min(left, 5))
            except OSError as error:
                found = f"nothing answers there ({error.strerror or error})"
                time.sleep(min(0.3, left))
                continue
            line = Line(connection)
            line.send(index=self.index, count=self.count, host=socket.gethostname())
            # Process 0 may have begun to wait just now. Where it ends it closes the connection.
            connection.settimeout(timeout + ADMISSION)
            reply = line.read()
            if "came" in reply:  # process 0 it is: where it ends there is nobody to wait for
                reply = line.read() or {"missing": self._gone()}
            if "hosts" in reply:
                connection.settimeout(None)
                self.hosts, self._lines = reply["hosts"], {0: line}
                return
            connection.close()
            if "refused" in reply:
                raise ConfigError(f"process {self.index} was refused: {reply['refused']}")
            if "missing" in reply:
                raise LostProcess(reply["missing"])
            found = "what answers there is not process 0 of this run"
            time.sleep(min(0.3, left))

    def _gone(self) -> str:
        return (
            f"process 0 of {self.count}, at {self.coordinator}, has ended before all had come, or"
            f" does not answer. {START_AGAIN}"
        )

    def _watch(self, other: int, line: Line) -> None:
        """Reads what another process says, until it has ended."""
        ended_well = False
        while message := line.read():
            ended_well = ended_well or "bye" in message
            if text := message.get("failed"):
                ended_well = True
                self._tell(f"process {other} ({self.hosts[other]}) failed: {text}")
            elif text := message.get("lost"):
                self._tell(text, message.get("signal"))
        if not ended_well:
            self._tell(
                f"process {other} ({self.hosts[other]}) has died: it was killed, or its machine is"
                " gone."
            )

    def _tell(self, text: str, signal: int | None = None) -> None:
        """Another process has ended, by itself or by a signal: tells the rest, and ends this one,
        unless it does itself."""
        with self._guard:
            if self._known.is_set():
                return
            self.lost, self.signal = text, signal
            self._known.set()
        if self.index == 0:
            self._send(lost=text, signal=signal)
        grace = GRACE if signal is None else self._stop_by(signal)
        if not self._ended.wait(grace):
            self._end()

    def _stop_by(self, number: int) -> float:
        """Has this process stop as if it had got the signal too; the seconds that it may take."""
        request = current()
        if not self._ended.is_set() and (request is None or request.signal is None):
            os.kill(os.getpid(), number)
        return TO_SAVE if request is not None and request.held else TO_STOP

    def _end(self) -> NoReturn:
        error = self._error()
        kind = "interrupted" if isinstance(error, Stopped) else "lost process"
        print(f"{kind}: {error}", file=sys.stderr, flush=True)
        os._exit(128 + error.signal if isinstance(error, Stopped) else LOST)

    def _error(self) -> LostProcess | Stopped:
        """What the end of another process is for this one."""
        if self.signal is None:
            return LostProcess(f"{self.lost} {START_AGAIN}")
        return Stopped(self.signal, f"{self.lost} {START_AGAIN}")

    def stopped(self, number: int) -> None:
        """Tells the others of a signal that ends this process."""
        name = f"process {self.index} ({self.hosts[self.index]}) was stopped by {name_of(number)}."
        self._send(lost=name, signal=number)

    def verdict(self, error: BaseException, expected: tuple[type[BaseException], ...]) -> None:
        """Tells the others of an error that ends this process. Raises LostProcess or Stopped
        instead where the error comes of another that has ended."""
        wait = 0.0 if isinstance(error, expected) else 1.0
        wait = VERDICT if _comes_of_jax(error) else wait
        if wait and self._known.wait(wait):
            raise self._error() from error
        self._send(failed=f"{type(error).__name__}: {error}"[: LONGEST // 8])

    def _send(self, **message: Any) -> None:
        for line in self._lines.values():
            line.send(**message)

    def close(self) -> None:
        """This process needs the others no more."""
        self._ended.set()
        self._send(bye=True)

    def leave(self, status: int) -> NoReturn:
        """Ends the process at once: JAX would wait for the others at its end."""
        self.close()
        sys.stdout.flush()
        sys.stderr.flush()
        self.wait_for_others(GRACE)
        os._exit(status)

    def wait_for_others(self, seconds: float) -> None:
        """Process 0 is the last one to end, since JAX aborts the others when its service is gone:
        it waits until the others have ended, and at most so many seconds for all of them."""
        deadline = time.monotonic() + seconds
        for watch in self._threads if self.index == 0 else ():
            watch.join(max(deadline - time.monotonic(), 0.0))

    def catch_aborts(self) -> None:
        """Gives an abort by JAX, whose own watch may be faster, the message and status of ours."""
        libc = ctypes.CDLL(None)

        def handler(_: int) -> None:
            if self._known.wait(5):
                self._end()
            libc.signal(signal.SIGABRT, None)  # the default

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
        libc.signal(signal.SIGABRT, self._handler)


START_AGAIN = "Start the same command in all processes again; it continues the run."


def _comes_of_jax(error: BaseException | None) -> bool:
    """Whether JAX raised the error, or one that it was raised from, for another reason than memory:
    a save whose collective fails raises NotSaved."""
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
