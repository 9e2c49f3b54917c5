"""How soon a user sees something: import time, and the time to the first logged step. `python
benchmarks/startup.py`

Every sample is a fresh process. `import jax` alternates with `import jax, jaxformer`. The
quickstart is started with nothing prepared (once), with the text prepared and no compiled program
(cold), and again with its programs in the cache (warm); the time runs from the start of the process
to the first line of metrics.jsonl, after which it is ended. `jaxformer plan` plans a model of 70B
parameters on 256 devices. On a machine that does other work too, the processor time beside it tells
more than the wall time.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pairing import HERE, add_smoke, print_table, save
from workloads import SMOKE_FIELDS, words_file

ROOT = HERE.parent
POLL_SECONDS = 0.005
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
FIRST, COLD, WARM = "nothing prepared", "no compiled program", "compiled programs cached"
TARGETS = {
    FIRST: ("", ""),
    COLD: ("10", "6"),
    WARM: ("6", "3"),
}  # must and goal, in seconds on two cores
PLAN = [
    *("plan", "configs/llama3_8b.py", "--device", "v5p", "--devices", "256", "--mesh.fsdp", "256"),
    *("--model.d_model", "8192", "--model.n_layers", "80", "--model.n_heads", "64"),
    *("--model.d_ff", "28672", "--train.batch_size", "1024"),
]
HEADER = ["what", "median", "range", "processor", "samples", "must", "goal"]

Sample = tuple[float, float]  # wall and processor seconds


def import_seconds(statement: str) -> float:
    """Wall time of a fresh Python that runs `statement`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=ROOT)
    return time.perf_counter() - begin


def first_step_seconds(scratch: Path, config: str, extra: Sequence[str]) -> Sample:
    """From the start of a run, in a new run directory, to its first logged step."""
    run_dir, output = scratch / "run", scratch / "output.txt"
    shutil.rmtree(run_dir, ignore_errors=True)
    fields = {
        "run.dir": run_dir,
        "data.cache_dir": scratch / "data",
        "run.compilation_cache": scratch / "programs",
    }
    flags = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "train.py", config, *flags, *extra]
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    metrics = run_dir / "metrics.jsonl"
    with output.open("w") as sink:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit(
                        f"{' '.join(command)} ended before its first"
                        f" step:\n{output.read_text()[-4000:]}"
                    )
                time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - begin
        finally:
            before = os.times()
            process.kill()
            process.wait()
        after = os.times()
    return (
        seconds,
        after.children_user - before.children_user + after.children_system - before.children_system,
    )


def plan_seconds() -> Sample:
    """Of a plan, with all imports."""
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "jaxformer", *PLAN]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user - before.children_user
    return time.perf_counter() - begin, used + after.children_system - before.children_system


def measure_imports(samples: int) -> tuple[list[float], list[float]]:
    """Samples of (`import jax`, what `import jaxformer` takes beyond it), after one pair
    unmeasured."""
    pairs = [
        (import_seconds("import jax"), import_seconds("import jax, jaxformer"))
        for _ in range(samples + 1)
    ][1:]
    return [jax for jax, _ in pairs], [both - jax for jax, both in pairs]


def measure_starts(options: argparse.Namespace) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {name: [] for name in TARGETS}
    with tempfile.TemporaryDirectory(prefix="jaxformer-startup-") as folder:
        scratch, extra = Path(folder), [*options.rest]
        if options.smoke:
            small = SMOKE_FIELDS | {"data.train": words_file(scratch), "train.log_every": 1}
            extra += [f"--{name}={value}" for name, value in small.items()]
        found[FIRST].append(first_step_seconds(scratch, options.config, extra))
        for _ in range(options.rounds):
            shutil.rmtree(scratch / "programs", ignore_errors=True)
            found[COLD].append(first_step_seconds(scratch, options.config, extra))
            found[WARM].append(first_step_seconds(scratch, options.config, extra))
    return found


def row(
    name: str, seconds: Sequence[float], processor: Sequence[float], targets: tuple[str, str]
) -> list[str]:
    used = f"{statistics.median(processor):.1f} s" if processor else ""
    spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
    return [name, f"{statistics.median(seconds):.2f} s", spread, used, str(len(seconds)), *targets]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=7, help="pairs of imports")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of a cold and a warm start")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument(
        "rest", nargs="*", help="fields of the config, after --, as train.py takes them"
    )
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.samples = options.rounds = 1

    load = os.getloadavg()[0]
    plain, extra = measure_imports(options.samples)
    plans = [plan_seconds() for _ in range(options.samples)]
    starts = measure_starts(options)
    table = [
        row("import jax", plain, (), ("", "")),
        row("import jaxformer, over import jax", extra, (), ("0.5", "0.1")),
    ]
    walls, processors = zip(*plans, strict=True)
    table.append(row("jaxformer plan, 70B on 256 v5p", walls, processors, ("3", "")))
    for name, targets in TARGETS.items():
        wall, processor = zip(*starts[name], strict=True)
        table.append(row(f"first logged step, {name}", wall, processor, targets))
    print_table(HEADER, table)
    versions = {name: version(name) for name in PACKAGES}
    print(
        f"{options.config}, {os.cpu_count()} cores; load average {load:.1f} before,"
        f" {os.getloadavg()[0]:.1f} after; ",
        end="",
    )
    print(
        f"Python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
    )
    found = {"import jax": plain, "jaxformer over jax": extra, "plan": plans, "first step": starts}
    result = {"config": options.config, "load_before": load, "versions": versions, "seconds": found}
    save("startup", result, options.smoke)


if __name__ == "__main__":
    main()
