"""What the loop costs beside its own compiled step: data, metrics, bar, checkpoint. `python
benchmarks/loop_overhead.py`

The quickstart's model is trained by `jf.train` (no evaluation, one checkpoint on the way) and by
calling the same compiled step on the same batches, placed beforehand; the two alternate, in turns
first, and each pair gives a ratio of tokens/s. Seconds are of the wall, from the end of the first
step to the end of the last, so a checkpoint's time counts.
"""

from jaxformer.cli import keep_memory

keep_memory()  # as train.py does, before JAX is imported

import argparse  # noqa: E402
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
from pairing import HERE, add_smoke, paired_ratio, print_table, ratio_text, save  # noqa: E402
from steps import Ready, ready, stamp_steps  # noqa: E402
from workloads import SMOKE_FIELDS, words_file  # noqa: E402

import jaxformer as jf  # noqa: E402

TARGET = 0.97
STAMPS: dict[int, float] = {}


def bare_seconds(bare: Ready, steps: int) -> float:
    """From the end of the first step to that of the last, from a fresh state on batches placed
    beforehand."""
    batches, state, begin = [bare.batch(i) for i in range(steps)], bare.state(), 0.0
    with jax.set_mesh(bare.mesh):
        for i, batch in enumerate(batches):
            state, metrics = bare.step(state, batch)
            if i == 0:
                metrics["loss"].block_until_ready()
                begin = time.perf_counter()
        jax.block_until_ready(state)
    return time.perf_counter() - begin


def loop_seconds(run: jf.RunConfig, folder: Path) -> float:
    """The same of a whole `jf.train`, in a new run directory, its bar drawn to nowhere."""
    STAMPS.clear()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        jf.train(dataclasses.replace(run, run=dataclasses.replace(run.run, dir=str(folder))))
    return STAMPS[run.train.steps] - STAMPS[1]


def benchmark_run(options: argparse.Namespace, scratch: str) -> jf.RunConfig:
    fields: dict[str, object] = {
        "run.dir": f"{scratch}/job",
        "run.progress": "bar",
        "run.sample_tokens": 0,
        "data.cache_dir": f"{scratch}/data",
        "train.steps": options.steps,
        "train.eval_every": 0,
        "train.checkpoint_every": options.steps // 2,
    }
    if options.smoke:
        fields |= SMOKE_FIELDS | {"data.train": words_file(Path(scratch))}
    fields["data.validation_fraction"] = 0
    return jf.load_config(
        options.config, [*(f"{name}={value}" for name, value in fields.items()), *options.rest]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each sample")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--config", default=str(HERE.parent / "configs/quickstart.py"))
    parser.add_argument("rest", nargs="*", help="fields of the config, as section.field=value")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.pairs = 4, 1

    stamp_steps(STAMPS)
    load = os.getloadavg()[0]
    taken: dict[str, list[float]] = {"loop": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="jaxformer-loop-") as scratch:
        run = benchmark_run(options, scratch)
        bare = ready(run)
        for pair in range(options.pairs + 1):  # the first is a warm-up
            for name in ("loop", "bare") if pair % 2 else ("bare", "loop"):
                if name == "bare":
                    seconds = bare_seconds(bare, run.train.steps)
                else:
                    seconds = loop_seconds(run, Path(scratch) / f"run{pair}")
                if pair:
                    taken[name].append(seconds)
    tokens = bare.tokens_per_step * (run.train.steps - 1)
    rates = {name: [tokens / value for value in seconds] for name, seconds in taken.items()}
    rows = [
        [n, f"{statistics.median(r):,.0f}", f"{min(r):,.0f} - {max(r):,.0f}"]
        for n, r in rates.items()
    ]
    print_table(["", "tokens/s", "range"], rows)
    ratio = paired_ratio(taken["loop"], taken["bare"])
    print(
        f"loop over bare: {ratio_text(ratio)}, must {TARGET}; {options.pairs} pairs of"
        f" {options.steps} steps; ",
        end="",
    )
    print(
        f"load average {load:.1f} before; jax {jax.__version__}, {jax.device_count()} x"
        f" {jax.devices()[0].device_kind}"
    )
    result = {
        "ratio": ratio,
        "tokens_per_second": rates,
        "load_before": load,
        "steps": options.steps,
    }
    save("loop_overhead", result, options.smoke)


if __name__ == "__main__":
    main()
