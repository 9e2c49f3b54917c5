"""The claim on a run directory in a bucket, which has no locks: an object that its holder renews.

It is made by a put that fails where there is one, names the process, and is removed at the end. One
that a killed process left does not count: the same command takes it over.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, read_file, store_errors, write_text
from jaxformer.files.stores import put_new

CLAIM = "claim.json"
RENEWAL = 20.0  # seconds between two renewals
LEFT_AFTER = 120.0  # seconds without a renewal after which nobody holds a claim
SETTLING = 1.0  # seconds in which of two processes that take over a claim the last one wins


@contextlib.contextmanager
def claimed(folder: Path, name: str) -> Iterator[None]:
    """Claims the run directory `folder`, of which messages say `name`, while the context lasts.

    Waits for a claim of another machine that is not renewed, up to `LEFT_AFTER` seconds. Raises
    ConfigError where another process holds the claim, or it cannot be written. A process that finds
    the claim of another one in place of its own ends at once, with a message: it could not renew
    its claim, as without a network, and the other one has gone on with the run.
    """
    path, record = folder / CLAIM, _record()
    _take(path, record, name)
    released = threading.Event()
    thread = threading.Thread(target=_renew, args=(path, record, released), daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        with contextlib.suppress(ConfigError):  # it will not count for long
            if _read(path).get("id") == record["id"]:
                _remove(path)


def is_claimed(folder: Path) -> bool:
    """Whether a process that is not known to have ended claims a run directory. Raises ConfigError
    where that cannot be read."""
    record = _read(folder / CLAIM)
    return bool(record) and not _is_left(record)


def _record() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _machine(),
        "started": _started(os.getpid()),
        "id": uuid.uuid4().hex,
        "renewed": time.time(),
    }


def _take(path: Path, record: dict[str, Any], name: str) -> None:
    """Makes the claim, after the wait for one that may be left."""
    seen, waited_from, is_told = "", time.monotonic(), False
    while not _put(path, record):
        holder = _read(path)
        if not holder:
            continue  # it was removed in between
        is_left = _is_left(holder) or time.monotonic() - waited_from > LEFT_AFTER
        if is_left and _take_over(path, record, holder):
            return
        holding = f"{holder.get('id')} {holder.get('renewed')}"
        if holding != (seen or holding) or _is_here(holder):
            raise ConfigError(
                f"{name} is in use by another process: process {holder.get('pid')} on"
                f" {holder.get('host')} holds {path}. Wait for it, or choose another run.dir. If"
                f" that process has ended, its claim does not count {LEFT_AFTER:g} s after it was"
                " last renewed."
            )
        if not is_told:
            warnings.warn(
                f"process {holder.get('pid')} on {holder.get('host')} claims {name}: waiting up to"
                f" {LEFT_AFTER:g} s for whether it renews {path}.",
                stacklevel=4,
            )
        seen, is_told = holding, True
        time.sleep(min(RENEWAL / 4, LEFT_AFTER / 4))


def _put(path: Path, record: dict[str, Any]) -> bool:
    with store_errors(path, "written"):
        return put_new(path, json.dumps(record).encode())


def _take_over(path: Path, record: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Replaces a claim that is left. Returns False where another process has done so too, later."""
    if _read(path).get("id") != holder.get("id"):
        return False
    _remove(path)
    if not _put(path, record | {"renewed": time.time()}):
        return False
    time.sleep(SETTLING)
    return bool(_read(path).get("id") == record["id"])


def _read(path: Path) -> dict[str, Any]:
    """The record of a claim; empty where there is none. Raises ConfigError."""
    with store_errors(path, "read"):
        if not path.exists():
            return {}
    try:
        record = json.loads(read_file(path))
    except ConfigError:
        with store_errors(path, "read"):
            if path.exists():
                raise
        return {}  # it was removed in between
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{path} is not the claim of a run: remove it if no process trains there."
        )
    return record


def _remove(path: Path) -> None:
    with store_errors(path, "removed"), contextlib.suppress(FileNotFoundError):
        path.unlink()


def _is_left(record: dict[str, Any]) -> bool:
    """Whether the process of a claim has ended, or has not renewed it for long."""
    renewed = record.get("renewed")
    if not isinstance(renewed, int | float) or time.time() - renewed > LEFT_AFTER:
        return True
    if not record.get("machine") or record["machine"] != _machine():
        return False
    return _started(record.get("pid")) != record.get("started")


def _is_here(record: dict[str, Any]) -> bool:
    """Whether the process of a claim is known to live, since it is on this machine."""
    return bool(record.get("machine")) and record["machine"] == _machine() and not _is_left(record)


def _machine() -> str:
    """A name of this start of this machine and of its table of processes; "" where it has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: Any) -> str:
    """When a process of this machine began, in its own units; "" where there is none."""
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text(encoding="utf-8", errors="replace")
        fields = status.rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, ValueError, TypeError):
        return ""


def _renew(path: Path, record: dict[str, Any], released: threading.Event) -> None:
    """Renews a claim until it is released. A failure is tried again at the next time."""
    while not released.wait(RENEWAL):
        try:
            holder = _read(path)
            if holder.get("id", record["id"]) != record["id"]:
                print(
                    f"error: process {holder.get('pid')} on {holder.get('host')} has taken over"
                    f" {path}, which this process could not renew in time. It ends here, and saves"
                    " nothing more.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            write_text(path, json.dumps(record | {"renewed": time.time()}))
        except ConfigError as error:
            warnings.warn(f"the claim cannot be renewed yet: {error}", stacklevel=2)
