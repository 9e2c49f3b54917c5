"""Runs command lines of jaxformer, each in a forked process of its own, so that hundreds of them
need one import of JAX.

Standard input is a socket of packets. A request to start is a JSON object with the `arguments`,
the `environment`, the `folder` to run in, the `memory` it may take and the `patch` that is executed
before it, and comes with the file
descriptors of standard output and standard error; the answer is the process id. A request to
`wait` for a process id, for so many `seconds`, is answered by the exit status as in
`subprocess.Popen`, or by null.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import socket
import sys
import tempfile
import time
import traceback
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

PACKET = 1 << 20
LATER = (  # what commands import once they need it
    "grain.experimental",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboardX",
    "tiktoken",
    "tokenizers",
)


def main() -> None:
    _import_all()
    gc.freeze()  # so that no collection in a child copies the memory that it shares
    with socket.socket(fileno=0) as asked:
        while True:
            packet, files, _, _ = socket.recv_fds(asked, PACKET, 2)
            if not packet:
                return
            request = json.loads(packet)
            answer = _wait(**request) if "wait" in request else _start(request, files)
            for file in files:
                os.close(file)
            asked.send(json.dumps(answer).encode())


def _import_all() -> None:
    """What commands import, other than what starts threads or a backend."""
    from jaxformer.cli import keep_memory

    keep_memory()
    from jax._src import compiler

    import jaxformer

    own = [module.name for module in pkgutil.walk_packages(jaxformer.__path__, "jaxformer.")]
    for name in (*LATER, *own):
        if not {"lm_eval", "harness", "harness_model", "__main__", "nnx"} & {*name.split(".")}:
            importlib.import_module(name)
    # JAX has the first process alone write to the compilation cache, but what another compiles for
    # a CPU has a key of its own.
    first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    mock.patch.object(compiler, "distributed", first).start()


def _start(request: dict[str, Any], files: list[int]) -> int:
    child = os.fork()
    if not child:
        _run(request, files)
    return child


def _wait(wait: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        done, code = os.waitpid(wait, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(code)
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """The command, in the child, which ends it as Python would, without the slow release of each
    object. Among the functions run at exit is JAX's, which waits for the other processes."""
    status = 99
    try:
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (files[0], 1), (files[-1], 2)):
            os.dup2(source, target)
        os.closerange(3, max(nothing, *files) + 1)
        if request["memory"]:
            resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
        tempfile.tempdir = None
        from jaxformer.cli import main as command

        try:
            exec(request["patch"], {})
            status = command(request["arguments"])
        except SystemExit as stop:  # of a patch that is a script
            status = int(stop.code or 0)
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
