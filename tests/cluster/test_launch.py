"""Which process of a run a process is: from its settings, or from what a launcher says; and the
scripts of launch/."""

import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from jax.errors import JaxRuntimeError
from several import free_port

from jaxformer.checkpoints.saving import NotSaved
from jaxformer.cluster.launchers import find_place
from jaxformer.cluster.processes import LostProcess
from jaxformer.cluster.roll_call import RollCall
from jaxformer.config.config_file import differences
from jaxformer.config.run import RunConfig, flat
from jaxformer.config.train import LaunchConfig
from jaxformer.files import ConfigError

ROOT = Path(__file__).parents[2]
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ORTE = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
ONE_TASK = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def triple(found: Any) -> tuple[int, int, str]:
    return found.index, found.count, found.coordinator


def place(environment: dict[str, str], **settings: Any) -> tuple[Any, list[str]]:
    """The place, and what was said."""
    said: list[str] = []
    environment = {"CUDA_VISIBLE_DEVICES": ""} | environment
    with mock.patch.dict(os.environ, environment, clear=True):  # which JAX's detection reads
        return find_place(LaunchConfig(**settings), os.environ, said.append), said


def test_one_process_is_the_default_and_joins_nobody() -> None:
    for environment in ({}, SLURM | ONE_TASK, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}):
        found, said = place(environment)
        assert found.count == 1 and not said
    assert place(SLURM, processes=1)[0].count == 1  # each task of a sweep


def test_settings_and_launchers_give_the_place() -> None:
    found, _ = place({}, coordinator="node1:12345", process=1, processes=4)
    assert triple(found) == (1, 4, "node1:12345") and found.devices is None
    found, _ = place(SLURM)
    assert triple(found) == (5, 8, f"node07:{4100 % 2**12 + 61440}")
    assert place(SLURM | {"JAX_COORDINATOR_PORT": "77"})[0].coordinator == "node07:77"
    assert triple(place(SLURM, coordinator="node9:99")[0]) == (5, 8, "node9:99")
    found, _ = place(MPI | ORTE)
    assert triple(found)[:2] == (1, 2) and found.coordinator.startswith("10.96.0.1:")
    assert triple(place(MPI, coordinator="a:1")[0]) == (1, 2, "a:1")  # Open MPI 5


