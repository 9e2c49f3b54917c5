"""How long a start takes: the import, and `python train.py CONFIG` to its first logged step.

    python benchmarks/startup.py [--config configs/quickstart.py] [--samples 3]

Three starts: all cold (nothing tokenized, nothing compiled), text ready but programs cold, and all warm.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairing import HERE, print_table, save

ROOT = HERE.parent


def import_seconds(module: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, cwd=ROOT)
    return time.perf_counter() - begin


def first_step_seconds(config: str, folder: Path) -> float:
    """From starting train.py to the first line of metrics.jsonl."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    flags = [
        "--run.dir",
        str(run_dir),
        "--run.compilation_cache",
        str(folder / "xla"),
        "--data.cache_dir",
        str(folder / "data"),
    ]
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "train.py", config, *flags], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        metrics = run_dir / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"train.py ended with status {process.returncode} before its first step")
            time.sleep(0.01)
        return time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args()
    imports: dict[str, list[float]] = {"jax": [], "jaxformer": []}
    for _ in range(2 * options.samples + 1):
        for module, seconds in imports.items():
            seconds.append(import_seconds(module))
    starts: dict[str, list[float]] = {"cold": [], "text ready, programs cold": [], "warm": []}
    for _ in range(options.samples):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            starts["cold"].append(first_step_seconds(options.config, folder))
            shutil.rmtree(folder / "xla", ignore_errors=True)
            starts["text ready, programs cold"].append(first_step_seconds(options.config, folder))
            starts["warm"].append(first_step_seconds(options.config, folder))
    medians = {f"import {module}": statistics.median(seconds[1:]) for module, seconds in imports.items()}
    medians |= {f"first logged step, {state}": statistics.median(seconds) for state, seconds in starts.items()}
    print_table(["what", "seconds"], [[what, f"{seconds:.2f}"] for what, seconds in medians.items()])
    print(f"jaxformer over jax: {medians['import jaxformer'] - medians['import jax']:+.2f} s")
    save("startup", {"config": options.config, "medians": medians, "imports": imports, "starts": starts})


if __name__ == "__main__":
    main()
