"""Workers in processes of their own, asked in turn, and ratios of what they took at nearly the same
moment."""

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformer.files import write_text

HERE = Path(__file__).parent
# Where results are written; gpu_queue.py gives each of its entries a folder of its own.
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", HERE / "results"))
Answer = dict[str, Any]


class Worker:
    """A process that answers each line it reads with one line of JSON; its first line says what it
    is."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.about = self.read()

    def read(self) -> Answer:
        """The next line that the process writes."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise SystemExit(
                f"worker {self.name} ended with status {self.process.wait()}; its message stands"
                " above."
            )
        answer: Answer = json.loads(line)
        return answer

    def ask(self, command: str) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends the process and waits, so that its memory is free."""
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self.process.communicate("quit\n")
        self.process.wait()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Neighbours:
    """How much of this machine's CPU time went to other processes than the workers, since this was
    made (Linux)."""

    # above this share of the time a comparison flatters the side that waits less for its threads
    QUIET = 0.03

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.begin = self._ticks()

    def _ticks(self) -> tuple[int, int, int]:
        """(all, busy, the workers') clock ticks so far."""
        fields = [
            int(field)
            for field in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]
        ]
        stats = [
            Path(f"/proc/{w.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
            for w in self.workers
        ]
        own = sum(
            sum(map(int, stat.split()[11:15])) for stat in stats
        )  # with children that have ended
        return sum(fields), sum(fields) - fields[3] - fields[4], own

    def share(self) -> float:
        total, busy, own = (now - then for now, then in zip(self._ticks(), self.begin, strict=True))
        return max(busy - own, 0) / max(total, 1)


def verdict(share: float) -> str:
    """A sentence about the neighbours' share of the CPU during a measurement."""
    quiet = share <= Neighbours.QUIET
    return f"Other processes took {share:.0%} of the CPU" + (
        "." if quiet else ": do not trust these ratios, measure again."
    )


def python_worker(name: str, script: str, *flags: str, python: str = sys.executable) -> Worker:
    return Worker(name, [python, str(HERE / script), *flags])


def alternate(
    workers: Sequence[Worker], command: str, samples: int, warmups: int
) -> list[list[Answer]]:
    """Each worker's answers, asked one after the other, `warmups` rounds first and dropped."""
    rounds = [[worker.ask(command) for worker in workers] for _ in range(warmups + samples)]
    return [list(answers) for answers in zip(*rounds[warmups:], strict=True)]


def column(answers: Sequence[Answer], name: str) -> list[float]:
    return [answer[name] for answer in answers]


def paired_ratio(ours: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """How many times as fast we are: theirs / ours, median and range over the pairs."""
    ratios = [b / a for a, b in zip(ours, baseline, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def ratio_text(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |",
            flush=True,
        )


def write_table(
    path: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[str]], sentence: str = ""
) -> None:
    """Puts a sentence and a table between `<!-- NAME -->` and `<!-- /NAME -->` of a Markdown
    file."""
    text = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    first, last = text.find(begin), text.find(end)
    if not 0 <= first < last:
        raise SystemExit(f"{path} has no {begin} followed by {end}.")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        print_table(header, rows)
    body = f"\n{sentence}\n\n" if sentence else "\n"
    start = first + len(begin)
    write_text(path, f"{text[:start]}{body}{shown.getvalue()}{text[last:]}")


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """The flag that every benchmark has, to prove in seconds that it runs."""
    text = "tiny shapes and few samples, which prove that the benchmark runs; nothing is saved"
    parser.add_argument("--smoke", action="store_true", help=text)


def gpu_facts(parser: argparse.ArgumentParser, smoke: bool) -> Answer:
    """The GPU of this machine and the version of JAX; without one only a smoke test goes on."""
    import jax  # a worker without JAX imports this file too

    device = jax.devices()[0]
    if device.platform != "gpu" and not smoke:
        parser.error("jax sees no GPU here; --smoke proves the code without one")
    return {"device": device.device_kind, "versions": {"jax": jax.__version__}}


def save(name: str, result: Answer, smoke: bool) -> None:
    """Writes `results/NAME.json` with the date and the machine, but nothing of a smoke test, unless
    BENCHMARK_RESULTS names a folder for it."""
    if smoke and "BENCHMARK_RESULTS" not in os.environ:
        print(
            "A smoke test proves that the benchmark runs; its numbers say nothing and are not"
            " saved."
        )
        return
    path = RESULTS / f"{name}.json"
    write_result(path, result)
    print(f"written to {path}")


def write_result(path: Path, result: Answer) -> None:
    """Writes a result with the date and the machine before it, as results/*.json are."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    machine = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(load, 1),
        "python": platform.python_version(),
    }
    write_text(path, json.dumps({"date": now, "machine": machine, **result}, indent=1) + "\n")


def cpu_model() -> str:
    """The CPU's name, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
