"""Joins the processes of a run, and watches over them while it lasts."""

import atexit
import contextlib
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator

import jax
from jax._src.lib import utils  # JAX has no public name for the level of its libraries

from jaxformer.cluster.launchers import RunProcess, find_process
from jaxformer.cluster.processes import LOST, LostProcess, exchange, together
from jaxformer.cluster.roll_call import RollCall
from jaxformer.cluster.signals import current
from jaxformer.config.settings import Log
from jaxformer.config.train import LaunchConfig
from jaxformer.files import ConfigError

SERVICE_SECONDS = 60  # for JAX's own service, once all have come
# Seconds of silence after which JAX's service takes a process for lost: about the largest number
# that it accepts. `RollCall` watches instead, by connections, which a slow process keeps.
SILENCE = 2_000_000_000
WARNING, ERROR = 1, 2  # log levels of JAX's libraries

_joined: list[RollCall] = []  # the roll call of this process, if it has joined others


@contextlib.contextmanager
def joined(
    settings: LaunchConfig,
    log: Log,
    *,
    expected: tuple[type[BaseException], ...] = (),
    agreed: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Joins the other processes of the run, if there are any, and watches over them while the block
    runs.

    `expected` are errors with a cause in this process: another process that has ended is looked for
    only where JAX raised an error before. `agreed` are errors that all processes raise together.
    Where the program has called `jax.distributed.initialize` itself, nothing is joined or watched.
    Raises ConfigError for settings that contradict each other or the environment, and LostProcess
    where a process does not come within launch.timeout, or ends before the run does.
    """
    if jax.distributed.is_initialized():
        if not _joined and (settings.coordinator or settings.processes):
            raise ConfigError(
                "launch.coordinator and launch.processes are set, but this process has called"
                " jax.distributed.initialize already: leave out one of the two."
            )
        describe(log)
        yield
        return
    process = find_process(settings, os.environ, log)
    if process.count == 1:
        yield
        return
    try:
        call = RollCall(process.index, process.count, process.coordinator, settings.timeout)
        _joined.append(call)
        try:
            _initialize(process, call, settings.timeout)
            describe(log)
            if request := current():
                request.tell = call.stopped
            yield
        except agreed:
            raise
        except KeyboardInterrupt as stop:
            call.stopped(getattr(stop, "signal", signal.SIGINT))
            raise
        except BaseException as error:
            call.verdict(error, (ConfigError, LostProcess, SystemExit, *expected))
            raise
        finally:
            call.close()
    except LostProcess:
        atexit.register(leave, LOST)  # JAX would wait for the lost process at its end
        raise


def finish(work: Callable[[], None], *kinds: type[Exception]) -> None:
    """Does the last `work` of a run, which every process calls, as `together` does. Several
    processes ignore signals afterwards, since they can no longer agree on one."""
    together(work, *kinds)
    request = current()
    if request is not None and jax.process_count() > 1:
        request.finished = True


def leave(status: int) -> int:
    """Returns `status`, the exit status of the process. Where it is not 0 and the process has
    joined others, the process ends here, since JAX would wait for them."""
    if status and _joined:
        _joined[-1].leave(status)
    return status


def _initialize(process: RunProcess, call: RollCall, timeout: float) -> None:
    # Its handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX's service measures silence by the wall clock, and takes a clock that is set back for a
    # silence of 500,000 years. It then ends all processes, unless it may go on without those that
    # it takes for lost.
    jax.config.update("jax_enable_recoverability", True)
    utils.absl_set_min_log_level(ERROR)  # it warns of that setting
    try:
        jax.distributed.initialize(
            process.coordinator,
            process.count,
            process.index,
            local_device_ids=process.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(max(SERVICE_SECONDS, timeout)),  # some may be slow
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=SERVICE_SECONDS,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"this process cannot join the others ({error}): join them before any array is made, by"
            " train.py, or by jax.distributed.initialize() at the beginning of the program."
        ) from error
    finally:
        utils.absl_set_min_log_level(int(os.environ.get("TF_CPP_MIN_LOG_LEVEL") or WARNING))
    call.catch_aborts()
    atexit.register(call.wait_for_others, SERVICE_SECONDS)  # before JAX ends its service


def describe(log: Log) -> None:
    """Prints each process of the run, with its host and its devices."""
    devices = jax.local_devices()
    first = devices[0]
    line = f"{socket.gethostname()}, {len(devices)} x {first.device_kind} ({first.platform})"
    for index, text in enumerate(exchange(line)):
        if jax.process_index() == 0:
            log(f"process {index} of {jax.process_count()}: {text}")