def test_the_processes_of_a_machine_share_its_gpus() -> None:
    assert place(SLURM | GPUS)[0].devices == [1]
    two = {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
    assert place(SLURM | GPUS | two)[0].devices == [2, 3]
    assert place(SLURM | GPUS | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"})[0].devices is None
    assert place(SLURM | {"CUDA_VISIBLE_DEVICES": "3"})[0].devices is None
    with pytest.raises(ConfigError, match="3 processes on this machine cannot share its 4 GPUs"):
        place(SLURM | GPUS | {"SLURM_STEP_TASKS_PER_NODE": "5,3"})


def test_what_a_launcher_may_not_have_meant_is_said() -> None:
    found, said = place(SLURM | ONE_TASK | GPUS)
    assert found.count == 1
    assert said[0].startswith("note: Slurm started one process, which takes all 4 GPUs")
    assert "srun --ntasks-per-node=4" in said[0]
    found, said = place({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert found.count == 1 and "was not started by srun" in said[0]


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "two coordinators": (
        {"JAX_COORDINATOR_ADDRESS": "b:2"},
        {"coordinator": "a:1", "process": 0, "processes": 2},
        r"two coordinators: launch\.coordinator='a:1', and JAX_COORDINATOR_ADDRESS=b:2",
    ),
    "no index": ({}, {"coordinator": "a:1", "processes": 2}, r"launch\.process must be given too"),
    "no coordinator": ({}, {"process": 0, "processes": 2}, r"launch\.coordinator must be given"),
    "an index alone": (
        {},
        {"process": 3},
        r"launch\.coordinator and launch\.processes must be given too",
    ),
    "index": (
        {},
        {"coordinator": "a:1", "process": 2, "processes": 2},
        r"launch\.process=2 is not below launch\.processes=2",
    ),
    "no port": ({}, {"coordinator": "a", "process": 0, "processes": 2}, "must be HOST:PORT"),
    "port": ({}, {"coordinator": "a:99999", "process": 0, "processes": 2}, "from 1 to 65535"),
    "other index": (SLURM, {"process": 1}, r"launch\.process=1, but Slurm says 5"),
    "other count": (SLURM, {"processes": 2}, r"launch\.processes=2, but Slurm says 8"),
    "Open MPI 5": (MPI, {}, r"Open MPI does not say where the processes meet"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_one_message(case: str) -> None:
    environment, settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        place(environment, **settings)


def test_a_launch_is_no_fact_of_a_run() -> None:
    asked = RunConfig(launch=LaunchConfig(coordinator="a:1", process=1, processes=2, timeout=9.0))
    assert differences(RunConfig(), asked) == []


@pytest.mark.slow
def test_a_process_that_counts_others_is_refused_and_named() -> None:
    port, errors = free_port(), []

    def other() -> None:
        try:
            RollCall(2, 3, f"localhost:{port}", 20)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(LostProcess, match=r"process 1 of 2 did not come.*A process 2 on .*"):
        RollCall(0, 2, f"localhost:{port}", 4)
    thread.join()
    assert "it counts 3 processes, and process 0 counts 2" in errors[0]


def test_a_process_does_not_wait_for_a_first_one_that_has_ended() -> None:
    """Not until its own launch.timeout."""
    with socket.create_server(("localhost", 0)) as server:

        def end() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'{"came": 1}\n')

        thread = threading.Thread(target=end)
        thread.start()
        coordinator = f"localhost:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(LostProcess, match=r"process 0 of 3, at .* has ended"):
            RollCall(1, 3, coordinator, 60)
        assert time.monotonic() - began < 30
        thread.join()


def test_a_save_that_fails_with_a_lost_process_is_told_as_the_lost_process() -> None:
    coordinator = f"localhost:{free_port()}"
    others: list[RollCall] = []
    thread = threading.Thread(target=lambda: others.append(RollCall(1, 2, coordinator, 20)))
    thread.start()
    call = RollCall(0, 2, coordinator, 20)
    thread.join()
    for joined in (call, *others):
        joined._ended.set()  # the watches do not end the tests
    call.verdict(NotSaved("no space left"), (ConfigError, LostProcess))
    assert others[0]._known.wait(5) and "no space left" in others[0].lost
    others[0]._lines[0].connection.shutdown(socket.SHUT_RDWR)
    try:
        raise NotSaved("could not be saved") from JaxRuntimeError("Gloo all-reduce failed")
    except NotSaved as error:
        with pytest.raises(LostProcess, match=r"process 1 .* has died"):
            call.verdict(error, (ConfigError, LostProcess))


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of this machine cannot be used"):
            RollCall(0, 2, f"localhost:{port}", 1)


@pytest.mark.parametrize("script", ["slurm.sh", "tpu.sh"])
def test_scripts_are_bash_and_start_train(script: str) -> None:
    path = ROOT / "launch" / script
    subprocess.run(["bash", "-n", path], check=True)
    assert re.search(r"python train\.py .*\$", path.read_text()) and path.stat().st_mode & 0o111


def test_the_slurm_script_is_told_before_its_time_ends_and_queued_again() -> None:
    text = (ROOT / "launch/slurm.sh").read_text()
    options = dict(re.findall(r"#SBATCH --([a-z-]+)=?(\S*)", text))
    assert options["signal"] == "USR1@120" and "requeue" in options
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "3 | 137 | 138)" in text and 'scontrol requeue "$SLURM_JOB_ID"' in text


def test_the_jobset_gives_each_pod_its_place_by_settings_that_exist() -> None:
    found = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = container["command"]
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert command[:2] == ["python", "train.py"] and (ROOT / command[2]).is_file()
    assert all(name.removeprefix("--") in flat(RunConfig()) for name in flags)
    assert spec["completions"] == spec["parallelism"] == int(flags["--launch.processes"])
    assert spec["completionMode"] == "Indexed"
    assert flags["--launch.process"] == "$(JOB_COMPLETION_INDEX)"
    host, _, port = flags["--launch.coordinator"].rpartition(":")
    name = found["metadata"]["name"]
    assert host == f"{name}-{job['name']}-0-0.{name}"  # the first pod of the first job
    assert int(port) == container["ports"][0]["containerPort"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_every_part_of_the_scripts_is_explained() -> None:
    page = (ROOT / "docs/scale.md").read_text()
    for word in ("USR1@120", "requeue", "backoffLimit", "podFailurePolicy", "--worker=all"):
        assert word in page
