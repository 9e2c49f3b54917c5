"""Runs of several processes of train.py on this machine, joined over loopback."""

import os
import socket
from pathlib import Path
from typing import Any

from commands import Command
from tiny_run import fork, line, write_text

SMALL = {  # compiled in a second or two
    "model.d_model": 16,
    "model.n_layers": 1,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 2,
    "optimizer.decay_steps": 8,
    "train.steps": 8,
    "train.eval_every": 4,
    "train.checkpoint_every": 4,
    "launch.timeout": 120,
}
DEVICES = "--xla_force_host_platform_device_count={}"


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def launch_all(
    count: int,
    run_dir: Path,
    text: Path,
    changes: dict[str, Any] | None = None,
    devices: int = 1,
    absent: tuple[int, ...] = (),
    apart: dict[int, dict[str, Any]] | None = None,
    patched: dict[int, str] | None = None,
) -> dict[int, Command]:
    """The processes of a run by their index, without those that are absent; `apart` are the
    changes of single ones, `patched` what single ones run before the command."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES.format(devices)}"
    joined = {"launch.coordinator": f"localhost:{free_port()}", "launch.processes": count}
    processes = {}
    for index in range(count):
        if index not in absent:
            own = {"launch.process": index} | (apart or {}).get(index, {})
            arguments = line(run_dir, text, (changes or {}) | joined | own)
            patch = (patched or {}).get(index, "")
            processes[index] = fork(arguments, patch, XLA_FLAGS=flags)
    return processes


def ends(processes: dict[int, Command]) -> dict[int, tuple[int, str, str]]:
    """(exit status, output, errors) of each process."""
    found = {}
    for index, process in processes.items():
        out, error = process.communicate(timeout=300)
        found[index] = (process.returncode, out, error)
    return found


def finished(processes: dict[int, Command]) -> dict[int, tuple[int, str, str]]:
    """`ends` of processes that all have to end with status 0."""
    found = ends(processes)
    assert {status for status, _, _ in found.values()} == {0}, found
    return found


def uninterrupted(folder: Path, changes: dict[str, Any]) -> tuple[Path, Path]:
    """(run directory, text) of a run of two processes that nothing interrupts."""
    run_dir, text = folder / "run", write_text(folder / "text.txt")
    finished(launch_all(2, run_dir, text, changes))
    return run_dir, text
