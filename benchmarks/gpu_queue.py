"""What is to be measured on a GPU, in the order of its worth, where one is at hand for minutes.

    python benchmarks/gpu_queue.py --seconds 540 --out /tmp/gpu

Each entry runs in a process of its own under a limit and writes OUT/gpu_NAME_DEVICE.json when it
ends: the commit, the device, and what it measured, with samples and medians; OUT/NAME.log has what
it printed. An entry that OUT or benchmarks/results has of the same commit and device is left out.
The queue stops before the time ends, and prints what ran and what is left. It installs nothing:
benchmarks/gpu_setup.sh does, and entries that need PyTorch wait until it has.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairing import HERE, Answer, print_table, write_result

SHORTEST = 15  # seconds; with less left nothing is begun
TORCH_ENVIRONMENT = Path(tempfile.gettempdir()) / "jaxformer-torch"  # gpu_setup.sh makes it
NO_BUFFERS = "--xla_gpu_enable_command_buffer="


@dataclass(frozen=True)
class Entry:
    """A command of the queue: its script and arguments, its limit in seconds, flags of XLA, whether
    it needs PyTorch, whether --smoke runs it, and a file of results/ that it goes on from."""

    number: int
    name: str
    command: str
    limit: int
    flags: str = ""
    torch: bool = False
    smoke: bool = False
    continues: str = ""


def entries() -> list[Entry]:
    found = []
    for name in ("gpt2_124m_gpu", "llama_1b_gpu"):
        command = f"gpu_profile.py {name}"
        first = name == "gpt2_124m_gpu"
        found.append(Entry(1, f"profile_{name}", command, 90, NO_BUFFERS, smoke=first))
    for name in ("gpt2_124m_gpu", "llama_1b_gpu"):
        command, first = f"gpu_profile.py {name}", name == "gpt2_124m_gpu"
        found.append(Entry(1, f"profile_{name}_torch", command, 120, torch=True, smoke=first))
    found.append(Entry(2, "deterministic", "gpu_deterministic.py", 240, smoke=True))
    found.append(Entry(3, "decode", "decode_gpu.py --rounds 3", 120, smoke=True))
    for kind in ("bfloat16", "int8", "nf4"):
        command = f"gpu_profile.py decode --weights {kind}"
        found.append(Entry(3, f"profile_decode_{kind}", command, 60, NO_BUFFERS))
    found.append(
        Entry(3, "decode_no_buffers", "decode_gpu.py --rounds 3 --batches 1", 90, NO_BUFFERS)
    )
    checks = "train_gpu.py --part checks --workloads gpt2_124m_gpu llama_1b_gpu"
    found.append(Entry(4, "checks", checks, 120))
    for name in ("gpt2_124m_gpu", "llama_1b_gpu"):
        found.append(Entry(4, f"train_{name}", timing(name), 180, torch=True))
    for name in (
        "gpt2_124m_packed",
        "bert_base_padded",
        "t5_small_padded",
        "llama_1b_window",
        "olmoe_4_layers",
    ):
        found.append(Entry(4, f"train_{name}", timing(name), 90))
    found.append(Entry(5, "variants", "gpu_variants.py", 300, smoke=True))
    for name in (
        "llama_1b_8k",
        "llama_1b_32k",
        "gpt2_124m_remat_names",
        "gpt2_124m_remat_dots",
        "gpt2_124m_remat_full",
    ):
        found.append(Entry(6, f"train_{name}", timing(name), 90))
    found.append(Entry(6, "attention", "gpu_variants.py --attention", 60, smoke=True))
    found.append(Entry(6, "board_10m", "board.py --task 10m", 600, continues="board.json"))
    return found


def timing(workload: str) -> str:
    return f"train_gpu.py --part times --rounds 2 --steps 20 --workloads {workload}"


def torch_python() -> str | None:
    """A Python with PyTorch, "" while gpu_setup.sh installs it, None where there is none."""
    if (TORCH_ENVIRONMENT / "ready").is_file():
        return str(TORCH_ENVIRONMENT / "bin" / "python")
    if importlib.util.find_spec("torch"):
        return sys.executable
    being_made = TORCH_ENVIRONMENT.is_dir() and not (TORCH_ENVIRONMENT / "failed").exists()
    return "" if being_made else None


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def device_kind() -> str:
    """The device's name by JAX, from a process that does not stay, since it takes memory."""
    code = "import jax; print(jax.devices()[0].platform, jax.devices()[0].device_kind)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"JAX does not start here:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


