"""Which process of a run a process is: from its settings, or from what a launcher says; and the
scripts of launch/."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from jax.errors import JaxRuntimeError
from several import free_port

from jaxformer.checkpoints.saving import NotSaved
from jaxformer.cluster import launch, processes, signals
from jaxformer.cluster.launch import Channel, RollCall, RunProcess, find_process, may_come
from jaxformer.cluster.processes import LostProcess
from jaxformer.config.run import RunConfig, flat, to_json
from jaxformer.config.train import LaunchConfig
from jaxformer.files import ConfigError
from jaxformer.runs.directory import RunDirectory

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


def triple(process: RunProcess) -> tuple[int, int, str]:
    return process.index, process.count, process.coordinator


def detect(environment: dict[str, str], **settings: Any) -> tuple[RunProcess, list[str]]:
    """The process, and the lines that were logged."""
    logged: list[str] = []
    environment = {"CUDA_VISIBLE_DEVICES": ""} | environment
    with mock.patch.dict(os.environ, environment, clear=True):  # which JAX's detection reads
        return find_process(LaunchConfig(**settings), logged.append), logged


def test_one_process_is_the_default_and_joins_nobody() -> None:
    for environment in ({}, SLURM | ONE_TASK, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}):
        process, logged = detect(environment)
        assert process.count == 1 and not logged
    assert detect(SLURM, processes=1)[0].count == 1  # each task of a sweep


def test_settings_and_launchers_give_the_place() -> None:
    process, _ = detect({}, coordinator="node1:12345", process=1, processes=4)
    assert triple(process) == (1, 4, "node1:12345") and process.devices is None
    process, _ = detect(SLURM)
    assert triple(process) == (5, 8, f"node07:{4100 % 2**12 + 61440}")
    assert detect(SLURM | {"JAX_COORDINATOR_PORT": "77"})[0].coordinator == "node07:77"
    assert triple(detect(SLURM, coordinator="node9:99")[0]) == (5, 8, "node9:99")
    process, _ = detect(MPI | ORTE)
    assert triple(process)[:2] == (1, 2) and process.coordinator.startswith("10.96.0.1:")
    assert triple(detect(MPI, coordinator="a:1")[0]) == (1, 2, "a:1")  # Open MPI 5


def test_the_processes_of_a_machine_share_its_gpus() -> None:
    assert detect(SLURM | GPUS)[0].devices == [1]
    two = {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
    assert detect(SLURM | GPUS | two)[0].devices == [2, 3]
    assert detect(SLURM | GPUS | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"})[0].devices is None
    assert detect(SLURM | {"CUDA_VISIBLE_DEVICES": "3"})[0].devices is None
    with pytest.raises(ConfigError, match="3 processes on this machine cannot share its 4 GPUs"):
        detect(SLURM | GPUS | {"SLURM_STEP_TASKS_PER_NODE": "5,3"})


def test_a_job_of_slurm_that_was_not_started_by_srun_is_told() -> None:
    process, logged = detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert process.count == 1 and "was not started by srun" in logged[0]


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "no index": ({}, {"coordinator": "a:1", "processes": 2}, r"launch\.process must be given too"),
    "an index alone": ({}, {"process": 3}, r"launch\.coordinator and launch\.processes must be"),
    "index": (
        {},
        {"coordinator": "a:1", "process": 2, "processes": 2},
        r"launch\.process=2 is not below launch\.processes=2",
    ),
    "no port": ({}, {"coordinator": "a", "process": 0, "processes": 2}, "must be HOST:PORT"),
    "port": ({}, {"coordinator": "a:99999", "process": 0, "processes": 2}, "must be HOST:PORT"),
    "other index": (SLURM, {"process": 1}, r"launch\.process=1, but Slurm says 5"),
    "other count": (SLURM, {"processes": 2}, r"launch\.processes=2, but Slurm says 8"),
    "Open MPI 5": (MPI, {}, r"coordinator='' must be HOST:PORT.*no launcher says it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_one_message(case: str) -> None:
    environment, settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        detect(environment, **settings)


def test_a_launch_is_no_fact_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(to_json(RunConfig()))
    launch = LaunchConfig(coordinator="a:1", process=1, processes=2, timeout=9.0)
    RunDirectory(tmp_path).check_config(RunConfig(launch=launch))


def test_a_process_that_counts_others_is_refused_and_the_missing_one_named() -> None:
    coordinator = f"localhost:{free_port()}"
    other = join_in_thread(2, 3, coordinator)
    with pytest.raises(LostProcess, match=r"process 1 of 2 did not come within launch.timeout=2"):
        RollCall(0, 2, coordinator, 2)
    with pytest.raises(ConfigError, match="process 0 counts 2 processes"):
        other.result(5)


def join_in_thread(index: int, count: int, coordinator: str) -> "Future[RollCall]":
    """A roll call that another thread answers."""
    joined: Future[RollCall] = Future()

    def join() -> None:
        try:
            joined.set_result(RollCall(index, count, coordinator, 30))
        except BaseException as error:
            joined.set_exception(error)

    threading.Thread(target=join, daemon=True).start()
    return joined


def connect(coordinator: str) -> socket.socket:
    """A connection to process 0, once it listens."""
    host, _, port = coordinator.rpartition(":")
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.05)


def close_all(*calls: RollCall) -> None:
    for call in calls:
        call.close()


def test_a_silent_connection_holds_up_no_process() -> None:
    coordinator = f"localhost:{free_port()}"
    first = join_in_thread(0, 3, coordinator)
    with connect(coordinator), connect(coordinator):  # such as those of a port scanner
        began = time.monotonic()
        others = [join_in_thread(index, 3, coordinator) for index in (1, 2)]
        calls = [joined.result(30) for joined in (first, *others)]
        assert time.monotonic() - began < 4
    assert all(call.hosts == [socket.gethostname()] * 3 for call in calls)
    close_all(*calls)


def test_connections_that_take_all_file_descriptors_keep_no_process_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are closed after a while; until then nobody else is accepted."""
    monkeypatch.setattr(launch, "FIRST_SECONDS", 0.5)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    coordinator = f"localhost:{free_port()}"
    first = join_in_thread(0, 2, coordinator)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(coordinator))
        held = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 10, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        strangers = [socket.socket() for _ in range(6)]
        for stranger in strangers:
            stack.enter_context(stranger).connect(("localhost", int(coordinator[10:])))
        second = join_in_thread(1, 2, coordinator)
        close_all(first.result(20), second.result(20))


