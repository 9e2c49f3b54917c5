"""Which process of a run this one is, as the settings of `launch` say, or the environment of a
launcher (Slurm, Kubernetes, Cloud TPU, Open MPI)."""

import dataclasses
import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.config.settings import Log
from jaxformer.config.train import LaunchConfig
from jaxformer.files import ConfigError


@dataclass(frozen=True)
class Launcher:
    """The environment variables in which a launcher says which process this one is."""

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
class ProcessPlace:
    """A process among those of a run: `coordinator` is where they meet, `devices` are the local
    GPUs that it takes (None: all that it sees), `launcher` is what says so."""

    index: int
    count: int
    coordinator: str
    devices: list[int] | None = None
    launcher: str = ""


ALONE = ProcessPlace(0, 1, "")


def find_place(settings: LaunchConfig, environment: Mapping[str, str], log: Log) -> ProcessPlace:
    """The place of this process, from the settings, and from the environment what they leave open.
    Raises ConfigError where they contradict each other, or a part is missing."""
    if settings.processes == 1:
        return ALONE
    found = _of_environment(settings, environment, log)
    if found.count > 1:
        _require_agreement(settings, found)
    elif settings.coordinator or settings.process >= 0 or settings.processes:
        found = _of_settings(settings)
    if found.count == 1:
        return found
    address = _coordinator(settings.coordinator, environment, found)
    return dataclasses.replace(found, coordinator=address)


def _of_environment(
    settings: LaunchConfig, environment: Mapping[str, str], log: Log
) -> ProcessPlace:
    for launcher in LAUNCHERS:
        if launcher.index in environment and launcher.count in environment:
            return _of_launcher(launcher, environment, log)
    if settings.coordinator or settings.processes:
        return ALONE
    found = _of_cluster(environment, settings.timeout) or ALONE
    tasks = environment.get("SLURM_NTASKS", "1")
    if found.count == 1 and "SLURM_JOB_ID" in environment and tasks not in ("", "1"):
        log(
            f"note: this Slurm job has {tasks} tasks, and the command was not started by srun: it"
            " runs as one process on one of them. srun python train.py ... starts all."
        )
    return found


def _require_agreement(settings: LaunchConfig, found: ProcessPlace) -> None:
    for name, asked, said in (
        ("launch.process", settings.process, found.index),
        ("launch.processes", settings.processes or -1, found.count),
    ):
        if asked >= 0 and asked != said:
            raise ConfigError(
                f"{name}={asked}, but {found.launcher} says {said}: leave out {name}, or start"
                f" the command without {found.launcher}."
            )


def _of_settings(settings: LaunchConfig) -> ProcessPlace:
    missing = ["launch.coordinator"] * (not settings.coordinator)
    missing += ["launch.process"] * (settings.process < 0)
    missing += ["launch.processes"] * (settings.processes == 0)
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
    return ProcessPlace(settings.process, settings.processes, "")


def _coordinator(setting: str, environment: Mapping[str, str], place: ProcessPlace) -> str:
    """Where the processes meet. Raises ConfigError where it is unknown, or said twice."""
    other = environment.get("JAX_COORDINATOR_ADDRESS", "")
    if setting and other and setting != other:
        raise ConfigError(
            f"two coordinators: launch.coordinator={setting!r}, and JAX_COORDINATOR_ADDRESS={other}"
            " in the environment: leave out one."
        )
    address = setting or other or place.coordinator
    if not address:
        raise ConfigError(
            f"launch.coordinator is empty, and {place.launcher or 'the environment'} does not say"
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


def _of_launcher(launcher: Launcher, environment: Mapping[str, str], log: Log) -> ProcessPlace:
    index, count, local = (
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
    here = _local_count(launcher, environment)
    devices = _devices(local, here, gpus)
    return ProcessPlace(index, count, _address(launcher, environment), devices, launcher.name)


def _local_count(launcher: Launcher, environment: Mapping[str, str]) -> int:
    """How many processes this machine has; Slurm lists all machines, as in 4(x2),3."""
    text = environment.get(launcher.local_count, "1")
    counts: list[int] = []
    for entry in text.split(","):
        if matched := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip()):
            counts += [int(matched[1])] * int(matched[2] or 1)
    node = int(environment.get("SLURM_NODEID", 0)) if len(counts) > 1 else 0
    return counts[node] if node < len(counts) else 1


def _devices(local: int, here: int, gpus: int) -> list[int] | None:
    """The GPUs of one of `here` processes of a machine, which share them evenly."""
    if here == 1 or gpus <= 1:
        return None  # the only process, or one that the launcher gave its GPU
    if gpus % here:
        raise ConfigError(
            f"{here} processes on this machine cannot share its {gpus} GPUs evenly: start one a"
            " GPU, or one a machine."
        )
    share = gpus // here
    return list(range(local * share, (local + 1) * share))


def _visible_gpus(environment: Mapping[str, str]) -> int:
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([entry for entry in listed.split(",") if entry.strip()])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _address(launcher: Launcher, environment: Mapping[str, str]) -> str:
    """Where JAX's own detection says that the processes meet; empty where it does not know."""
    from jax._src import clusters

    cluster: Any = {"Slurm": clusters.SlurmCluster, "Open MPI": clusters.OmpiCluster}[launcher.name]
    if not cluster.is_env_present():
        return ""
    address: str = cluster.get_coordinator_address(
        timeout_secs=None, override_coordinator_port=environment.get("JAX_COORDINATOR_PORT")
    )
    return address


def _of_cluster(environment: Mapping[str, str], timeout: float) -> ProcessPlace | None:
    """The place in an indexed job of Kubernetes or on the machines of a TPU, by JAX's detection."""
    from jax._src import clusters

    kinds: dict[str, Any] = {
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
                f"{name} was found, but not the place of this process in it ({error}): give"
                " --launch.coordinator HOST:PORT --launch.process I --launch.processes N, or"
                " --launch.processes 1 for a process alone."
            ) from error
        return ProcessPlace(index, count, address, None, name)
    return None
