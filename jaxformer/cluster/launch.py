"""Which process of a run this one is, and how the processes join and watch over each other."""

import atexit
import contextlib
import ctypes
import dataclasses
import glob
import hmac
import ipaddress
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jaxformer.arrays.out_of_memory import is_out_of_memory
from jaxformer.arrays.private_jax import private
from jaxformer.cluster import processes
from jaxformer.cluster.processes import BEATS, LOST, LostProcess, Place, exchange, here, together
from jaxformer.cluster.signals import STOPPING, Stopped, current, end, name_of
from jaxformer.config.format import escaped
from jaxformer.config.settings import Log
from jaxformer.config.train import LaunchConfig
from jaxformer.files import ConfigError

SERVICE_SECONDS = 60  # for JAX's own service, once all have come
# Seconds of silence after which JAX's service takes a process for lost: about the largest number
# that it accepts. `RollCall` watches instead, by connections, which a slow process keeps.
SILENCE = 2_000_000_000
WARNING, ERROR = 1, 2  # log levels of JAX's libraries

SIGNALS = {name_of(number): int(number) for number in STOPPING}
# Of a process: its index, their number, and its index on its machine.
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
LONGEST_NAME = 255  # characters of the name of a host
LONGEST_MESSAGE = 2**16  # characters
GRACE = 10.0  # seconds in which a process may end by itself, after another has failed
STOP_GRACE = 2.0  # the same, after a signal has ended another, where there is nothing to save
SAVE_GRACE = 45.0  # the same, where there is something to save
# Process 0 answers by its own deadline; seconds beyond launch.timeout in which the others wait.
ANSWER_MARGIN = 5.0
RETRY_SECONDS = 0.3  # between two attempts to reach process 0
ACCEPT_SECONDS = 0.1  # between two looks of process 0 at who has come
FIRST_SECONDS = 30.0  # in which a connection says who it is; a process then connects again
VERDICT_SECONDS = 15.0  # to wait for word of another process, after a collective has failed
# The system closes the connections of a machine that is gone after 40 s.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
START_AGAIN = "Start the same command in all processes again; it continues the run."


def _secret() -> str:
    """What all processes of a run know and nobody else, by the environment."""
    return os.environ.get("JAXFORMER_SECRET", "")