def test_a_process_whose_first_message_is_late_is_admitted() -> None:
    """Under heavy load it may take long from its connection to its first message."""
    coordinator = f"localhost:{free_port()}"
    first = join_in_thread(0, 3, coordinator)
    with connect(coordinator) as connection:
        second = join_in_thread(2, 3, coordinator)
        time.sleep(1)
        assert not first.done() and not second.done()
        channel = Channel(connection)
        channel.send(index=1, count=3, host="slow")
        assert channel.read()["hosts"][1] == "slow"
        close_all(first.result(5), second.result(5))
        channel.send(bye=True)


@pytest.mark.parametrize("message", [b'{"signal": 9, "lost": "x"}', b"[" * 60_000, b"\xff\x00{"])
def test_what_a_stranger_sends_neither_joins_nor_ends_a_run(
    message: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has to know the secret of the run, and a signal is one of those that stop a run."""
    monkeypatch.setenv("JAXFORMER_SECRET", "of the run")
    coordinator = f"localhost:{free_port()}"
    first = join_in_thread(0, 2, coordinator)
    with connect(coordinator) as stranger, connect(coordinator) as guesser:
        stranger.sendall(message + b"\n")
        Channel(guesser).send(index=1, count=2, host="guess", secret="guessed")
        assert Channel(guesser).read() == {}  # it is closed
        second = join_in_thread(1, 2, coordinator)
        calls = [first.result(10), second.result(10)]
    assert calls[0].hosts == [socket.gethostname()] * 2
    ended: list[object] = []
    monkeypatch.setattr(calls[0], "_end_with", lambda *found: ended.append(found))
    calls[1]._channels[0].send(lost="\x1b[2Jgone", signal=9)
    calls[1]._channels[0].send(lost="stopped", signal="SIGTERM")
    deadline = time.monotonic() + 10
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [("\\x1b[2Jgone", None), ("stopped", signal.SIGTERM)]
    close_all(*calls)


def test_a_process_whose_connection_is_closed_connects_again() -> None:
    with socket.create_server(("localhost", 0)) as server:
        joined = join_in_thread(1, 2, f"localhost:{server.getsockname()[1]}")
        server.accept()[0].close()
        channel = Channel(server.accept()[0])
        assert channel.read()["index"] == 1
        channel.send(hosts=["a", "b"])
        call = joined.result(5)
        assert call.hosts == ["a", "b"]
        call.close()
        channel.send(bye=True)


def test_a_save_that_fails_with_a_lost_process_is_told_as_the_lost_process() -> None:
    coordinator = f"localhost:{free_port()}"
    joining = join_in_thread(1, 2, coordinator)
    call = RollCall(0, 2, coordinator, 20)
    other = joining.result(5)
    for joined in (call, other):
        joined._closed.set()  # the watches do not end the tests
    call.verdict(NotSaved("no space left"), (ConfigError, LostProcess))
    assert other._another_ended.wait(5) and "no space left" in other.lost
    other._channels[0].connection.shutdown(socket.SHUT_RDWR)
    try:
        raise NotSaved("could not be saved") from JaxRuntimeError("Gloo all-reduce failed")
    except NotSaved as error:
        with pytest.raises(LostProcess, match=r"process 1 .* has died"):
            call.verdict(error, (ConfigError, LostProcess))


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
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
    jobset = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
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
    name = jobset["metadata"]["name"]
    assert host == f"{name}-{job['name']}-0-0.{name}"  # the first pod of the first job
    assert int(port) == container["ports"][0]["containerPort"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_every_part_of_the_scripts_is_explained() -> None:
    page = (ROOT / "docs/scale.md").read_text()
    for word in ("USR1@120", "requeue", "backoffLimit", "podFailurePolicy", "--worker=all"):
        assert word in page


def test_a_signal_ends_the_wait_for_a_process_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent:
        def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
            raise JaxRuntimeError("DEADLINE_EXCEEDED: nobody has set it")

    monkeypatch.setattr(processes, "client", Silent)
    monkeypatch.setattr(processes, "LONG_SECONDS", 0.2)
    with signals.watched() as request, pytest.raises(signals.Stopped), request.hold():
        threading.Timer(0.5, lambda: setattr(request, "signal", signal.SIGTERM)).start()
        processes.read_key("a key")


@pytest.mark.parametrize(
    "coordinator, peer, may",
    [
        ("localhost", "127.0.0.1", True),
        ("localhost", "::ffff:127.0.0.1", True),
        ("localhost", "10.0.0.2", False),
        ("10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "100.64.0.2", True),  # of a provider or of pods
        ("10.0.0.1", "fe80::1%eth0", True),
        ("10.0.0.1", "8.8.8.8", False),
        ("8.8.4.4", "8.8.8.8", True),
        ("127.0.1.1", "8.8.8.8", True),  # the name of this machine in its /etc/hosts
    ],
)
def test_a_process_comes_from_no_other_network_than_the_coordinator(
    coordinator: str, peer: str, may: bool
) -> None:
    assert may_come(coordinator, peer) == may
