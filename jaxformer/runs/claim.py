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

from jaxformer.files import ConfigError, read_object, write_text

CLAIM = "claim.json"
RENEWAL = 10.0  # seconds between two renewals
LEFT_AFTER = 60.0  # seconds without a renewal after which nobody holds a claim
READINGS = 4  # of a claim, which its holder may renew while it is read
SETTLING = 1.0  # seconds in which of two processes that take over a claim the last one wins


@contextlib.contextmanager
def claimed(folder: Path, name: str) -> Iterator[None]:
    """Claims the run directory `folder`, of which messages say `name`, while the context lasts.

    Waits for a claim that is not renewed, up to `LEFT_AFTER` seconds. Raises ConfigError where
    another process holds the claim, or it cannot be written. A process that finds the claim of
    another one in place of its own ends at once, with a message: it could not renew its claim, as
    without a network, and the other one has gone on with the run.
    """
    path = folder / CLAIM
    record = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _machine(),
        "id": uuid.uuid4().hex,
    }
    first, began = "", time.monotonic()
    while not _put(path, record):
        holder = _read(path)
        if not holder:
            continue  # it was removed in between
        if holder.get("id") == record["id"]:
            break  # the store took it, and answered that it had failed
        if _is_left(holder) or time.monotonic() - began > LEFT_AFTER:
            _remove(path)
            if _put(path, record):
                time.sleep(SETTLING)
                if _read(path).get("id") == record["id"]:
                    break
            continue
        holding = f"{holder.get('id')} {holder.get('renewed')}"
        by = f"process {holder.get('pid')} on {holder.get('host')}"
        if first and holding != first:
            raise ConfigError(
                f"{name} is in use by another process: {by} holds {path}. Wait for it, or choose"
                " another run.dir."
            )
        if not first:
            warnings.warn(
                f"{by} claims {name}: waiting up to {LEFT_AFTER:g} s for whether it renews {path}.",
                stacklevel=3,
            )
        first = holding
        time.sleep(RENEWAL / 4)
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


def _put(path: Path, record: dict[str, Any]) -> bool:
    store: Any = path
    return bool(store.put_new(json.dumps(record | {"renewed": time.time()}).encode()))


def _read(path: Path) -> dict[str, Any]:
    """The record of a claim; empty where there is none. Raises ConfigError."""
    for attempt in range(READINGS):
        if not path.exists():
            return {}
        try:
            return read_object(path, "remove it if no process trains there")
        except ConfigError:
            # It may have been removed or renewed in between.
            if attempt == READINGS - 1:
                raise
    return {}


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _is_left(record: dict[str, Any]) -> bool:
    """Whether the process of a claim has ended on this machine, or has not renewed it for long."""
    renewed, pid = record.get("renewed"), record.get("pid")
    if not isinstance(renewed, int | float) or time.time() - renewed > LEFT_AFTER:
        return True
    if not _machine() or record.get("machine") != _machine() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is somebody else's
        return False
    return False


def _machine() -> str:
    """A name of this start of this machine and of its table of processes; "" where it has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
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