def may_come(coordinator: str, peer: str) -> bool:
    """Whether the address `peer` may be that of a process of the run whose process 0 is at the host
    `coordinator`: of this machine for localhost, and not of the internet where that host is not."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if coordinator in ("localhost", "127.0.0.1", "::1"):
        return address.is_loopback
    try:
        own = ipaddress.ip_address(socket.gethostbyname(coordinator))
    except OSError:
        return True
    # /etc/hosts may give this machine's own name a loopback address, which says nothing of others.
    return own.is_global or own.is_loopback or not address.is_global


@dataclass(frozen=True)
class RunProcess:
    """A process among those of a run.

    `coordinator` is the HOST:PORT where they meet. `devices` are the local GPUs that it takes, None
    for all that it sees.
    """

    index: int
    count: int
    coordinator: str
    devices: list[int] | None = None


ALONE = RunProcess(0, 1, "")


def find_process(settings: LaunchConfig, log: Log) -> RunProcess:
    """Which process this one is, by the settings and, for what they leave open, the launcher that
    JAX detects in the environment. Raises ConfigError where they contradict each other, or
    something is missing."""
    if settings.processes == 1:
        return ALONE
    launcher, process = _launched(settings)
    is_set = {
        "launch.coordinator": bool(settings.coordinator),
        "launch.process": settings.process >= 0,
        "launch.processes": settings.processes > 0,
    }
    if process.count > 1:
        for name, setting, detected in (
            ("launch.process", settings.process, process.index),
            ("launch.processes", settings.processes, process.count),
        ):
            if is_set[name] and setting != detected:
                raise ConfigError(
                    f"{name}={setting}, but {launcher} says {detected}: leave out {name}, or start"
                    f" the command without {launcher}."
                )
    elif any(is_set.values()):
        missing = [name for name, present in is_set.items() if not present]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} must be given too, since no launcher says so:"
                " --launch.coordinator HOST:PORT --launch.process I --launch.processes N"
            )
        if settings.process >= settings.processes:
            raise ConfigError(
                f"launch.process={settings.process} is not below"
                f" launch.processes={settings.processes}: processes count from 0."
            )
        process = RunProcess(settings.process, settings.processes, "")
    else:
        tasks = os.environ.get("SLURM_NTASKS") or "1"
        if not launcher and "SLURM_JOB_ID" in os.environ and tasks != "1":
            log(
                f"note: this Slurm job has {tasks} tasks, and the command was not started by srun:"
                " it runs as one process on one of them. srun python train.py ... starts all."
            )
        return ALONE
    address = (
        settings.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or process.coordinator
    )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"launch.coordinator={address!r} must be HOST:PORT, the host of process 0 and a free"
            f" port of it, as in node1:12345{'' if address else '; no launcher says it'}."
        )
    return dataclasses.replace(process, coordinator=address)


def _launched(settings: LaunchConfig) -> tuple[str, RunProcess]:
    """The name of the launcher, and the process that it says this is; ("", ALONE) for none."""
    clusters = private("clusters", "the start of several processes")
    kinds: dict[str, Any] = {}
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        kinds["Open MPI"] = clusters.OmpiCluster
    # A shell of salloc has the variables of all tasks of the job, but not that of the step.
    elif "SLURM_PROCID" in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        kinds["Slurm"] = clusters.SlurmCluster
    elif not (settings.coordinator or settings.processes):
        kinds["Cloud TPU (GKE)"] = clusters.GkeTpuCluster
        kinds["Cloud TPU"] = clusters.GceTpuCluster
        if "JOB_COMPLETION_INDEX" in os.environ:  # no other pod is one of several processes
            kinds["Kubernetes"] = clusters.K8sCluster
    for name, cluster in kinds.items():
        local_index: int | None
        try:
            if name == "Open MPI":
                # Version 5 does not say where processes meet, and JAX then asks for mpi4py.
                is_whole = "OMPI_MCA_orte_hnp_uri" in os.environ
                index, count, local_index = (int(os.environ[key]) for key in OPEN_MPI)
            elif cluster.is_env_present():
                is_whole = True
                index = cluster.get_process_id()
                count = cluster.get_process_count()
                local_index = cluster.get_local_process_id()
            else:
                continue
            address = ""
            if name == "Slurm":
                count = int(os.environ["SLURM_STEP_NUM_TASKS"])
            if count > 1 and is_whole:
                port = os.environ.get("JAX_COORDINATOR_PORT")
                address = cluster.get_coordinator_address(int(settings.timeout), port)
        except Exception as error:  # of network, of permissions, of the Kubernetes package
            raise ConfigError(
                f"{name} was detected, but not which of its processes this one is ({error}): give"
                " --launch.coordinator HOST:PORT --launch.process I --launch.processes N, or"
                " --launch.processes 1 for a process alone."
            ) from error
        # The GPUs of this process, where those of a machine share them.
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            gpus = len(glob.glob("/dev/nvidia[0-9]*"))
        else:
            gpus = len(re.findall(r"[^,\s]+", listed))
        # How many processes this machine has. Slurm lists all machines, as in 4(x2),3.
        text = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get(
            "SLURM_STEP_TASKS_PER_NODE", "1"
        )
        counts: list[int] = []
        for tasks, _, machines in re.findall(r"(\d+)(\(x(\d+)\))?", text):
            counts += [int(tasks)] * int(machines or 1)
        node = int(os.environ.get("SLURM_NODEID", 0))
        local_count = counts[0]
        if node < len(counts):
            local_count = counts[node]
        if local_index is None or local_count == 1 or gpus <= 1:
            # The only process, or one that the launcher gave its GPU.
            return name, RunProcess(index, count, address)
        if gpus % local_count:
            raise ConfigError(
                f"{local_count} processes on this machine cannot share its {gpus} GPUs evenly:"
                " start one a GPU, or one a machine."
            )
        share = gpus // local_count
        own = list(range(local_index * share, (local_index + 1) * share))
        return name, RunProcess(index, count, address, own)
    return "", ALONE


class Channel:
    """A connection to another process that carries JSON objects, one per line. Whatever is at the
    other end, its texts are printed escaped, and nothing else of a message is trusted."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection = connection
        self._input = connection.makefile("r", encoding="utf-8", errors="replace")

    def send(self, **message: Any) -> None:
        """Sends a message, unless the connection is closed."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """The next message; empty where the connection has ended, or sends something else."""
        try:
            message = json.loads(self._input.readline(LONGEST_MESSAGE))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(message, dict):
            return {}
        for key, value in message.items():
            if isinstance(value, str):
                message[key] = escaped(value)
        return message

    def is_open(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


class RollCall:
    """The processes of a run that have come, and the watch over them.

    `jax.distributed` aborts a process that waits in vain for another, or has lost one, without
    naming it. So the processes first meet at the coordinator's port, before JAX's service takes it,
    and keep these connections, which end with a process.

    `hosts` are their host names, by index. `lost` says which other process was the first to end,
    and `signal` is the number of the signal that ended it, None for another reason. Raises
    LostProcess where a process does not come within `timeout` seconds, and ConfigError where the
    processes do not agree on their number and indices.
    """

    def __init__(self, index: int, count: int, coordinator: str, timeout: float) -> None:
        self.index = index
        self.count = count
        self.coordinator = coordinator
        self.hosts = [""] * count
        self.lost = ""
        self.signal: int | None = None
        self._another_ended = threading.Event()
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._gathering = True
        self._channels: dict[int, Channel] = {}
        self._places: dict[int, Place] = {index: Place()}
        self._beats = 0
        self._first_waits = ""  # what process 0 says of processes that this one does not hear
        self._watches: list[threading.Thread] = []
        if index == 0:
            self._gather(timeout)
        else:
            self._join(timeout)
        for other, channel in self._channels.items():
            self._places[other] = Place()
            watch = threading.Thread(target=self._watch, args=(other, channel), daemon=True)
            watch.start()
            self._watches.append(watch)
        threading.Thread(target=self._beat, daemon=True).start()

    def _gather(self, timeout: float) -> None:
        """Process 0 waits for the others."""
        deadline = time.monotonic() + timeout
        port = int(self.coordinator.rpartition(":")[2])
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(
                ("", port), family=family, backlog=1024, dualstack_ipv6=dual
            )
        except OSError as error:
            raise ConfigError(
                f"launch.coordinator={self.coordinator!r}: port {port} of this machine cannot be"
                f" used ({error.strerror}): choose another port."
            ) from error
        with server:
            server.settimeout(ACCEPT_SECONDS)
            while len(self._channels) < self.count - 1 and time.monotonic() < deadline:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                except OSError:  # strangers hold all file descriptors
                    time.sleep(ACCEPT_SECONDS)
                    continue
                # A thread for each, so that a slow or silent connection holds up nobody.
                admission = (connection, deadline)
                threading.Thread(target=self._admit, args=admission, daemon=True).start()
        with self._guard:
            # Threads of `_admit` may still run. A process that one of them entered from here on
            # would come too late for what is counted and sent below.
            self._gathering = False
        missing = [str(index) for index in range(1, self.count) if index not in self._channels]
        if missing:
            text = (
                f"{'process' if len(missing) == 1 else 'processes'} {', '.join(missing)} of"
                f" {self.count} did not come within launch.timeout={timeout:g} seconds. Look at how"
                f" they were started and whether they reach {self.coordinator};"
                f" {len(self._channels) + 1} of {self.count} came."
            )
            self._send(missing=text)
            raise LostProcess(text)
        self.hosts[0] = socket.gethostname()
        self._send(hosts=self.hosts)

    def _admit(self, connection: socket.socket, deadline: float) -> None:
        """Reads the first message of a connection, which may come late from a process that is slow,
        and enters the process."""
        seconds = min(deadline - time.monotonic(), FIRST_SECONDS)
        connection.settimeout(max(seconds, ACCEPT_SECONDS))
        channel = Channel(connection)
        message = {}
        with contextlib.suppress(OSError):
            peer = connection.getpeername()[0]
            if _secret() or may_come(self.coordinator.rpartition(":")[0].strip("[]"), peer):
                message = channel.read()
        index, count, host = (message.get(name) for name in ("index", "count", "host"))
        secret = str(message.get("secret", ""))
        # Its time does not say how far a wrong secret is right, so nobody can guess it part by
        # part.
        is_of_run = hmac.compare_digest(secret.encode(), _secret().encode())
        with self._guard:
            is_expected = is_of_run and self._gathering
            if type(index) is not int or not isinstance(host, str) or not is_expected:
                connection.close()  # no process of this run, or too late
                return
            host = host[:LONGEST_NAME]
            # A process that was killed meanwhile and started again takes its former place.
            has_come = index in self._channels and self._channels[index].is_open()
            if count != self.count or not 0 < index < self.count or has_come:
                channel.send(
                    refused=f"process 0 counts {self.count} processes, of which"
                    f" {sorted(self._channels)} have come: correct launch.process={index} or"
                    f" launch.processes={count}."
                )
                connection.close()
            else:
                connection.settimeout(None)
                self._channels[index] = channel
                self.hosts[index] = host

    def _join(self, timeout: float) -> None:
        """The others connect to process 0 and wait for its answer. Where the connection is closed
        without one, they connect again until the deadline."""
        deadline = time.monotonic() + timeout
        host, _, port = self.coordinator.rpartition(":")
        reason = "nothing answers there"
        while (seconds := deadline - time.monotonic()) > 0:
            try:
                address = host.strip("[]"), int(port)
                connection = socket.create_connection(address, min(seconds, 5))
            except OSError as error:
                reason = f"nothing answers there ({error.strerror or error})"
                time.sleep(min(RETRY_SECONDS, seconds))
                continue
            channel = Channel(connection)
            channel.send(
                index=self.index, count=self.count, host=socket.gethostname(), secret=_secret()
            )
            # Process 0 may have begun to wait just now. Where it ends it closes the connection.
            connection.settimeout(timeout + ANSWER_MARGIN)
            reply = channel.read()
            if "refused" in reply:
                raise ConfigError(f"process {self.index} was refused: {reply['refused']}")
            if "missing" in reply:
                raise LostProcess(reply["missing"])
            hosts = reply.get("hosts")
            if isinstance(hosts, list) and len(hosts) == self.count:
                connection.settimeout(None)
                self.hosts = [escaped(str(host)[:LONGEST_NAME]) for host in hosts]
                self._channels = {0: channel}
                return
            connection.close()
            reason = (
                "what answers there is not process 0 of this run, has ended, or has another"
                " JAXFORMER_SECRET"
            )
            time.sleep(min(RETRY_SECONDS, seconds))
        raise LostProcess(
            f"process 0 of {self.count} did not come within launch.timeout={timeout:g} seconds: it"
            f" should be at {self.coordinator}, and {reason}."
        )

    def _watch(self, other: int, channel: Channel) -> None:
        """Reads what another process sends, until it has ended."""
        name = f"process {other} ({self.hosts[other]})"
        ended_well = False
        while message := channel.read():
            if message.keys() & {"bye", "failed"}:
                ended_well = True
            if type(message.get("at")) is int:
                self._hear(other, message["at"], str(message.get("place"))[:LONGEST_NAME])
                self._first_waits = str(message.get("waits", ""))
            elif text := message.get("failed"):
                self._end_with(f"{name} failed: {text}")
            elif text := message.get("lost"):
                # Of no other signal than those that stop a run.
                self._end_with(str(text), SIGNALS.get(str(message.get("signal"))))
        if ended_well:
            self._places.pop(other)
        else:
            self._end_with(f"{name} has died: it was killed, or its machine is gone.")

    def _hear(self, index: int, number: int, name: str) -> None:
        """Notes how far a process says that it has come."""
        known = self._places[index]
        came = self._beats
        if number == known.number:
            came = known.came
        self._places[index] = Place(number, name, came, self._beats)

    def _beat(self) -> None:
        """Tells the others how far this process has come, BEATS times in LONG_SECONDS, and says
        once of each place for whom it waits there."""
        told = -1
        # Beats are counted, and not seconds, in which this process itself may have been stopped.
        while not self._closed.wait(processes.LONG_SECONDS / BEATS):
            self._beats += 1
            place = here()
            self._hear(self.index, place.number, place.name)
            late = self._late()
            if late and told != place.number:
                told = place.number
                advice = "Look whether it hangs; a signal to any other process ends the run."
                print(f"waiting: {late} {advice}", file=sys.stderr, flush=True)
            if self.index:
                late = ""  # what process 0 says counts
            self._send(at=place.number, place=place.name, waits=late)

    def _late(self) -> str:
        """Which processes of those that this one hears are behind or silent, where this one has not
        come further for LONG_SECONDS; empty for none."""
        places = dict(self._places)
        if self._beats - places[self.index].came < BEATS:
            return ""
        front = max(place.number for place in places.values())
        texts = []
        for index, place in sorted(places.items()):
            beats = self._beats - place.came
            is_silent = self._beats - place.said >= BEATS
            if beats >= BEATS and (place.number < front or is_silent):
                seconds = beats * processes.LONG_SECONDS / BEATS
                texts.append(
                    f"process {index} ({self.hosts[index]}) has come to {place.name} and no further"
                    f" for {seconds:.0f} s{', and does not answer' if is_silent else ''}."
                )
        return " ".join(texts)

    def waits(self) -> str:
        """For whom this process has waited for LONG_SECONDS, by itself or as process 0 says."""
        if self._beats - self._places[self.index].came < BEATS:
            return ""
        return self._late() or self._first_waits

    def _end_with(self, text: str, number: int | None = None) -> None:
        """Another process has ended, by itself or by a signal: tells the rest, and ends this one
        unless it ends by itself."""
        with self._guard:
            if self._another_ended.is_set():
                return
            self.lost = text
            self.signal = number
            self._another_ended.set()
        # The others are connected to process 0 alone, and hear of each other through it.
        if self.index == 0:
            self._send(lost=text, signal=None if number is None else name_of(number))
        grace = GRACE
        if number is not None:
            # Stops this process as if it had received the signal too.
            request = current()
            if not self._closed.is_set() and (request is None or request.signal is None):
                os.kill(os.getpid(), number)
            grace = STOP_GRACE
            if request is not None and request.holding:
                grace = SAVE_GRACE
        if not self._closed.wait(grace):
            self._exit()

    def _exit(self) -> NoReturn:
        error = self._error()
        if isinstance(error, Stopped):
            end(error.signal, f"interrupted: {error}")
        print(f"lost process: {error}", file=sys.stderr, flush=True)
        os._exit(LOST)

    def _error(self) -> LostProcess | Stopped:
        """The error by which this process ends, after another one has ended."""
        if self.signal is None:
            return LostProcess(f"{self.lost} {START_AGAIN}")
        return Stopped(self.signal, f"{self.lost} {START_AGAIN}")

    def stopped(self, number: int) -> None:
        """Tells the others of a signal that ends this process."""
        name = f"process {self.index} ({self.hosts[self.index]}) was stopped by {name_of(number)}."
        self._send(lost=name, signal=name_of(number))

    def verdict(self, error: BaseException, expected: tuple[type[BaseException], ...]) -> None:
        """Tells the others of an error that ends this process. Raises LostProcess or Stopped
        instead where another process that has ended is the cause."""
        # An error in this process may follow from the end of another one, of which word is still on
        # its way. Without a wait the message would name this process.
        seconds = 1.0
        if isinstance(error, expected):
            seconds = 0.0
        # A save whose collective fails raises NotSaved, from an error of JAX.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, jax.errors.JaxRuntimeError) and not is_out_of_memory(cause):
                seconds = VERDICT_SECONDS
            cause = cause.__cause__ or cause.__context__
        if seconds and self._another_ended.wait(seconds):
            raise self._error() from error
        # JSON writes a character in at most twelve. A line that is cut at LONGEST_MESSAGE
        # would be taken for the end of the connection, and this process for one that was killed.
        self._send(failed=f"{type(error).__name__}: {error}"[: LONGEST_MESSAGE // 16])

    def _send(self, **message: Any) -> None:
        for channel in self._channels.values():
            channel.send(**message)

    def close(self) -> None:
        """Leaves the run: this process needs the others no more."""
        self._closed.set()
        self._send(bye=True)

    def leave(self, status: int) -> NoReturn:
        """Ends the process at once: JAX would wait for the others at its end."""
        self.close()
        sys.stdout.flush()
        sys.stderr.flush()
        self.wait_for_others(GRACE)
        os._exit(status)

    def wait_for_others(self, seconds: float) -> None:
        """Waits in process 0 until the others have ended, for at most `seconds` in all: JAX aborts
        them when its service is gone, so process 0 has to end last."""
        if self.index:
            return
        deadline = time.monotonic() + seconds
        for watch in self._watches:
            watch.join(max(deadline - time.monotonic(), 0.0))

    def initialize(self, devices: list[int] | None, timeout: float) -> None:
        """Starts JAX's own service, and replaces the message and status of an abort by JAX, whose
        own watch may be faster. `devices` are the local GPUs of this process, None for all."""
        # Its handler of SIGTERM would replace ours.
        jax.config.update("jax_enable_preemption_service", False)
        # JAX's service measures silence by the wall clock, and takes a clock that is set back for a
        # silence of 500,000 years. It then ends all processes, unless it may go on without those
        # that it takes for lost.
        jax.config.update("jax_enable_recoverability", True)
        set_log_level = private("lib.utils.absl_set_min_log_level", "a run of several processes")
        set_log_level(ERROR)  # it warns of that setting
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.count,
                self.index,
                local_device_ids=devices,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(max(SERVICE_SECONDS, timeout)),  # some are slow
                heartbeat_timeout_seconds=SILENCE,
                shutdown_timeout_seconds=SERVICE_SECONDS,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"this process cannot join the others ({error}): join them before any array is"
                " made, by train.py, or by jax.distributed.initialize() at the beginning of the"
                " program."
            ) from error
        finally:
            set_log_level(int(os.environ.get("TF_CPP_MIN_LOG_LEVEL") or WARNING))
        # In C, because a handler of Python runs between two of its instructions, which a process
        # that aborts does not reach.
        libc = ctypes.CDLL(None)

        def on_abort(_: int) -> None:
            if self._another_ended.wait(5):
                self._exit()
            libc.signal(signal.SIGABRT, None)  # the default

        # Kept as an attribute: ctypes frees a callback that nothing refers to, and C would call it.
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
        libc.signal(signal.SIGABRT, self._on_abort)
        atexit.register(self.wait_for_others, SERVICE_SECONDS)  # before JAX ends its service


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
    process = find_process(settings, log)
    if process.count == 1:
        yield
        return
    try:
        call = RollCall(process.index, process.count, process.coordinator, settings.timeout)
        _joined.append(call)
        try:
            call.initialize(process.devices, settings.timeout)
            describe(log)
            if request := current():
                request.tell = call.stopped
                request.waits = call.waits
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


def describe(log: Log) -> None:
    """Prints each process of the run, with its host and its devices."""
    devices = jax.local_devices()
    first = devices[0]
    line = f"{socket.gethostname()}, {len(devices)} x {first.device_kind} ({first.platform})"
    for index, text in enumerate(exchange(line)):
        if jax.process_index() == 0:
            log(f"process {index} of {jax.process_count()}: {text}")
