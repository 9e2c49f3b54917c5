"""Which process of a run this one is, by the settings of `launch` or the environment of a launcher
(Slurm, Kubernetes, Cloud TPU, Open MPI)."""

import dataclasses
import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxformer.config.settings import Log
from jaxformer.config.train import LaunchConfig
from jaxformer.files import ConfigError

if TYPE_CHECKING:
    from jax._src.clusters import ClusterEnv


@dataclass(frozen=True)
class Launcher:
    """The environment variables by which a launcher tells a process which one it is, and the
    command that starts one process per GPU."""

    name: str
    index: str
    count: str
    local_index: str
    local_count: str
    command: str


LAUNCHERS = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpirun -n {gpus}",
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "srun --ntasks-per-node={gpus}",
    ),
)


@dataclass(frozen=True)
class RunProcess:
    """A process among those of a run.

    `coordinator` is the HOST:PORT where they meet. `devices` are the local GPUs that it takes, None
    for all that it sees. `launcher` is the name of what started it, empty for the settings alone.
    """

    index: int
    count: int
    coordinator: str
    devices: list[int] | None = None
    launcher: str = ""


ALONE = RunProcess(0, 1, "")


def find_process(settings: LaunchConfig, environment: Mapping[str, str], log: Log) -> RunProcess:
    """Which process this one is, by the settings and, for what they leave open, the environment.
    Raises ConfigError where they contradict each other, or something is missing."""
    if settings.processes == 1:
        return ALONE
    process = _of_environment(settings, environment, log)
    if process.count > 1:
        _require_agreement(settings, process)
    elif settings.coordinator or settings.process >= 0 or settings.processes:
        process = _of_settings(settings)
    if process.count == 1:
        return process
    address = _coordinator(settings.coordinator, environment, process)
    return dataclasses.replace(process, coordinator=address)


def _of_environment(settings: LaunchConfig, environment: Mapping[str, str], log: Log) -> RunProcess:
    for launcher in LAUNCHERS:
        if launcher.index in environment and launcher.count in environment:
            return _of_launcher(launcher, environment, log)
    if settings.coordinator or settings.processes:
        return ALONE
    process = _of_cluster(environment, settings.timeout) or ALONE
    tasks = environment.get("SLURM_NTASKS", "1")
    if process.count == 1 and "SLURM_JOB_ID" in environment and tasks not in ("", "1"):
        log(
            f"note: this Slurm job has {tasks} tasks, and the command was not started by srun: it"
            " runs as one process on one of them. srun python train.py ... starts all."
        )
    return process


def _require_agreement(settings: LaunchConfig, process: RunProcess) -> None:
    for name, setting, detected in (
        ("launch.process", settings.process, process.index),
        ("launch.processes", settings.processes or -1, process.count),
    ):
        if setting >= 0 and setting != detected:
            raise ConfigError(
                f"{name}={setting}, but {process.launcher} says {detected}: leave out {name}, or"
                f" start the command without {process.launcher}."
            )


def _of_settings(settings: LaunchConfig) -> RunProcess:
    is_set = {
        "launch.coordinator": bool(settings.coordinator),
        "launch.process": settings.process >= 0,
        "launch.processes": settings.processes > 0,
    }
    missing = [name for name, present in is_set.items() if not present]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given too, since no launcher says so:"
            " --launch.coordinator HOST:PORT --launch.process I --launch.processes N"
        )
    if settings.process >= settings.processes:
        raise ConfigError(
            f"launch.process={settings.process} is not below launch.processes={settings.processes}:"
            " processes count from 0."
        )
    return RunProcess(settings.process, settings.processes, "")


def _coordinator(setting: str, environment: Mapping[str, str], process: RunProcess) -> str:
    """Where the processes meet. Raises ConfigError where it is unknown, or given twice."""
    variable = environment.get("JAX_COORDINATOR_ADDRESS", "")
    if setting and variable and setting != variable:
        raise ConfigError(
            f"two coordinators: launch.coordinator={setting!r}, and"
            f" JAX_COORDINATOR_ADDRESS={variable} in the environment: leave out one."
        )
    address = setting or variable or process.coordinator
    if not address:
        raise ConfigError(
            f"launch.coordinator is empty, and {process.launcher or 'the environment'} does not say"
            " where the processes meet: give --launch.coordinator HOST:PORT, the host of process 0"
            " and a free port."
        )
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"launch.coordinator={address!r} must be HOST:PORT, the host of process 0 and a port"
            " from 1 to 65535, as in node1:12345."
        )
    return address


