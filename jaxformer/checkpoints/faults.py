"""Tells damage of a checkpoint from other errors of reading and saving it."""

import contextlib
import errno
import functools
import gc
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from jaxformer.checkpoints.buckets import DAMAGE, copy_aside
from jaxformer.checkpoints.digests import Altered, altered_files
from jaxformer.files import ConfigError, first_of, is_remote, store_errors, write_text

# What to do about an error of the system for which a save failed.
ADVICE = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "make room there, or raise the limit of the size of a file (ulimit -f)",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EIO: "look after the disk",
}


@functools.cache
def quiet_threads() -> None:
    """Suppresses what the threads of Orbax and TensorStore print beside an error that is raised
    anyway, Orbax's advice to save less often, and its note of a draft whose metadata another of its
    threads is still writing.

    The first error ends Orbax's event loop, and each later callback then fails too.
    """
    logging.getLogger("absl").addFilter(_keep_orbax_record)
    logging.getLogger("asyncio").addFilter(_keep_asyncio_record)
    on_error, on_unraisable = sys.excepthook, sys.unraisablehook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not _is_late(error):
            on_error(kind, error, trace)

    def report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
        if not (_is_late(unraisable.exc_value) or _is_abandoned(unraisable.object)):
            on_unraisable(unraisable)

    sys.excepthook, sys.unraisablehook = report, report_unraisable


def _is_late(error: BaseException | None) -> bool:
    """Whether a callback came after the end of the event loop that it was for."""
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _is_abandoned(value: object) -> bool:
    """Whether it is a coroutine of Orbax, whose event loop abandons some after an error."""
    return inspect.iscoroutine(value) and "orbax" in value.cr_code.co_filename


def _keep_orbax_record(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    early = "Metadata file" in text and ".orbax-checkpoint-tmp/" in text
    return not (record.exc_info or early or "Waiting for previous save" in text)


def _keep_asyncio_record(record: logging.LogRecord) -> bool:
    text = record.getMessage().lower()
    return "never retrieved" not in text or not ("tensorstore" in text or "ocdbt" in text)


@contextlib.contextmanager
def quiet_reads() -> Iterator[None]:
    """Suppresses, while Orbax reads, the warnings about coroutines that its event loop abandons
    after an error, and what `quiet_threads` suppresses."""
    quiet_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was never (awaited|retrieved)")
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        except Exception:
            gc.collect()
            raise


def failure_of(checkpoint: Path, error: Exception) -> Altered | ConfigError:
    """The error of a read in one sentence: Altered where the digests of its files show that the
    checkpoint is damaged, else ConfigError."""
    if isinstance(error, Altered):
        return error
    try:
        with store_errors(checkpoint, "read"):
            altered = altered_files(checkpoint)
        if altered:
            listed = first_of(altered, 5, ", ")
            return Altered(f"{in_short(error)}; files are not as they were saved: {listed}")
    except Altered as problem:  # of the digests
        return problem
    except (OSError, ConfigError):  # a file exists and cannot be read
        pass
    return ConfigError(
        f"the checkpoint {checkpoint} cannot be read ({in_short(error)}), and that does not show"
        " that it is damaged; nothing was changed. Check memory, file system and permissions,"
        " and run the same command again. To continue from an earlier step, move"
        f" {checkpoint} elsewhere."
    )


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def in_short(error: BaseException) -> str:
    cause = error.__cause__ or error  # Orbax puts a long message around that of TensorStore
    name = "" if isinstance(cause, Altered) else f"{type(cause).__name__}: "
    return f"{name}{' '.join(str(cause).split())[:200]}"


def set_aside(folder: Path, damaged: Mapping[int, str], log: Callable[[str], None]) -> None:
    """Renames damaged checkpoints, given by step with the reasons, so that their steps can be saved
    again. In a bucket they are copied and then deleted."""
    for step in damaged:
        target, number = folder / f"damaged-{step}", 1
        # In a bucket, a copy without a reason is one that was not completed.
        while (target / DAMAGE if is_remote(folder) else target).exists():
            number += 1
            target = folder / f"damaged-{step}-{number}"
        if is_remote(folder):
            with store_errors(target, "written"):
                copy_aside(folder / str(step), target, damaged[step])
        else:
            (folder / str(step)).rename(target)
            write_text(target / DAMAGE, damaged[step] + "\n", follow=False)
        log(f"The checkpoint of step {step} was set aside as {target}; nothing in it was changed.")


def why_not_saved(error: BaseException) -> tuple[str, str]:
    """Why a save failed, and what to do. The reason is the system's own message where the disk is
    full, a limit is reached or access is refused, else the error of Orbax."""
    chain = _causes(error)
    codes = {one.errno for one in chain if isinstance(one, OSError)}
    text = " ".join(str(one) for one in chain)
    for code, advice in ADVICE.items():
        if code in codes or os.strerror(code) in text:
            return os.strerror(code), advice
    return in_short(chain[-1]), "mend that"
