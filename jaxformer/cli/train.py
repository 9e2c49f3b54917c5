"""`jaxformer train CONFIG`: trains a model, or continues its run, also when nobody reads its output
any more."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from jaxformer.arrays.mesh import batch_devices
from jaxformer.checkpoints.saving import NotSaved
from jaxformer.cli.arguments import TrainArguments
from jaxformer.cluster.processes import LOST, LostProcess
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError
from jaxformer.report.banner import aligned
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
            if isinstance(stop, Diverged):
                return 1
            return 128 + stop.signal
        except NotSaved as stop:
            print(f"error: {stop}", file=sys.stderr)
            return 1
        except LostProcess as stop:
            print(f"lost process: {stop}", file=sys.stderr)
            return LOST
        except RunOutOfMemory as stop:
            print(f"out of memory: {stop}\n{advice(stop)}", file=sys.stderr)
            return 1
    return 0


def advice(error: RunOutOfMemory) -> str:
    """Return what is printed below the message: the remedies, and what they mean for the
    run directory."""
    setup = error.setup
    run_dir = setup.run.run.dir
    train = setup.run.train
    devices = batch_devices(setup.mesh)
    # Rows of a microbatch, over all devices.
    rows = train.batch_size // train.n_microbatches
    can_halve = rows % (2 * devices) == 0
    # A training step stores activations for its backward pass.
    is_step = error.place.startswith(("compiling", "step"))
    remedies: dict[str, str] = {}
    if error.on_chip and "experts" in error.place:
        remedies["--model.experts.kernel ragged"] = "experts without a Pallas kernel"
    elif error.on_chip:
        remedies["--model.attention.kernel xla"] = "attention without a fused kernel"
    else:
        if is_step and setup.run.model.remat != "full":
            remedies["--model.remat full"] = "activations recomputed instead of stored"
        if is_step and can_halve:
            # A run that was begun keeps its microbatches, on which its sums depend.
            where = ""
            if error.begun or error.saved is not None:
                where = ", in another run.dir"
            effect = f"activations of {rows // 2} rows at a time instead of {rows}{where}"
            remedies[f"--train.microbatches {2 * train.n_microbatches}"] = effect
        if "evaluation" in error.place and can_halve:
            remedies[f"--train.batch_size {train.batch_size // 2}"] = "half as many rows"
        if setup.mesh.shape["data"] > 1:
            settings = f"--mesh.data 1 --mesh.fsdp {devices}"
            remedies[settings] = "parameters and optimizer state split over all devices"
    lines = []
    if remedies:
        lines.append("What needs less:")
        lines += [f"  {line}" for line in aligned(list(remedies.items()))]
    # Remedies are guesses; the plan computes.
    lines.append("`jaxformer plan CONFIG` says of any settings whether they fit.")
    if error.saved is not None:
        lines.append(
            f"{run_dir} holds step {error.saved}, from which the same command continues with the"
            " other settings."
        )
    elif error.begun:
        lines.append(f"{run_dir} was begun by an earlier command and holds no checkpoint.")
    else:
        lines.append(
            f"Nothing was trained in {run_dir}: the same command with other settings begins it."
        )
    return "\n".join(lines)


def require_files() -> None:
    """Raise the number of files that this process may open to what the machine allows. Raises
    ConfigError where training would run out of them at its first checkpoint."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES
    if hard != resource.RLIM_INFINITY:
        limit = min(hard, MAX_FILES)
    if limit > soft != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError, OSError):
            # A system may refuse, as in a container; the check below then tells.
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise ConfigError(
            f"this process may open only {soft} files at once, and training needs at least"
            f" {MIN_FILES}: allow more where it is started, for example by `ulimit -n 1024`."
        )


class LastingStream:
    """A text stream that warns of its first failed write, and then writes nothing: training
    outlives `| head`, a `tee` that died, a terminal that was closed, and a full disk of its log."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

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
        """Redirect the stream to the null device, and say so on standard error."""
        # Also for what libraries write to the file descriptor itself.
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
    out: Any = LastingStream(sys.stdout, "standard output")
    error: Any = LastingStream(sys.stderr, "standard error")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            yield
        finally:
            out.flush()
