"""Commands of jaxformer in processes of their own, forked from one that has imported JAX: what
remains of a start is what a command itself does."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

SERVER = Path(__file__).parent / "command_server.py"


class Command:
    """A command that runs, with the methods of `subprocess.Popen` that tests use.

    `memory` bounds its address space, in bytes (0: not at all). `merged`: standard error goes where
    standard output goes. `patch` is Python code that runs first.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        memory: int = 0,
        merged: bool = False,
        patch: str = "",
    ) -> None:
        self.returncode: int | None = None
        self._out, self._error = _file(), None if merged else _file()
        request = {
            "arguments": [*arguments],
            "environment": {**os.environ} | (environment or {}),
            "folder": str(folder or Path.cwd()),
            "memory": memory,
            "patch": patch,
        }
        files = [file.fileno() for file in (self._out, self._error) if file]
        self.pid = int(_ask(request, files))

    def wait(self, timeout: float = 300) -> int:
        if self.returncode is None:
            self.returncode = _ask({"wait": self.pid, "seconds": timeout})
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"wait": self.pid, "seconds": 0})
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """What it printed, once it has ended."""
        self.wait(timeout)
        return _printed(self._out), _printed(self._error) if self._error else ""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _printed(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


@functools.cache
def _server() -> socket.socket:
    """The socket to the process that forks, which ends when this one does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        subprocess.Popen([sys.executable, str(SERVER)], stdin=there)
    return here


def _ask(request: dict[str, Any], files: Sequence[int] = ()) -> Any:
    packet = json.dumps(request).encode()
    server = _server()
    if files:
        socket.send_fds(server, [packet], files)
    else:
        server.send(packet)
    answer = server.recv(4096)
    if not answer:
        raise RuntimeError("the process that runs commands has ended")
    return json.loads(answer)
