"""What the loop costs: tokens/s of `jf.train` (data, metrics, checkpoints on) beside the bare step, in turn.

    python benchmarks/loop_overhead.py [--steps 20] [--samples 5]

Each sample continues one run for so many steps, then runs the bare step as often. A checkpoint is saved in the middle of
every sample, and its time counts.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxformer.cli import keep_memory

keep_memory()

from jax_peer import Trainer  # noqa: E402  (what comes before must come before JAX)
from pairing import paired_ratio, ratio_text, save  # noqa: E402
from works import WORKS  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.config import RunConfig  # noqa: E402
from jaxformer.report import MetricsLog  # noqa: E402
from jaxformer.train import loop  # noqa: E402

Times = list[tuple[int, float]]


def clocked(times: Times) -> type[MetricsLog]:
    """A MetricsLog that also notes when each step was logged."""

    class Clocked(MetricsLog):
        def log(self, step: int, values: Mapping[str, Any]) -> None:
            super().log(step, values)
            times.append((step, time.perf_counter()))

    return Clocked


def loop_seconds(run: RunConfig) -> float:
    """Seconds a step, from the first step logged of this continuation to the last."""
    times: Times = []
    loop.MetricsLog = clocked(times)  # type: ignore[misc]
    jf.train(run)
    (first, begin), (last, end) = times[0], next(entry for entry in times if entry[0] == run.train.steps)
    return (end - begin) / (last - first)


def bare_seconds(trainer: Trainer, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    return (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of a sample")
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args()
    work = WORKS["small"]
    trainer = Trainer(work, "")
    bare_seconds(trainer, 2)
    inside, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(work.train, log_every=1, eval_every=0, eval_batches=1, checkpoint_every=options.steps // 2)
        run = replace(work, run=replace(work.run, dir=folder, progress="none", sample_tokens=0))
        for sample in range(1, options.samples + 1):
            last = sample * options.steps
            inside.append(loop_seconds(replace(run, train=replace(settings, steps=last))))
            bare.append(bare_seconds(trainer, options.steps))
    ratio = paired_ratio(inside, bare)
    tokens = work.train.batch_size * work.data.sequence_length
    best = [tokens / min(seconds) for seconds in (inside, bare)]
    print(f"tokens/s in the loop over the bare step: {ratio_text(ratio)}; best {best[0]:,.0f} and {best[1]:,.0f} tokens/s")
    save("loop_overhead", {"ratio": ratio, "loop_seconds": inside, "bare_seconds": bare})


if __name__ == "__main__":
    main()
