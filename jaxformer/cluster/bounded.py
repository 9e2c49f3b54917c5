"""Runs untrusted code, such as a chat template, in a process of its own with bounds on time and
memory."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

CORE_SECONDS = 10.0  # CPU time for one question
WAITING = 6  # an answer may take so many times as long by the clock, since the machine may be busy
MEMORY = 1 << 30  # bytes of address space

# Run as `python -c PROGRAM MODULE FUNCTION SECONDS`.
PROGRAM = """
import importlib, sys
from jaxformer.cluster.bounded import serve
module, function, seconds = sys.argv[1:]
serve(getattr(importlib.import_module(module), function), float(seconds))
"""


class OutOfBounds(Exception):
    """A question has no answer; the message continues a sentence, as "takes more than 10 s"."""


class BoundedProcess:
    """A process that answers questions, one after another, by `module.function(question)`.

    Questions and answers are JSON. `seconds` is the CPU time that one answer may take, and MEMORY
    the address space of the process in bytes; on Windows only six times `seconds` by the clock are
    bounded. The process starts with the first question, and ends where its input does, with the
    process that started it. The module must not import jax, whose start takes longer than most
    answers.
    """

    def __init__(self, module: str, function: str, seconds: float = CORE_SECONDS) -> None:
        self.seconds = seconds
        self._arguments = [module, function, str(seconds)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any) -> Any:
        """The answer to a question. Raises OutOfBounds where there is none."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            if self._process is None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            # RLIMIT_CPU ends a process that computes. This ends one that only sleeps or waits, and
            # on Windows, which has no such limits, any.
            timer = threading.Timer(self.seconds * WAITING, process.kill)
            timer.start()
            answer = b""
            try:
                with contextlib.suppress(OSError):  # it has ended
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
            finally:
                timer.cancel()
                if not answer.endswith(b"\n"):  # after KeyboardInterrupt too: it may answer later
                    self.close()
        if not answer.endswith(b"\n"):
            raise OutOfBounds(f"takes more than {self.seconds:g} s, or ends the process")
        reply = json.loads(answer)
        if "failed" in reply:
            raise OutOfBounds(reply["failed"])
        return reply["answer"]

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        # A new process and no fork, since JAX has threads.
        return subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The path of this process, which a script or a notebook may have changed. An empty
            # entry, as of `python -c`, would be the working directory, which -P keeps out.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # no signal of the terminal reaches it
        )


def serve(answer_to: Callable[[Any], Any], seconds: float) -> None:
    """The program of a `BoundedProcess`: answers the questions on standard input, a line of JSON
    each, on standard output, until the input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):  # to a job, whose run still saves
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        import resource
    except ImportError:  # on Windows
        resource = None  # type: ignore[assignment]

    def limit(kind: str, value: float) -> None:
        if resource is not None:
            number = getattr(resource, kind)
            with contextlib.suppress(OSError, ValueError):  # macOS cannot bound the address space
                resource.setrlimit(number, (math.ceil(value), resource.getrlimit(number)[1]))

    # The signal by which RLIMIT_CPU ends a process may leave a core file in the working directory.
    limit("RLIMIT_CORE", 0)
    limit("RLIMIT_AS", MEMORY)
    questions = sys.stdin.buffer
    answers = sys.stdout.buffer
    # What the code itself prints would be read as the answer.
    sys.stdout = sys.stderr
    for line in questions:
        # The limit counts from the start of the process, so it is moved with each question. That is
        # why only the soft limit is set: a hard one cannot be raised again.
        limit("RLIMIT_CPU", sum(os.times()[:2]) + seconds)
        try:
            reply = {"answer": answer_to(json.loads(line))}
        except MemoryError:
            reply = {"failed": f"takes more than {MEMORY / (1 << 30):g} GiB of memory"}
        except RecursionError:
            reply = {"failed": "is nested too deeply"}
        except OutOfBounds as error:  # the function has bounds of its own
            reply = {"failed": str(error)}
        except Exception as error:
            reply = {"failed": f"fails ({type(error).__name__}: {error})"[:500]}
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
