"""`jaxformer train CONFIG`: trains a model, or continues its run, also when nobody reads its output
any more."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from jaxformer.checkpoints.saving import NotSaved
from jaxformer.cli.arguments import TrainArguments
from jaxformer.cluster.processes import LOST, LostProcess
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError
from jaxformer.runs.train_run import RunOutOfMemory, train
from jaxformer.training.loop import Diverged, Interrupted

MIN_FILES = 64  # that training may have to open at once
MAX_FILES = 65_536  # that are requested of the system where it allows more


def run(_: TrainArguments, config: RunConfig) -> int:
    require_files()
    with lasting():
        try:
            train(config)
        except (Diverged, Interrupted) as stop:
            print(f"{type(stop).__name__.lower()}: {stop}", file=sys.stderr)
            return 1 if isinstance(stop, Diverged) else 128 + stop.signal
        except NotSaved as stop:
            print(f"error: {stop}", file=sys.stderr)
            return 1
        except LostProcess as stop:
            print(f"lost process: {stop}", file=sys.stderr)
            return LOST
        except RunOutOfMemory as stop:
            from jaxformer.tools.remedies import advice  # with the plan, which no other run needs

            print(f"out of memory: {stop}\n{advice(stop)}", file=sys.stderr)
            return 1
    return 0


def require_files() -> None:
    """Raises the number of files that this process may open to what the machine allows. Raises
    ConfigError where training would run out of them at its first checkpoint."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > soft:
        limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
            soft = max(soft, limit)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise ConfigError(
            f"this process may open only {soft} files at once, and training needs at least"
            f" {MIN_FILES}: allow more where it is started, for example by `ulimit -n 1024`."
        )


class LastingStream:
    """A text stream that warns of its first failed write, and then writes nothing: training
    outlives `| head`, a `tee` that died, a terminal that was closed, and a full disk of its log."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Redirects the stream to the null device, and says so on standard error."""
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())
        print(
            f"WARNING: {self._name} cannot be written ({error.strerror}): the run goes on without"
            " it. metrics.jsonl has its numbers.",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """In this block standard output and error are lasting streams."""
    before = sys.stdout, sys.stderr
    out, error = (
        LastingStream(sys.stdout, "standard output"),
        LastingStream(sys.stderr, "standard error"),
    )
    sys.stdout, sys.stderr = out, error  # type: ignore[assignment]
    try:
        yield
    finally:
        out.flush()
        sys.stdout, sys.stderr = before
