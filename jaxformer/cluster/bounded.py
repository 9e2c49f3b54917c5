"""Code of a stranger, such as a regular expression or a chat template, in a process of its own with
bounds of time and memory.

A `BoundedProcess` starts when it is first asked, and stays for what is asked later. It is started
anew and not forked, since JAX has threads. It ends with the process that started it: its standard
input is closed then, and what it computes at that moment ends within `seconds`.
"""

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    import resource
except ImportError:  # on Windows, where the time is bounded, and the memory is not
    resource = None  # type: ignore[assignment]

CORE_SECONDS = 10.0  # of a core, for one question
WAITING = 6  # times as long is waited for an answer, since the machine may be busy
MEMORY = 1 << 30  # bytes of address space

# Run as `python -c PROGRAM MODULE FUNCTION SECONDS MEMORY`.
PROGRAM = """
import importlib, sys
from jaxformer.cluster.bounded import serve
module, function, seconds, memory = sys.argv[1:]
serve(getattr(importlib.import_module(module), function), float(seconds), int(memory))
"""


class OutOfBounds(Exception):
    """A question has no answer; the message goes on after "it", as "takes more than 10 s"."""


class BoundedProcess:
    """A process that answers questions, one after another, by `module.function(question)`.

    Questions and answers are JSON. `seconds` are those of a core that one answer may take, and
    `memory` the bytes of address space of the process. The module must not import jax, which takes
    longer to start than most questions to answer.
    """

    def __init__(
        self, module: str, function: str, seconds: float = CORE_SECONDS, memory: int = MEMORY
    ) -> None:
        self.module, self.function = module, function
        self.seconds, self.memory = seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._status = 0
        _STARTED.add(self)

    def ask(self, question: Any) -> Any:
        """The answer to a question. Raises OutOfBounds where there is none."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            # A process that somebody else ended, or that could not be started, has a second chance.
            answer = self._answer(line) or self._answer(line)
        if not answer:
            raise OutOfBounds(f"ends the process that computes it (status {self._status})")
        found = json.loads(answer)
        if "failed" in found:
            raise OutOfBounds(found["failed"])
        return found["answer"]

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._status = process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what is left in its buffer goes nowhere
                    pipe.close()  # type: ignore[union-attr]

    @property
    def pid(self) -> int | None:
        """The number of the process; None where there is none."""
        return self._process.pid if self._process else None

    def _answer(self, line: bytes) -> bytes:
        """The line that answers a line; empty where the process has ended without one."""
        process = self._process or self._start()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "bounded")
        exchange = self._thread.submit(_exchange, process, line)
        try:
            answer = exchange.result(self.seconds * WAITING)
        except TimeoutError:
            self.close()
            exchange.exception()  # waits until the thread has seen the end of the process
            raise OutOfBounds(f"takes more than {self.seconds * WAITING:g} s") from None
        except BaseException:  # such as KeyboardInterrupt: the answer would be that of the next
            self.close()
            raise
        if not answer.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):  # its own status, if it has ended
                process.wait(1)
            self.close()
            if self._status == -getattr(signal, "SIGXCPU", math.inf):
                raise OutOfBounds(f"takes more than {self.seconds:g} s of a core")
            return b""
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        arguments = [self.module, self.function, str(self.seconds), str(self.memory)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # no signal of the terminal reaches it
            )
        except OSError as error:
            told = error.strerror or error
            raise OutOfBounds(f"needs a process of its own, and none can start ({told})") from None
        self._process = process
        return process

    def _forget(self) -> None:
        """Leaves the process to the one that started it, in the copy of that one by os.fork."""
        process = self._process
        if process is not None:
            process.returncode = 0  # it is no child of this process
            nowhere = os.open(os.devnull, os.O_RDWR)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(nowhere, pipe.fileno(), inheritable=False)  # type: ignore[union-attr]
            os.close(nowhere)
        self._lock, self._process, self._thread = threading.Lock(), None, None


def _exchange(process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """Writes a line to a process and reads one; what was read where it ended, if not a line."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except (OSError, ValueError):  # it has ended, or its pipes are closed
        return b""


_STARTED: "weakref.WeakSet[BoundedProcess]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for bounded in list(_STARTED):
        bounded.close()


def _forget_all() -> None:
    for bounded in list(_STARTED):
        bounded._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def serve(answer_to: Callable[[Any], Any], seconds: float, memory: int) -> None:
    """Answers questions of standard input, a line of JSON each, on standard output, until the input
    ends: the other side of `BoundedProcess`."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the end of the input ends it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if resource is not None:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, memory)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    with contextlib.suppress(BrokenPipeError):
        for line in questions:
            if resource is not None:
                used = resource.getrusage(resource.RUSAGE_SELF)
                _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
            answers.write(_reply(answer_to, line, memory) + b"\n")
            answers.flush()
    os._exit(0)  # nothing is left to be written


def _limit(kind: int, most: int) -> None:
    """Bounds a resource, where the system can; the CPU time may be extended later."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has no bound of the address space
        resource.setrlimit(kind, (most, hard))


def _reply(answer_to: Callable[[Any], Any], line: bytes, memory: int) -> bytes:
    try:
        return json.dumps({"answer": answer_to(json.loads(line))}).encode()
    except MemoryError:
        failed = f"takes more than {memory / (1 << 30):g} GiB of memory"
    except RecursionError:
        failed = "is nested too deeply"
    except OutOfBounds as error:  # a bound of the function itself
        failed = str(error)
    except Exception as error:
        failed = f"fails ({type(error).__name__}: {error})"[:500]
    return json.dumps({"failed": failed}).encode()