def _of_launcher(launcher: Launcher, environment: Mapping[str, str], log: Log) -> RunProcess:
    index, count, local_index = (
        int(environment.get(name, 0))
        for name in (launcher.index, launcher.count, launcher.local_index)
    )
    gpus = _visible_gpus(environment)
    if count == 1:
        if gpus > 1:
            log(
                f"note: {launcher.name} started one process, which takes all {gpus} GPUs of this"
                f" machine. One process a GPU is {launcher.command.format(gpus=gpus)}."
            )
        return ALONE
    devices = _devices(local_index, _local_count(launcher, environment), gpus)
    return RunProcess(index, count, _address(launcher, environment), devices, launcher.name)


def _local_count(launcher: Launcher, environment: Mapping[str, str]) -> int:
    """How many processes this machine has; Slurm lists all machines, as in 4(x2),3."""
    text = environment.get(launcher.local_count, "1")
    counts: list[int] = []
    for entry in text.split(","):
        if matched := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip()):
            counts += [int(matched[1])] * int(matched[2] or 1)
    node = int(environment.get("SLURM_NODEID", 0)) if len(counts) > 1 else 0
    return counts[node] if node < len(counts) else 1


def _devices(local_index: int, local_count: int, gpus: int) -> list[int] | None:
    """The GPUs of one of the `local_count` processes of a machine, which share them evenly."""
    if local_count == 1 or gpus <= 1:
        return None  # the only process, or one that the launcher gave its GPU
    if gpus % local_count:
        raise ConfigError(
            f"{local_count} processes on this machine cannot share its {gpus} GPUs evenly: start"
            " one a GPU, or one a machine."
        )
    share = gpus // local_count
    return list(range(local_index * share, (local_index + 1) * share))


def _visible_gpus(environment: Mapping[str, str]) -> int:
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([entry for entry in listed.split(",") if entry.strip()])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _address(launcher: Launcher, environment: Mapping[str, str]) -> str:
    """Where JAX's own detection says that the processes meet; empty where it does not know."""
    from jax._src import clusters

    classes = {"Slurm": clusters.SlurmCluster, "Open MPI": clusters.OmpiCluster}
    cluster: type[ClusterEnv] = classes[launcher.name]
    if not cluster.is_env_present():
        return ""
    try:
        return cluster.get_coordinator_address(
            timeout_secs=None, override_coordinator_port=environment.get("JAX_COORDINATOR_PORT")
        )
    except RuntimeError:  # JAX 0.12 asks mpi4py, which may be missing, for that of Open MPI 5
        return ""


def _of_cluster(environment: Mapping[str, str], timeout: float) -> RunProcess | None:
    """Which process of an indexed job of Kubernetes, or of the machines of a TPU, this one is, by
    JAX's detection; None for none."""
    from jax._src import clusters

    kinds: dict[str, type[ClusterEnv]] = {
        "Cloud TPU (GKE)": clusters.GkeTpuCluster,
        "Cloud TPU": clusters.GceTpuCluster,
    }
    if "JOB_COMPLETION_INDEX" in environment:  # no other pod is one of several processes
        kinds["Kubernetes"] = clusters.K8sCluster
    for name, cluster in kinds.items():
        try:
            if not cluster.is_env_present():
                continue
            count, index = cluster.get_process_count(), cluster.get_process_id()
            if count == 1:
                return ALONE
            port = environment.get("JAX_COORDINATOR_PORT")
            address = cluster.get_coordinator_address(int(timeout), port)
        except Exception as error:  # of network, of permissions, of the Kubernetes package
            raise ConfigError(
                f"{name} was detected, but not which of its processes this one is ({error}): give"
                " --launch.coordinator HOST:PORT --launch.process I --launch.processes N, or"
                " --launch.processes 1 for a process alone."
            ) from error
        return RunProcess(index, count, address, None, name)
    return None
