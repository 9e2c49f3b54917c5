"""Runs command lines of jaxformer, each in a forked process of its own, so that hundreds of them
need one import of JAX.

Reads a line of JSON for each: its arguments, the directory where it runs, and the seconds it may
take. Answers with its exit status (None where it was ended), and what it printed.
"""

import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
from pathlib import Path

MEMORY = 12 << 30  # of one command, in bytes: more is a fault, too
SHOWN = 6000


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(_answer(case)), file=answers, flush=True)


def _import_all() -> None:
    """What commands import, other than what starts threads or a backend."""
    import grain  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import tensorboardX  # noqa: F401
    import tiktoken  # noqa: F401
    import tokenizers  # noqa: F401

    import jaxformer

    for module in pkgutil.walk_packages(jaxformer.__path__, "jaxformer."):
        if not {"lm_eval", "__main__", "nnx"} & {*module.name.split(".")}:
            importlib.import_module(module.name)


def _answer(case: dict) -> dict:
    out, begin = Path(case["folder"]) / "printed.txt", time.monotonic()
    child = os.fork()
    if not child:
        _run(case, out)
    status = None
    while time.monotonic() - begin < case["seconds"] and status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0 if done else 0.005)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    printed = out.read_bytes()[-SHOWN:].decode("utf-8", "replace") if out.exists() else ""
    return {"status": status, "printed": printed, "seconds": time.monotonic() - begin}


def _run(case: dict, out: Path) -> None:
    """The command, in the child, which it ends."""
    status = 99
    try:
        os.setsid()
        os.chdir(case["folder"])
        os.environ["HOME"] = case["folder"]
        os.environ["TMPDIR"] = case["folder"]
        written = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (written, 1), (written, 2)):
            os.dup2(source, target)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
        import tempfile

        tempfile.tempdir = None
        from jaxformer.cli import main as command

        status = command(case["arguments"])
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
