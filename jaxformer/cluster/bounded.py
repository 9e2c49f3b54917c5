"""Runs untrusted code, such as a regular expression or a chat template, in a process of its own
with bounds on time and memory.

A `BoundedProcess` starts with its first question and serves the later ones too. It is a new
process and no fork, since JAX has threads. It ends with the process that started it, whose end
closes its standard input; what it computes at that moment ends within `seconds`.
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

CORE_SECONDS = 10.0  # CPU time for one question
WAITING = 6  # an answer may take so many times as long by the clock, since the machine may be busy
MEMORY = 1 << 30  # bytes of address space

# Run as `python -c PROGRAM MODULE FUNCTION SECONDS MEMORY`.
PROGRAM = """
import importlib, sys
from jaxformer.cluster.bounded import serve
module, function, seconds, memory = sys.argv[1:]
serve(getattr(importlib.import_module(module), function), float(seconds), int(memory))
"""


class OutOfBounds(Exception):
    """A question has no answer; the message continues a sentence, as "takes more than 10 s"."""


class BoundedProcess:
    """A process that answers questions, one after another, by `module.function(question)`.

    Questions and answers are JSON. `seconds` is the CPU time that one answer may take, and `memory`
    the address space of the process in bytes. The module must not import jax, whose start takes
    longer than most answers.
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
            # Asked twice, since another program may have ended the process, or its start failed.
            answer = self._answer(line) or self._answer(line)
        if not answer:
            raise OutOfBounds(f"ends the process that computes it (status {self._status})")
        reply = json.loads(answer)
        if "failed" in reply:
            raise OutOfBounds(reply["failed"])
        return reply["answer"]

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._status = process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # its buffer cannot be flushed any more
                    pipe.close()  # type: ignore[union-attr]

    @property
    def pid(self) -> int | None:
        """The id of the process; None where there is none."""
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
        except BaseException:
            # After KeyboardInterrupt, for example, the next question would get this answer.
            self.close()
            raise
        if not answer.endswith(b"\n"):
            # Waited for before it is killed, so that the status is its own.
            with contextlib.suppress(subprocess.TimeoutExpired):
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
            raise OutOfBounds(
                f"needs a process of its own, and none can start ({error.strerror or error})"
            ) from None
        self._process = process
        return process

    def _forget(self) -> None:
        """Detaches a process made by os.fork from the bounded process, which belongs to its
        parent."""
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
    """Writes a line to a process and returns the line that it answers, incomplete or empty where
    the process has ended."""
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
    """The program of a `BoundedProcess`: answers the questions on standard input, a line of JSON
    each, on standard output, until the input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # only the end of the input ends it
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
    os._exit(0)  # everything has been flushed


def _limit(kind: int, limit: int) -> None:
    """Sets the soft limit of a resource, where the system can; it may be raised later."""
    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS cannot bound the address space
        resource.setrlimit(kind, (limit, hard))


def _reply(answer_to: Callable[[Any], Any], line: bytes, memory: int) -> bytes:
    try:
        return json.dumps({"answer": answer_to(json.loads(line))}).encode()
    except MemoryError:
        failed = f"takes more than {memory / (1 << 30):g} GiB of memory"
    except RecursionError:
        failed = "is nested too deeply"
    except OutOfBounds as error:  # the function has bounds of its own
        failed = str(error)
    except Exception as error:
        failed = f"fails ({type(error).__name__}: {error})"[:500]
    return json.dumps({"failed": failed}).encode()
