"""The last resort of the command line: an error that nobody foresaw becomes one line and a file
with its traceback."""

import contextlib
import errno
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence

from jaxformer.config.config_file import read_config, settings_in
from jaxformer.config.format import escaped

SHOWN_CHARACTERS = 300  # of the message of an error

# Errors of the operating system that say that there is no room for what is written.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What XLA's messages say where a device has no memory left.
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory allocating")
# The packages that ask the store of a URL.
OF_STORES = re.compile(r"(aiobotocore|aiohttp|botocore|gcsfs|google|s3fs)\b")
SHOW = "JAXFORMER_TRACEBACK"


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Prints one line about an error, and writes its traceback to a file of the run directory that
    `arguments` name, or else to a temporary one.

    The exit status: 2 for an error of the operating system about a file, with its name, else 1.
    With the environment variable JAXFORMER_TRACEBACK=1 the error itself goes on instead.
    """
    if os.environ.get(SHOW, "0") not in ("", "0"):
        raise error
    message = escaped(" ".join(str(error).split()))[:SHOWN_CHARACTERS]
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        # What is left in its buffer would fail again at the end of the process.
        _to_null_device(sys.stdout)
        file = escaped(str(error.filename or "standard output, or a file"))
        _print(f"error: {file} cannot be written ({error.strerror}): make room.")
        return 2
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        _print(
            f"error: {escaped(str(error.filename or 'a file'))} cannot be opened"
            f" ({error.strerror}): allow more, for example by `ulimit -n 1024`."
        )
        return 2
    if reason := _of_store(error):
        _print(f"error: a store could not be reached {escaped(reason)}.")
        return 2
    if isinstance(error, OSError) and error.filename:
        remedy = "choose another path, or check its permissions and its disk"
        _print(f"error: {escaped(str(error.filename))}: {error.strerror}: {remedy}.")
        return 2
    if isinstance(error, MemoryError) or any(words in message for words in NO_MEMORY):
        _print(f"out of memory: {message}. Choose smaller sizes, or another machine.")
        return 1
    kind = type(error).__name__
    where = _write_traceback("".join(traceback.format_exception(error)), arguments)
    _print(
        f"failed: {f'{kind}: {message}' if message else kind}. This is a fault of jaxformer, or of"
        f" what it runs on; {where}. {SHOW}=1 prints it instead."
    )
    return 1


def _of_store(error: BaseException) -> str:
    """The reason and what to do, for an error of a library that asks the store of a URL; else
    ""."""
    kinds, cause = list[str](), error
    while cause is not None:
        kinds.append(type(cause).__module__)
        cause = cause.__cause__  # type: ignore[assignment]
    stores = sys.modules.get("jaxformer.files.stores")  # imported where there is a URL
    return stores.explained(error) if stores and any(map(OF_STORES.match, kinds)) else ""


def _write_traceback(text: str, arguments: Sequence[str]) -> str:
    """Writes a traceback to a file, and says in which one."""
    for folder in (_run_directory(arguments), tempfile.gettempdir()):
        try:
            if folder and os.path.isdir(folder):
                number, name = tempfile.mkstemp(".txt", "traceback-", folder)
                with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
                return f"the traceback is in {escaped(name)}"
        except OSError:
            continue
    return f"the traceback cannot be written, and ends {escaped(text[-SHOWN_CHARACTERS:])!r}"


def _run_directory(arguments: Sequence[str]) -> str:
    """The run directory of a command that trains, "" where there is none."""
    if len(arguments) < 2 or arguments[0] != "train":
        return ""
    try:
        return settings_in(arguments).get("run.dir") or read_config(arguments[1]).run.dir
    except BaseException:  # the error that is reported may be that of reading the config
        return ""


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # standard error is closed, or its disk is full as well
        _to_null_device(sys.stderr)


def _to_null_device(stream: object) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[attr-defined]