class Queue:
    """Runs entries until the time ends, and knows what became of each."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        self.slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
        self.end = time.monotonic() + options.seconds
        self.states: dict[str, str] = {}

    def left(self) -> float:
        return self.end - time.monotonic()

    def path(self, folder: Path, entry: Entry) -> Path:
        return folder / f"gpu_{entry.name}_{self.slug}.json"

    def is_known(self, entry: Entry) -> bool:
        """Whether a result of this commit and device exists that ended by itself."""
        for folder in (self.options.out, HERE / "results"):
            path = self.path(folder, entry)
            if path.is_file():
                found = json.loads(path.read_text(encoding="utf-8"))
                facts = (found["commit"], found["device"], found["state"])
                if facts == (self.options.commit, self.device, "ended"):
                    return True
        return False

    def run(self, queue: Sequence[Entry]) -> None:
        waiting = []
        for entry in queue:
            if self.is_known(entry):
                self.states[entry.name] = "known already"
            else:
                self.states[entry.name] = "left"
                waiting.append(entry)
        while waiting and self.left() > SHORTEST:
            python = torch_python()
            if python is None:
                for entry in waiting:
                    if entry.torch:
                        self.states[entry.name] = "left: no PyTorch here"
                waiting = [entry for entry in waiting if not entry.torch]
            ready = [entry for entry in waiting if python or not entry.torch]
            if not ready:  # all that is left waits for PyTorch, which is being installed
                time.sleep(1)
                continue
            waiting.remove(ready[0])
            self.run_entry(ready[0], python or "")

    def run_entry(self, entry: Entry, python: str) -> None:
        """Runs an entry and writes what it measured, also where it failed or had to be ended."""
        out: Path = self.options.out
        script, *arguments = entry.command.split()
        command = [sys.executable, str(HERE / script), *arguments]
        if script in ("gpu_profile.py", "train_gpu.py"):
            command += ["--torch-python", python if entry.torch else ""]
        command += ["--smoke"] if self.options.smoke else []
        limit = min(entry.limit, self.left() - SHORTEST / 3)
        print(f"{entry.number} {entry.name}: {limit:.0f} s at most", flush=True)
        with tempfile.TemporaryDirectory(prefix="jaxformer-entry-") as folder:
            if entry.continues:
                shutil.copy(HERE / "results" / entry.continues, folder)
            flags = f"{os.environ.get('XLA_FLAGS', '')} {entry.flags}".strip()
            environment = os.environ | {"BENCHMARK_RESULTS": folder, "XLA_FLAGS": flags}
            begin = time.monotonic()
            with open(out / f"{entry.name}.log", "w", encoding="utf-8") as log:
                state = ended(command, environment, log, limit)
            seconds = time.monotonic() - begin
            written = sorted(Path(folder).glob("*.json"))
            result = json.loads(written[0].read_text(encoding="utf-8")) if written else None
        self.states[entry.name] = f"{state} after {seconds:.0f} s"
        facts: Answer = {"commit": self.options.commit, "device": self.device, "state": state}
        facts |= {"entry": entry.name, "command": entry.command, "flags": entry.flags}
        write_result(self.path(out, entry), facts | {"seconds": seconds, "result": result})

    def table(self, queue: Sequence[Entry]) -> list[list[str]]:
        return [[str(entry.number), entry.name, self.states[entry.name]] for entry in queue]


def ended(command: list[str], environment: dict[str, str], log: Any, limit: float) -> str:
    """Runs a command with all that it starts; how it ended."""
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "out of time"
    return "ended" if status == 0 else f"failed with status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=540, help="time for everything")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--commit", default=commit(), help="where git does not say it")
    parser.add_argument("--entries", nargs="+", default=[], metavar="NAME", help="these alone")
    parser.add_argument(
        "--smoke", action="store_true", help="one entry of each kind in small, on a CPU too"
    )
    options = parser.parse_args()
    queue = entries()
    if unknown := {*options.entries} - {entry.name for entry in queue}:
        names = ", ".join(entry.name for entry in queue)
        parser.error(f"there is no entry {', '.join(sorted(unknown))}: choose of {names}")
    if options.entries:
        queue = [entry for entry in queue if entry.name in options.entries]
    elif options.smoke:
        queue = [entry for entry in queue if entry.smoke]
    if not options.commit:
        parser.error("git says no commit here: name it by --commit")
    if options.smoke and options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="jaxformer-gpu-queue-"))
    if options.out is None:
        parser.error("--out names the folder for the results")
    options.out.mkdir(parents=True, exist_ok=True)
    platform, device = device_kind().split(" ", 1)
    if platform != "gpu" and not options.smoke:
        parser.error(f"JAX sees no GPU here but {device}; --smoke proves the code without one")
    work = Queue(options, device)
    work.run(queue)
    print_table(["number", "entry", "state"], work.table(queue))
    failed = [name for name, state in work.states.items() if state.startswith("failed")]
    for name in failed:
        print(f"{name} failed; the end of {options.out / f'{name}.log'}:")
        print((options.out / f"{name}.log").read_text(encoding="utf-8")[-1500:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
